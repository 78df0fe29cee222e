"""Matrix products: every format against the library's own call, random sizes, and experts.

Five parts, ``--only`` picks among them by name:

host
    the host's microseconds of an eager call of each format, of a product that takes no time, and
    of torch's own call of the library: the goal is for the difference.
products
    ``scaled_mm`` of every format against the library's call for it (the ratio is the library's
    time to ours) and against bf16 ``torch.mm``.
sweep
    random M, N, K, awkward ones among them: the error against float64 in parts of what the
    format's rounding allows, and the time against bf16 from 512 rows on.
grouped
    ``scaled_grouped_mm`` against a loop of ``scaled_mm`` over experts whose sizes the host knows.
tiles
    our kernel of grouped products with each of its tiles: rows, columns, warps, stages (GPUs only).

A line that fails is kept as a failure, and the run goes on.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry

from .environment import environment
from .gemm_cases import (
    BUDGET_MS,
    EXPERTS,
    PRODUCTS,
    SIZES,
    Product,
    Sizes,
    library,
    operands,
    ours,
    sample,
)
from .gemm_grouped import grouped, grouped_table, tiles
from .timing import device_time, host_time, times_in_turns

GOAL_RATIO, GOAL_HOST_US, GOAL_BLOCK_TFLOPS = 0.98, 12.0, 1100.0
SLOWER, FROM_ROWS = 1.05, 512
ROUNDS = 3
LARGEST = {"cuda": 8192, "cpu": 64}
SMALL = Sizes(256, 256, 256)
CHUNK = 2048
"""Rows of a product that are checked at a time: their float64 values fit any card."""
HALF_ULP = 2.0**-8  # of bfloat16
SUMS = {"reference": 4 * 2.0**-24, "library": 2.0**-12, "dequantize": 2.0**-7 + 2.0**-11}
"""What a route may lose of a sum of magnitudes: fp32 roundings; the bits below the largest term
that Hopper's tensor cores drop; and both operands rounded to bf16 (2^-8 each), with the sum."""


@dataclass(frozen=True)
class Row:
    """One product at one size; times in microseconds, None where there is no such call."""

    product: str
    where: str
    sizes: Sizes
    route: str
    us: float
    tflops: float
    library_us: float | None
    ratio: float | None
    bf16_us: float

    @property
    def missed(self) -> bool:
        """Whether a goal is missed; they are for what the library has a call for."""
        if self.library_us is None:
            return False
        of_blocks = "128" in self.product and self.tflops < GOAL_BLOCK_TFLOPS
        slow = self.ratio is not None and self.ratio < GOAL_RATIO
        return slow or of_blocks


@dataclass(frozen=True)
class Host:
    """Host time of an eager call and of the library's, in microseconds; None where it has none."""

    product: str
    route: str
    us: float
    library_us: float | None
    overhead_us: float | None

    @property
    def missed(self) -> bool:
        """Whether our part of a call takes too long."""
        return self.overhead_us is not None and self.overhead_us > GOAL_HOST_US


@dataclass(frozen=True)
class Sample:
    """One product of the sweep; ``error`` is the worst element's in parts of its bound."""

    product: str
    sizes: Sizes
    route: str
    error: float
    us: float | None
    bf16_us: float | None

    @property
    def wrong(self) -> bool:
        """Whether an element is beyond its bound, or NaN."""
        return not self.error <= 1

    @property
    def slow(self) -> bool:
        """Whether bf16 is faster by more than is allowed."""
        return bool(self.us and self.bf16_us and self.us > SLOWER * self.bf16_us)


def route_of(product: Product, call: Callable[[], Any]) -> str:
    """Return the name of the route that a call takes, as ``explain`` is told it."""
    op = registry.contract(f"inductor_ext::{product.op}")
    seen: list[str] = []
    with _Calls(op.op, seen, op.why):
        call()
    return seen[0]


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Ask an op's contract, at a call of the op, which route it takes."""

    def __init__(self, op: Any, seen: list[str], why: Any) -> None:
        super().__init__()
        self._op, self._seen, self._why = op, seen, why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._op:
            self._seen.append(self._why(*args, **(kwargs or {})).partition(":")[0])
        return func(*args, **(kwargs or {}))


def measure(product: Product, where: str, sizes: Sizes, device: torch.device) -> Row:
    """Time our call, the library's and bf16's of one product."""
    a, b, x, w = operands(product, sizes, device)
    call = ours(product, a, b)
    route = route_of(product, call)
    calls: list[Callable[[], Any]] = [call, partial(torch.mm, x, w.t())]
    calls += [library(product, a, b)] if route == "library" else []
    budget = BUDGET_MS[device.type]
    us, bf16_us, *rest = times_in_turns(calls, device, rounds=ROUNDS, budget_ms=budget)
    library_us = rest[0] if rest else None
    tflops = 2 * math.prod(sizes) / us / 1e6
    return Row(
        product.name, where, sizes, route, round(us, 1), round(tflops, 3),
        library_us and round(library_us, 1), library_us and round(library_us / us, 3),
        round(bf16_us, 1),
    )  # fmt: skip


def loss_of(product: Product, route: str, k: int) -> float:
    """Return what a route may lose of the sum of magnitudes.

    Sums taken in the tensor core drop 2^-13 of the magnitudes so far, half of all on the average,
    in each of their K / 32 steps; otherwise those of 128 columns are added up outside of it.
    """
    if route == "library" and product.op == "scaled_mm_int8":  # int32 sums
        return SUMS["reference"]
    if route == "library" and product.fast:
        return max(SUMS["library"], 2.0**-13 * k / 64)
    return SUMS[route]


def error(product: Product, a: ixt.Quantized, b: ixt.Quantized, got: Tensor, route: str) -> float:
    """Return the worst element's error in parts of its bound, NaN if there is one.

    The bound: what the route may lose of the sum of magnitudes, half an ulp of the result, and
    what dequantizing to fp32 here loses of the operands (2^-24 each).
    """
    loss = 2.0**-22 + loss_of(product, route, a.codes.shape[-1])
    wide_b = ixt.dequantize(b, product.b, torch.float32).double().t()
    wide_a = ixt.dequantize(a, product.a, torch.float32)
    worst = torch.zeros((), dtype=torch.float64, device=got.device)
    for start in range(0, got.shape[0], CHUNK):
        rows = wide_a[start : start + CHUNK].double()
        value, magnitude = rows @ wide_b, rows.abs() @ wide_b.abs()
        bound = (1 + HALF_ULP) * loss * magnitude + HALF_ULP * value.abs() + 2.0**-25
        parts = (got[start : start + CHUNK].double() - value).abs() / bound
        worst = torch.maximum(worst, parts.amax())
    return float(worst)


def check(product: Product, sizes: Sizes, seed: int, device: torch.device) -> Sample:
    """Compare a product with float64; its time is taken where a goal is for it."""
    a, b, x, w = operands(product, sizes, device, seed)
    call = ours(product, a, b)
    route = route_of(product, call)
    found = error(product, a, b, call(), route)
    us = bf16_us = None
    if sizes.m >= FROM_ROWS:
        us = round(device_time(call, device, budget_ms=30), 1)
        bf16_us = round(device_time(partial(torch.mm, x, w.t()), device, budget_ms=30), 1)
    return Sample(product.name, sizes, route, round(found, 4), us, bf16_us)


def host(product: Product, device: torch.device) -> Host:
    """Time the host in eager calls of a small product, ours and the library's."""
    a, b, _, _ = operands(product, SMALL, device)
    call = ours(product, a, b)
    route = route_of(product, call)
    time = partial(host_time, device=device, calls=2000 if device.type == "cuda" else 50)
    us = time(call)
    if route != "library":
        return Host(product.name, route, round(us, 1), None, None)
    library_us = time(library(product, a, b))
    return Host(product.name, route, round(us, 1), round(library_us, 1), round(us - library_us, 1))


Lines = Iterator[tuple[str, Callable[[], Any]]]
"""What is measured, and how."""


def lines(part: str, samples: int, device: torch.device) -> Lines:
    """Yield the lines of a part."""
    if part == "host":
        for product in PRODUCTS:
            yield product.name, partial(host, product, device)
    elif part == "products":
        for where, sizes in SIZES[device.type].items():
            for product in PRODUCTS:
                yield f"{product.name} {sizes}", partial(measure, product, where, sizes, device)
    elif part == "sweep":
        for seed, (product, sizes) in enumerate(sample(samples, LARGEST[device.type])):
            yield f"{product.name} {sizes}", partial(check, product, sizes, seed, device)
    elif part == "grouped":
        for experts in EXPERTS[device.type]:
            yield from grouped(experts, device)
    elif device.type == "cuda":
        for experts in EXPERTS["cuda"]:
            yield from tiles(experts, device)


def host_table(rows: list[Host]) -> Table:
    """Return the host's times; red where the goal is missed."""
    head = ("format", "route", "host us", "library us", "overhead us")
    drawn = Table(*head, title="an eager call of scaled_mm")
    for row in rows:
        cells = (row.product, row.route, row.us, row.library_us, row.overhead_us)
        told = ("-" if cell is None else str(cell) for cell in cells)
        drawn.add_row(*told, style="bold red" if row.missed else None)
    return drawn


def products_table(rows: list[Row]) -> Table:
    """Return the table of the products; red where a goal is missed."""
    head = ("where", "M x N x K", "format", "route", "us", "TFLOP/s", "library us", "ratio",
            "bf16 us")  # fmt: skip
    drawn = Table(*head, title="scaled_mm; the ratio is the library's time to ours")
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.where != row.where:
            drawn.add_section()
        cells = (row.where, str(row.sizes), row.product, row.route, row.us, row.tflops,
                 row.library_us, row.ratio, row.bf16_us)  # fmt: skip
        told = ("-" if cell is None else str(cell) for cell in cells)
        drawn.add_row(*told, style="bold red" if row.missed else None)
    return drawn


def sweep_table(samples: list[Sample]) -> Table:
    """Return the worst errors and the slowest of each format."""
    head = ("format", "products", "worst error / bound", "at", "wrong", "timed", "slow",
            "worst time to bf16's", "at")  # fmt: skip
    drawn = Table(*head, title="random sizes")
    for name in dict.fromkeys(s.product for s in samples):
        mine = [s for s in samples if s.product == name]
        worst = max(mine, key=lambda s: (s.wrong, s.error))
        timed = [(s.us / s.bf16_us, s) for s in mine if s.us and s.bf16_us]
        slowest = max(timed, key=lambda pair: pair[0]) if timed else None
        wrong, slow = sum(s.wrong for s in mine), sum(s.slow for s in mine)
        drawn.add_row(
            name, str(len(mine)), str(worst.error), str(worst.sizes), str(wrong), str(len(timed)),
            str(slow), f"{slowest[0]:.2f}" if slowest else "-",
            str(slowest[1].sizes) if slowest else "-",
            style="bold red" if wrong or slow else None,
        )  # fmt: skip
    return drawn


PARTS: dict[str, Callable[[list[Any]], Table]] = {
    "host": host_table,
    "products": products_table,
    "sweep": sweep_table,
    "grouped": grouped_table,
    "tiles": grouped_table,
}


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table a part, keep JSON; 1 if a product is wrong, or a line failed."""
    cuda = torch.cuda.is_available()
    device = torch.device(arguments.device or ("cuda" if cuda else "cpu"))
    chosen = [part for part in PARTS if arguments.only in part]
    if not chosen:
        print(f"no part's name contains {arguments.only!r}; the parts are {', '.join(PARTS)}")
        return 2
    console, about = Console(width=165), environment(device)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    report: dict[str, Any] = {"environment": about, "failures": []}
    tables, wrong = [], False
    for part in chosen:
        rows: list[Any] = []
        report[part] = []
        for label, line in lines(part, arguments.samples, device):
            try:
                with torch.no_grad():
                    rows.append(line())
            except RuntimeError as failure:
                message = str(failure).partition(chr(10))[0]
                report["failures"].append({"part": part, "line": label, "error": message})
                console.print(f"  {part}, {label} FAILED: {message}")
            else:
                report[part].append(asdict(rows[-1]))
                console.print(f"  {part} {len(rows)}: {rows[-1]}")
            # Kept after each line: a run that is cut short has measured something.
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
        wrong |= any(isinstance(row, Sample) and row.wrong for row in rows)
        tables.append(PARTS[part](rows))
    console.print(*tables, sep="\n")
    console.print(f"{len(report['failures'])} lines failed; numbers kept in {arguments.json}")
    return int(wrong or bool(report["failures"]))
