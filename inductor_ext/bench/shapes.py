"""Sampled shapes: is a chain anywhere slower with the plugin than without?

Times are those inside a CUDA graph, so that kernels are compared and not hosts.  Compiling takes
most of the time of this benchmark: processes of their own do it first, into Inductor's cache.

Inductor tries a kernel's block sizes on the first call, with the host in the way: of a kernel of
2 us it may keep one of 7 us, with the plugin or without.  So each case is tuned several times, on a
card that does nothing else, in turns, and the median counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import inductor_ext as ixt

from .._compat import inductor_config, inductor_utils
from .chain_cases import Chain, chains
from .chains import tensors
from .environment import environment
from .timing import graph_time

SAMPLES = 60
MOST_ELEMENTS = 1 << 27
ALLOWED = 1.03
TUNINGS = 3


@dataclass(frozen=True)
class Case:
    """A chain by its name, at a shape."""

    chain: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Row:
    """One measured case, in microseconds; ``ratio`` is ours to plain Inductor's."""

    case: Case
    plain_us: float
    ours_us: float

    @property
    def ratio(self) -> float:
        """Return how many times as long as plain Inductor's ours takes."""
        return self.ours_us / self.plain_us


def sample(count: int = SAMPLES, seed: int = 0) -> Iterator[Case]:
    """Yield cases: rows from 1 to 65536, columns from 64 to 16384, odd multiples among them."""
    rng = random.Random(seed)
    every = list(chains())
    for number in range(count):
        chain = every[number % len(every)]
        block = 128 if "128" in chain.name else 64
        columns = block * max(1, round(2 ** rng.uniform(0, 14) / block))
        rows = min(round(2 ** rng.uniform(0, 16)), MOST_ELEMENTS // columns)
        if "both" in chain.name or "128x128" in chain.name or "MXFP8 M" in chain.name:
            rows = max(1, rows // 128) * 128  # plain PyTorch's formulas have no ragged blocks
        yield Case(chain.name, rows, columns)


def _compiled(case: Case, ours: bool, device: torch.device) -> partial[Any]:
    chain = _named(case.chain)
    values = tensors(case.rows, case.columns, device)
    torch.compiler.reset()
    function = torch.compile(chain.ours if ours else chain.plain, fullgraph=True, dynamic=False)
    return partial(function, *(values[name] for name in chain.inputs))


def _named(name: str) -> Chain:
    return next(chain for chain in chains() if chain.name == name)


def _run(case: Case, ours: bool, device: torch.device, timed: bool) -> float:
    choose_again = inductor_config.patch(autotune_local_cache=False)
    with torch.no_grad(), ixt.config.patch(enabled=ours), choose_again:
        inductor_utils.clear_caches()
        call = _compiled(case, ours, device)
        call()
        return graph_time(call) if timed else 0.0


def _measured(case: Case, device: torch.device) -> Row:
    times = [[_run(case, ours, device, True) for ours in (False, True)] for _ in range(TUNINGS)]
    return Row(case, *(statistics.median(of) for of in zip(*times, strict=True)))


def _prepare(work: tuple[Case, bool, str]) -> None:
    case, ours, device = work
    _run(case, ours, torch.device(device), timed=False)


def run(arguments: argparse.Namespace) -> int:
    """Measure the cases, print them worst first, keep JSON; 1 if one is slower than allowed."""
    from rich.console import Console
    from rich.table import Table

    if not torch.cuda.is_available():
        print("bench shapes needs a GPU: it compares kernels in CUDA graphs")
        return 2
    device = torch.device(arguments.device or "cuda")
    cases = [case for case in sample() if arguments.only in case.chain]
    work = [(case, ours, str(device)) for case in cases for ours in (False, True)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
        list(pool.map(_prepare, work))
    measured = [_measured(case, device) for case in cases]
    measured.sort(key=lambda row: -row.ratio)
    console = Console(width=110)
    about = environment(device)
    table = Table("chain", "rows", "columns", "plain us", "ours us", "ours / plain")
    for row in measured:
        table.add_row(
            row.case.chain, str(row.case.rows), str(row.case.columns),
            f"{row.plain_us:.1f}", f"{row.ours_us:.1f}", f"{row.ratio:.3f}",
            style="red" if row.ratio > ALLOWED else None,
        )  # fmt: skip
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), table)
    slower = sum(row.ratio > ALLOWED for row in measured)
    console.print(f"worst {measured[0].ratio:.3f}; {slower} of {len(measured)} above {ALLOWED}")
    rows = [asdict(row) | {"ratio": row.ratio} for row in measured]
    report = {"environment": about, "shapes": rows}
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return int(slower > 0)
