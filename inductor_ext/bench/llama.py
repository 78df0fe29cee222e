"""Four Llama-like layers from end to end: bf16 and FP8, eager and compiled, opaque and fused.

Wall-clock times of a forward pass, the device synchronized before and after it, so that at 8 tokens
the host's time counts.  The floor is what the same products and the same attention take by
themselves in this run, and every other byte at the copy's speed.  Compiling takes most of the time
of this benchmark: each case has a process of its own, and is timed when all are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import inductor_ext as ixt

from . import llama_block
from .environment import environment
from .llama_layer import Linear, Sizes
from .timing import copy_bandwidth, device_time

TOKENS = (8192, 8)
WARM_SECONDS = 0.5
HOW = {
    "eager": "our ops, eager",
    "plain": "plain PyTorch, compiled",
    "break": "our ops, compiled, a graph break at every linear",
    "opaque": "our ops, compiled, plugin off",
    "plugin": "our ops, compiled, plugin on",
}


@dataclass(frozen=True)
class Case:
    """A row of the table; recipe "bf16" is the unquantized block."""

    tokens: int
    recipe: str
    kept: bool
    how: str
    overhead: bool  # mode="reduce-overhead"
    attention: str = "sdpa"

    @property
    def name(self) -> str:
        """Return for instance "8192 row kept plugin reduce-overhead"."""
        parts = [self.recipe, "kept" * self.kept, self.how, "reduce-overhead" * self.overhead]
        if self.attention != "sdpa":
            parts.append(f"attention {self.attention}")
        return " ".join((str(self.tokens), *filter(None, parts)))


@dataclass(frozen=True)
class Counts:
    """What torch.compile makes of a case."""

    graphs: int
    breaks: int
    guards: int
    kernels: int


@dataclass(frozen=True)
class Measured:
    """A case and what came out; ``peak_mib`` above the weights and the input."""

    case: Case
    ms: float
    peak_mib: float
    floor_ms: float
    counts: Counts | None


def cases(tokens: tuple[int, ...]) -> Iterator[Case]:
    """Yield the rows, those of one recipe together."""
    for count in tokens:
        yield Case(count, "bf16", True, "eager", False)
        yield from (Case(count, "bf16", True, "plain", overhead) for overhead in (False, True))
        for recipe, kept in ((r, k) for r in llama_block.RECIPES for k in (False, True)):
            yield Case(count, recipe, kept, "eager", False)
            for how in list(HOW)[1:]:
                if how == "plain" and llama_block.RECIPES[recipe].plain is None:
                    continue
                yield from (Case(count, recipe, kept, how, o) for o in (False, True))
            for attention in ("bf16", "fp8"):
                yield Case(count, recipe, kept, "plugin", count < 1024, attention)


def _linear(case: Case) -> Linear:
    if case.recipe == "bf16":
        return llama_block.bf16_linear
    recipe = llama_block.RECIPES[case.recipe]
    if case.how == "plain":
        return llama_block.plain_linear(recipe, case.kept)
    return llama_block.our_linear(recipe, case.kept, broken=case.how == "break")


def _sizes(device: torch.device) -> tuple[Sizes, int]:
    on_gpu = device.type == "cuda"
    return (llama_block.SIZES, llama_block.LAYERS) if on_gpu else (llama_block.SMALL, 1)


def _built(case: Case, device: torch.device) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function, not compiled, and its arguments."""
    sizes, layers = _sizes(device)
    p = llama_block.parameters(
        sizes, layers, device, llama_block.RECIPES.get(case.recipe), case.kept
    )
    x = torch.randn(1, case.tokens, sizes.width, device=device).bfloat16()
    attend = llama_block.ATTENTION[case.attention]
    return llama_block.Block(p, sizes, _linear(case), attend), (x,)


def _ready(case: Case, device: torch.device) -> Callable[[], Any]:
    """Return the call, compiled and warm if it is to be."""
    function, arguments = _built(case, device)
    if case.how != "eager":
        torch.compiler.reset()
        mode = "reduce-overhead" if case.overhead else None
        function = torch.compile(function, fullgraph=case.how != "break", dynamic=False, mode=mode)
    call = partial(function, *arguments)
    for _ in range(3):  # compile; warm up; record the CUDA graph
        call()
    return call


def _plugin(case: Case) -> Any:
    return ixt.config.patch(enabled=case.how in ("break", "plugin"))


def _counts(case: Case, device: torch.device) -> Counts | None:
    if case.how == "eager":
        return None
    function, arguments = _built(case, device)
    found = ixt.explain(function, *arguments, print=False, dynamic=False)
    kernels = sum(kernel.launches for graph in found.graphs for kernel in graph.kernels)
    return Counts(len(found.graphs), len(found.graph_breaks), len(found.guards), kernels)


Result = tuple[float, float, Counts | None]
"""Milliseconds of a call, its peak in MiB, and what torch.compile makes of it."""


def measure(
    case: Case, device_name: str, turn: Callable[[], AbstractContextManager[Any]]
) -> Result:
    """Compile a case and time it.

    Args:
        turn: what is ready to be timed waits on entering it, while others are timed.
    """
    device = torch.device(device_name)
    on_gpu = device.type == "cuda"

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    with torch.no_grad(), _plugin(case):
        counts = _counts(case, device)
        call = _ready(case, device)
        synchronize()
        with turn():
            before = torch.cuda.memory_allocated(device) if on_gpu else 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            times: list[float] = []
            begin = time.perf_counter()  # a card that had nothing to do is slow at first
            while on_gpu and time.perf_counter() - begin < WARM_SECONDS:
                call()
                synchronize()
            for _ in range(15):
                start = time.perf_counter()
                call()
                synchronize()
                times.append(time.perf_counter() - start)
            peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    return statistics.median(times) * 1e3, peak / 2**20, counts


def _products(case: Case, device: torch.device) -> float:
    """Return the microseconds of one layer's four products, each by itself."""
    sizes, _ = _sizes(device)
    recipe = llama_block.RECIPES.get(case.recipe)
    total = 0.0
    for rows, columns in sizes.projections.values():
        x = torch.randn(case.tokens, columns, device=device).bfloat16()
        w = torch.randn(rows, columns, device=device).bfloat16()
        if recipe is None:
            call = partial(F.linear, x, w)
        else:
            a, b = ixt.quantize(x, recipe.activations), ixt.quantize(w, recipe.weights)
            formats = (recipe.activations, recipe.weights)
            call = partial(ixt.scaled_mm, a, b, *formats, fast_accum=recipe.fast_accum)
        total += device_time(call, device, budget_ms=30)
    return total


def _floor(case: Case, device: torch.device, copy: float) -> float:
    """Return the milliseconds of products, attention, and all other bytes at the copy's speed."""
    sizes, layers = _sizes(device)
    shape = (1, sizes.heads, case.tokens, sizes.head)
    q, k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(3))
    attention = partial(llama_block.ATTENTION[case.attention], q, k, v)
    alone = _products(case, device) + device_time(attention, device, budget_ms=30)
    weights = 0 if case.kept else 3
    moved = llama_block.traffic(sizes, layers, case.tokens, weights)
    return layers * alone / 1e3 + moved / copy * 1e3


def run(arguments: argparse.Namespace) -> int:
    """Measure the cases, print them, keep JSON."""
    from rich.console import Console

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokens = (arguments.rows,) if arguments.rows else TOKENS
    chosen = [case for case in cases(tokens) if arguments.only in case.name]
    if device.type != "cuda":  # PyTorch's own product of rows, and CUDA graphs
        chosen = [case for case in chosen if not case.overhead and _runs_on_a_cpu(case)]
    results = _all_in_turns(chosen, str(device), arguments.jobs if device.type == "cuda" else 1)
    copy = copy_bandwidth(1 << 27 if device.type == "cuda" else 1 << 20, device)
    floors: dict[tuple[Any, ...], float] = {}
    measured, failures = [], {}
    with torch.no_grad():
        for case, result in zip(chosen, results, strict=True):
            if isinstance(result, str):
                failures[case.name] = result
                continue
            ms, peak, counts = result
            key = (case.tokens, case.recipe, case.kept, case.attention)
            if key not in floors:
                with _plugin(case):
                    floors[key] = _floor(case, device, copy)
            measured.append(Measured(case, ms, peak, floors[key], counts))
    about = environment(device)
    console = Console(width=120)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    console.print(f"copy {copy / 1e12:.3f} TB/s", _table(measured))
    rows = [asdict(row) | {"name": row.case.name} for row in measured]
    report = {"environment": about, "copy_bytes_per_second": copy, "rows": rows}
    report["failures"] = failures
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    for name, failure in failures.items():
        console.print(f"{name} FAILED: {failure}")
    return int(bool(failures))


def _runs_on_a_cpu(case: Case) -> bool:
    return case.recipe == "bf16" or case.how != "plain"


def _all_in_turns(chosen: list[Case], device: str, jobs: int) -> list[Result | str]:
    """Measure all cases, ``jobs`` of which compile at a time, each in a process of its own."""
    if jobs == 1:
        return [measure(case, device, contextlib.nullcontext) for case in chosen]
    spawn = multiprocessing.get_context("spawn")
    results: list[Result | str] = []
    for first in range(0, len(chosen), jobs):
        part = chosen[first : first + jobs]
        shared = spawn.Barrier(len(part)), spawn.Lock()
        with ProcessPoolExecutor(len(part), spawn, _share, shared) as pool:
            results += pool.map(_in_turn, part, [device] * len(part))
    return results


_shared: list[Any] = []
"""In a process that measures: a barrier that all pass when they are ready, and a lock."""


def _share(*shared: Any) -> None:
    _shared[:] = shared


def _in_turn(case: Case, device: str) -> Result | str:
    """Measure a case when all are ready, and none else is measured; or say what went wrong."""
    ready, lock = _shared
    waited = False

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        nonlocal waited
        waited = True
        ready.wait()
        with lock:
            yield

    try:
        return measure(case, device, turn)
    except Exception as failure:
        if not waited:  # the others are not to wait for this one
            ready.wait()
        return f"{type(failure).__name__}: {failure}".partition("\n")[0]


def _table(measured: list[Measured]) -> Any:
    from rich.table import Table

    table = Table(
        "tokens", "recipe", "weights", "how", "graphs", "breaks", "guards", "kernels", "ms",
        "floor ms", "MiB",
    )  # fmt: skip
    for row in measured:
        case, counts = row.case, row.counts
        numbers = ["", "", "", ""]
        if counts is not None:
            numbers = [
                str(n) for n in (counts.graphs, counts.breaks, counts.guards, counts.kernels)
            ]
        how = "bf16, " + ("eager" if case.how == "eager" else "compiled")
        table.add_row(
            str(case.tokens), case.recipe,
            "" if case.recipe == "bf16" else "kept" if case.kept else "each step",
            (how if case.recipe == "bf16" else HOW[case.how])
            + (", reduce-overhead" if case.overhead else "")
            + ("" if case.attention == "sdpa" else f", our attention, {case.attention}"),
            *numbers, f"{row.ms:.3f}", f"{row.floor_ms:.3f}", f"{row.peak_mib:.0f}",
        )  # fmt: skip
    return table
