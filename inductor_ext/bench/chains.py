"""Producer -> quantize chains: plain Inductor, ours compiled, ours eager, against the floor.

The floor counts each input byte and each output byte once, at the speed of a copy measured in
the same run; ``n`` is the number of elements, so "3n" is 2 bytes read and 1 written per element.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt

from .chart import chart
from .environment import environment
from .timing import copy_bandwidth, device_time, host_time

E4M3 = torch.float8_e4m3fn
TENSOR, ROW = ixt.FP8(granularity="tensor"), ixt.FP8(granularity="row")
_Fn = Callable[..., Any]


@dataclass(frozen=True)
class Chain:
    """A chain of ops: ours, and the same formula in plain PyTorch."""

    name: str
    floor: int
    ours: _Fn
    plain: _Fn
    inputs: tuple[str, ...]
    goal: int | None = None


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize rows as Llama does: fp32 statistics, rounded, times the weight."""
    v = x.float()
    normal = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normal.to(x.dtype) * weight


def _plain_static(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-448, 448).to(E4M3)


def _plain_current(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448.0 / amax.float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale.reciprocal()


def _plain_row(x: Tensor) -> tuple[Tensor, Tensor]:
    return _plain_current(x, x.abs().amax(-1, keepdim=True))


def _plain_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    return _plain_current(x, x.abs().amax())


def _static(x: Tensor, scale: Tensor) -> Tensor:
    return ixt.quantize(x, TENSOR, scale).codes


def _row(x: Tensor) -> tuple[Tensor, Tensor]:
    return ixt.quantize(x, ROW)[:2]


def _tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    return ixt.quantize(x, TENSOR)[:2]


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def chains() -> Iterator[Chain]:
    """Yield the chains in the order of the table."""
    yield Chain("static", 3, _static, _plain_static, ("x", "scale"), 96)
    yield Chain(
        "static, with amax", 3,
        lambda x, s: tuple(ixt.quantize(x, TENSOR, s)),
        lambda x, s: (_plain_static(x, s), s.reciprocal(), x.abs().amax().float()),
        ("x", "scale"),
    )  # fmt: skip
    yield Chain("row", 3, _row, _plain_row, ("x",), 96)
    yield Chain("tensor", 5, _tensor, _plain_tensor, ("x",), 93)
    yield Chain(
        "dequantize row", 3,
        lambda q, s: ixt.dequantize((q, s), ROW),
        lambda q, s: (q.float() * s).to(torch.bfloat16),
        ("codes", "row_scale"),
    )  # fmt: skip
    kinds: tuple[tuple[str, int, _Fn, _Fn, tuple[str, ...], int, int], ...] = (
        ("static", 3, _static, _plain_static, ("scale",), 94, 95),
        ("row", 3, _row, _plain_row, (), 92, 93),
        ("tensor", 5, _tensor, _plain_tensor, (), 90, 88),
    )
    for kind, floor, ours, plain, extra, norm_goal, act_goal in kinds:
        yield Chain(
            f"RMSNorm -> {kind}", floor,
            lambda x, w, *s, q=ours: q(rms_norm(x, w), *s),
            lambda x, w, *s, q=plain: q(rms_norm(x, w), *s),
            ("x", "weight", *extra), norm_goal,
        )  # fmt: skip
        yield Chain(
            f"SiLU*mul -> {kind}", floor + 2,
            lambda x, y, *s, q=ours: q(_swiglu(x, y), *s),
            lambda x, y, *s, q=plain: q(_swiglu(x, y), *s),
            ("x", "y", *extra), act_goal,
        )  # fmt: skip


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


def _tensors(rows: int, columns: int, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(0)
    bf16 = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(rows, columns, **bf16)
    codes, row_scale = _row(x)
    return {
        "x": x,
        "y": torch.randn(rows, columns, **bf16),
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
                times[column] = device_time(partial(compiled, *arguments), device)
        times["eager"] = device_time(lambda: chain.ours(*arguments), device)
    share = {column: round(100 * floor_us / time, 1) for column, time in times.items()}
    return Row(
        chain.name, f"{chain.floor}n", round(floor_us, 1),
        round(times["plain"], 1), round(times["compiled"], 1), round(times["eager"], 1),
        share["plain"], share["compiled"], share["eager"], chain.goal,
    )  # fmt: skip


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
    tensors = _tensors(rows, columns, device)
    measured: list[Row] = []
    for chain in chains():
        if arguments.only not in chain.name:
            continue
        row = _measure(chain, tensors, speed)
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
