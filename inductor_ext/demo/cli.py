"""``python -m inductor_ext demo``: run MiniLM six ways and print one table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from . import model as M
from .page import html
from .report import Report, table, to_json
from .variants import Bench, Variant

SENTENCES = Path(__file__).with_name("sentences.txt")
MAX_SENTENCES = 256
MAX_REPEAT, MIN_REPEAT, TIMING_S = 10, 3, 30
_WIDTH = 132  # of the table where the output is not a terminal


def parser() -> argparse.ArgumentParser:
    """Return the options of the demo."""
    p = argparse.ArgumentParser(
        prog="python -m inductor_ext demo",
        description="Embed sentences with MiniLM: fp32, bf16 and FP8, with custom ops behind a "
        "graph break, opaque, and fused by the plugin. Prints one table.",
    )
    cuda = torch.cuda.is_available()
    p.add_argument("--device", default="cuda" if cuda else "cpu", help="cpu or cuda (%(default)s)")
    p.add_argument("--layers", type=_positive, help="run the first N encoder layers (all six)")
    p.add_argument(
        "--sentences",
        type=Path,
        default=SENTENCES,
        metavar="FILE",
        help='one sentence a line, at most 256; "#" starts a comment (a text that comes along)',
    )
    p.add_argument(
        "--repeat",
        type=_positive,
        metavar="N",
        help=f"timed batches of each (up to {MAX_REPEAT}, fewer if {TIMING_S} s are over)",
    )
    p.add_argument("--html", type=Path, metavar="FILE", help="write a page with the fused kernel")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code: 0, or 2 where an argument or a package is missing."""
    args = parser().parse_args(argv)
    err = Console(stderr=True)
    try:
        sentences = read_sentences(args.sentences)
        device = _device(args.device)
        for path in (args.html, args.json):
            if path is not None and not path.resolve().parent.is_dir():
                raise ValueError(f"there is no folder {path.resolve().parent} to write {path} in")
        report = run(sentences, device, args.layers, args.repeat, err)
    except (M.DemoDependencyError, ValueError, OSError) as error:
        err.print(f"demo: {error}", style="red", markup=False, highlight=False)
        return 2
    out = Console()
    if not out.is_terminal:
        out = Console(width=_WIDTH)
    out.print(table(report))
    if args.json is not None:
        args.json.write_text(json.dumps(to_json(report), indent=2) + "\n", encoding="utf-8")
    if args.html is not None:
        args.html.write_text(html(report), encoding="utf-8")
        err.print(f"wrote {args.html}", markup=False, highlight=False)
    return 0


def run(
    sentences: Sequence[str],
    device: torch.device,
    layers: int | None,
    repeat: int | None,
    console: Console,
) -> Report:
    """Load the model, compile and time every variant, showing progress on ``console``."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("loading MiniLM", total=None)
        bench = Bench(M.load(device), sentences, layers)
        progress.update(task, total=len(bench.variants) + (repeat or MAX_REPEAT))
        for variant in bench.variants:
            progress.update(task, description=_doing(variant))
            bench.prepare(variant)
            progress.advance(task)
        progress.update(task, description="timing all of them in turn")
        for _ in _rounds(repeat):
            for variant in bench.variants:  # in turn: a busy machine slows all of them alike
                bench.time_once(variant)
            progress.advance(task)
        agreement = bench.agreement()
    return Report(
        device=_device_name(device),
        layers=bench.layer_count,
        sentences=len(sentences),
        tokens=bench.batch.ids.shape[1],
        up_features=bench.up_features,
        repeat=len(bench.results["fp32"].times_ms),
        results=list(bench.results.values()),
        agreement=agreement,
    )


def read_sentences(path: Path) -> list[str]:
    """Read one sentence a line; blank lines and lines that start with "#" are left out.

    Raises:
        ValueError: fewer than 4 sentences (there would be no three neighbours), or too many.
    """
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    sentences = [line for line in lines if line and not line.startswith("#")]
    if not 4 <= len(sentences) <= MAX_SENTENCES:
        raise ValueError(f"{path} must hold 4 to {MAX_SENTENCES} sentences, got {len(sentences)}")
    return sentences


def _rounds(repeat: int | None) -> Iterator[int]:
    start = time.perf_counter()
    for i in range(repeat or MAX_REPEAT):
        if repeat is None and i >= MIN_REPEAT and time.perf_counter() - start > TIMING_S:
            return
        yield i


def _doing(variant: Variant) -> str:
    return ("compiling and running: " if variant.compiled else "running: ") + variant.label


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: this PyTorch sees no GPU")
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError("--device cuda: FP8 GEMMs need a GPU of compute capability 8.9 or up")
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU with {torch.get_num_threads()} threads"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
