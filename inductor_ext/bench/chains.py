"""Measure producer -> quantize chains: plain Inductor, ours compiled, ours eager, and the floor.

Shares are of the floor's bytes at the speed of a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import inductor_ext as ixt

from .chain_cases import E4M3, ROW, TENSOR, Chain, chains
from .chart import chart
from .environment import environment
from .timing import copy_bandwidth, host_time, times_in_turns


@dataclass(frozen=True)
class Row:
    """One measured line; times in microseconds, shares in percent of the floor's speed."""

    chain: str
    floor: str
    floor_us: float
    plain_us: float
    compiled_us: float
    eager_us: float
    plain_percent: float
    compiled_percent: float
    eager_percent: float
    goal_percent: int | None


def tensors(rows: int, columns: int, device: torch.device) -> dict[str, Tensor]:
    """Return what the chains take, random, by name."""
    torch.manual_seed(0)
    bf16 = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(rows, columns, **bf16)
    codes, row_scale = ixt.quantize(x, ROW)[:2]
    return {
        "x": x,
        "y": torch.randn(rows, columns, **bf16),
        "z": torch.randn(rows, columns, **bf16),
        "weight": torch.randn(columns, **bf16),
        "scale": torch.tensor(37.5, device=device),
        "codes": codes,
        "row_scale": row_scale,
    }


def _measure(chain: Chain, tensors: dict[str, Tensor], speed: float) -> Row:
    device, n = tensors["x"].device, tensors["x"].numel()
    arguments = [tensors[name] for name in chain.inputs]
    floor_us = chain.floor * n / speed * 1e6
    times = {}
    with torch.no_grad():
        for column, function, enabled in (
            ("plain", chain.plain, False),
            ("compiled", chain.ours, True),
        ):
            with ixt.config.patch(enabled=enabled):
                torch.compiler.reset()
                compiled = torch.compile(function, fullgraph=True, dynamic=False)
                times[column] = _time(partial(compiled, *arguments), device)
        times["eager"] = _time(lambda: chain.ours(*arguments), device)
    share = {column: round(100 * floor_us / time, 1) for column, time in times.items()}
    return Row(
        chain.name, f"{chain.floor}n", round(floor_us, 1),
        round(times["plain"], 1), round(times["compiled"], 1), round(times["eager"], 1),
        share["plain"], share["compiled"], share["eager"], chain.goal,
    )  # fmt: skip


def _time(call: Callable[[], Any], device: torch.device) -> float:
    """Return microseconds, the median of three runs: the host may stumble during one of them."""
    return times_in_turns([call], device, rounds=3, budget_ms=100)[0]


def host_times(device: torch.device) -> dict[str, float]:
    """Return the host's microseconds of one eager call of each op, on a small tensor."""
    x = torch.randn(16, 4096, device=device).bfloat16()
    scale, inductor_ext_ops = torch.tensor(37.5, device=device), torch.ops.inductor_ext
    codes, row_scale = ixt.quantize(x, ROW)[:2]
    static = inductor_ext_ops.quantize_fp8_static.default
    calls: dict[str, Callable[[], Any]] = {
        "op quantize_fp8_static": lambda: static(x, scale, E4M3),
        "op quantize_fp8_row": lambda: inductor_ext_ops.quantize_fp8_row.default(x, E4M3),
        "op quantize_fp8_tensor": lambda: inductor_ext_ops.quantize_fp8_tensor.default(x, E4M3),
        "op dequantize_fp8": lambda: inductor_ext_ops.dequantize_fp8.default(
            codes, row_scale, torch.bfloat16
        ),
        "api quantize row": lambda: ixt.quantize(x, ROW),
        "api quantize static": lambda: ixt.quantize(x, TENSOR, scale),
        "api dequantize": lambda: ixt.dequantize((codes, row_scale), ROW),
        "for comparison: torch.mul": lambda: x * scale,
    }
    with torch.no_grad():
        return {name: round(host_time(call, device), 2) for name, call in calls.items()}


def run(arguments: argparse.Namespace) -> int:
    """Measure the chains, print the table, keep JSON if asked; returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    cuda = torch.cuda.is_available()
    device = torch.device(arguments.device or ("cuda" if cuda else "cpu"))
    rows = arguments.rows or (16384 if device.type == "cuda" else 2048)
    columns = arguments.columns or (8192 if device.type == "cuda" else 1024)
    console = Console(width=130)
    speed = copy_bandwidth(rows * columns, device)
    about = environment(device)
    console.print(
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}; "
        f"{rows} x {columns} bf16; copy {speed / 1e12:.3f} TB/s read + written"
    )
    titles = ("chain", "floor", "floor us", "plain Inductor", "ours compiled", "ours eager")
    table = Table(*titles, "goal")
    inputs = tensors(rows, columns, device)
    measured: list[Row] = []
    for chain in chains():
        if arguments.only not in chain.name:
            continue
        row = _measure(chain, inputs, speed)
        measured.append(row)
        console.print(f"  {row.chain}: {row.compiled_us} us, {row.compiled_percent} %", style="dim")
        table.add_row(
            row.chain, row.floor, f"{row.floor_us}",
            f"{row.plain_us} us  {row.plain_percent} %",
            f"{row.compiled_us} us  {row.compiled_percent} %",
            f"{row.eager_us} us  {row.eager_percent} %",
            "" if row.goal_percent is None else f"{row.goal_percent} %",
        )  # fmt: skip
    console.print(table)
    host = host_times(device)
    hosts = Table("host time of an eager call, 16 x 4096", "us")
    for name, microseconds in host.items():
        hosts.add_row(name, f"{microseconds}")
    console.print(hosts)
    report = {
        "environment": about,
        "shape": [rows, columns],
        "copy_bytes_per_second": speed,
        "chains": [asdict(row) for row in measured],
        "host_us": host,
    }
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"numbers kept in {arguments.json}")
    if arguments.svg:
        title = (
            f"{about['device']}, torch {about['torch']}, {rows} x {columns} bf16: "
            f"% of the floor at the copy's {speed / 1e12:.2f} TB/s (red: goal)"
        )
        Path(arguments.svg).write_text(chart([asdict(row) for row in measured], title))
    return 0
