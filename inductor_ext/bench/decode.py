"""Products of few rows with quantized weights: time, share of a copy, gain over bf16.

Each format, shape and number of rows is measured on every route that takes it (``config.
weight_only``): "kernel" reads the weight once, "dequantize" writes it out in bf16 and calls cuBLAS.
The share is that of the weight's bytes, scales included, at the speed of a large copy of the same
run.  Goals: issue "GEMM and attention", for shapes of 16 MB and more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import inductor_ext as ixt
from inductor_ext.ops._routes_weight_only import MOST_ROWS

from .environment import environment
from .timing import copy_bandwidth, device_time

LARGE = 16384 * 8192
"""Elements of the copy."""
SHAPES = {
    "cuda": ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672)),
    "cpu": ((256, 512),),
}
"""(N, K)"""
BUDGET_MS = 20
ROWS = {"cuda": (1, 4, 16, 64, 512), "cpu": (1, 32)}


@dataclass(frozen=True)
class Kind:
    """A format and what it must reach: a share of the copy in percent, a gain over bf16."""

    name: str
    format: ixt.Format
    percent: int | None = None
    gain: float | None = None


KINDS = (
    Kind("INT8 row", ixt.INT8(), 80, 1.7),
    Kind("INT8 128", ixt.INT8(granularity="group"), 80, 1.7),
    Kind("FP8 tensor", ixt.FP8(granularity="tensor"), 80, 1.7),
    Kind("FP8 row", ixt.FP8(), 80, 1.7),
    Kind("FP8 1x128", ixt.FP8(granularity="block"), 80, 1.7),
    Kind("FP8 128x128", ixt.FP8(granularity="square"), 80, 1.7),
    Kind("MXFP8", ixt.MXFP8(), 80, 1.7),
    Kind("INT4 128", ixt.INT4(), 75, 2.8),
    Kind("INT4 128 asymmetric", ixt.INT4(symmetric=False), 75, 2.8),
    Kind("INT4 32", ixt.INT4(group=32)),
    Kind("NVFP4", ixt.NVFP4()),
)


@dataclass(frozen=True)
class Row:
    """One product; times in microseconds, ``us`` by route.

    ``percent`` and ``gain`` are the faster route's: bytes of the weight over its time, of the copy;
    the time of ``F.linear`` in bf16 over its time.
    """

    kind: str
    n: int
    k: int
    rows: int
    bytes: int
    us: dict[str, float]
    bf16_us: float
    route: str
    percent: float
    gain: float
    missed: bool


def routes(rows: int, device: torch.device) -> tuple[str, ...]:
    """Return the routes that take so many rows; the CPU has one."""
    if device.type != "cuda":
        return ("auto",)
    return (*(("kernel",) if rows <= MOST_ROWS else ()), "dequantize")


def measure(kind: Kind, x: Tensor, w: Tensor, q: ixt.Quantized, copy: float) -> Row:
    """Time one product on every route, and ``F.linear`` of the bf16 weight."""
    us = {}
    for route in routes(len(x), x.device):
        with ixt.config.patch(weight_only=route):
            us[route] = _time(lambda: ixt.weight_only_mm(x, q, kind.format), x.device)
    bf16 = _time(lambda: F.linear(x, w), x.device)
    size = sum(t.nbytes for t in q if t is not None)
    route = min(us, key=lambda name: us[name])
    percent, gain = 100 * size / (us[route] * 1e-6) / copy, bf16 / us[route]
    few = len(x) <= MOST_ROWS and x.is_cuda
    missed = few and (percent < (kind.percent or 0) or gain < (kind.gain or 0))
    rounded = {name: round(value, 2) for name, value in us.items()}
    return Row(
        kind.name, w.shape[0], w.shape[1], len(x), size, rounded, round(bf16, 2), route,
        round(percent, 1), round(gain, 2), missed,
    )  # fmt: skip


def _time(call: Callable[[], Any], device: torch.device) -> float:
    return device_time(call, device, budget_ms=BUDGET_MS)


def _rows(arguments: argparse.Namespace, device: torch.device, copy: float) -> Iterator[Row]:
    kinds = [kind for kind in KINDS if arguments.only.lower() in kind.name.lower()]
    for n, k in arguments.shape or SHAPES[device.type]:
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5
        for kind in kinds:
            q = ixt.quantize(w, kind.format)
            for m in ROWS[device.type]:
                x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
                yield measure(kind, x, w, q, copy)


def table(rows: list[Row], copy: float) -> Table:
    """Return what is printed."""
    shown = Table(title=f"x (M, K) @ W (N, K); copy {copy / 1e12:.3f} TB/s")
    for name in ("N x K", "format", "M", "us by route", "bf16 us", "% of copy", "gain", ""):
        shown.add_column(name, justify="left" if name in ("format", "us by route") else "right")
    for row in rows:
        us = ", ".join(f"{name} {value}" for name, value in row.us.items())
        shown.add_row(
            f"{row.n} x {row.k}", row.kind, str(row.rows), us, str(row.bf16_us),
            f"{row.percent}", f"{row.gain}", "missed" if row.missed else "",
        )  # fmt: skip
    return shown


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and keep; returns the exit code."""
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not any(arguments.only.lower() in kind.name.lower() for kind in KINDS):
        print(f"no format's name contains {arguments.only!r}; names are like {KINDS[0].name!r}")
        return 2
    console, about = Console(width=140), environment(device)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    copy = copy_bandwidth(LARGE if device.type == "cuda" else 1 << 20, device)
    report: dict[str, Any] = {"environment": about, "copy_bytes_per_second": copy, "products": []}
    rows = []
    with torch.no_grad():
        for row in _rows(arguments, device, copy):
            rows.append(row)
            console.print(
                f"  {row.n} x {row.k} {row.kind}, M {row.rows}: {row.us}, {row.percent} %"
            )
            report["products"].append(asdict(row))
            # Kept after each: a run that is cut short has measured something.
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    console.print(table(rows, copy))
    console.print(f"numbers kept in {arguments.json}")
    return 0
