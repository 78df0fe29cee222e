"""The CPU kernels against their formula: in eager PyTorch, and compiled by Inductor.

Rivals take turns, so that other work on the machine meets all of them, and the best time of each
counts: on a shared machine the disturbed calls say nothing.  With one thread its CPU time is taken,
which leaves out the time that other programs have the core.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry

E4M3 = torch.float8_e4m3fn
TURN = 0.05
"""Seconds that short calls are repeated for."""
RIVALS = ("eager", "inductor", "lowered")
_Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One op and its arguments."""

    name: str
    op: str
    arguments: tuple[Any, ...]


def _ops(x: Tensor) -> Iterator[Case]:
    """Yield the quantize ops in the order of the table."""
    scale = torch.tensor(37.5)
    yield Case("static", "quantize_fp8_static", (x, scale, E4M3))
    yield Case("static, both", "quantize_fp8_static_both", (x, scale, E4M3))
    yield Case("tensor", "quantize_fp8_tensor", (x, E4M3))
    yield Case("tensor, both", "quantize_fp8_tensor_both", (x, E4M3))
    yield Case("row", "quantize_fp8_row", (x, E4M3))
    yield Case("column", "quantize_fp8_column", (x, E4M3))
    yield Case("column, transposed", "quantize_fp8_column", (x, E4M3, True))
    for m, k, transposed in ((1, 128, False), (128, 1, True), (128, 128, False)):
        name = f"{m} x {k}" + (", transposed" if transposed else "")
        yield Case(name, "quantize_fp8_block", (x, E4M3, m, k, transposed))
    yield Case("1 x 128, both", "quantize_fp8_block_both", (x, E4M3, 128, False))
    yield Case("128 x 128, both", "quantize_fp8_block_both", (x, E4M3, 128, True))
    tail = ("ceil", "gemm")
    yield Case("MX along K", "quantize_mxfp8", (x, E4M3, 1, 32, False, *tail))
    yield Case("MX along M", "quantize_mxfp8", (x, E4M3, 32, 1, False, *tail))
    yield Case("MX along M, transposed", "quantize_mxfp8", (x, E4M3, 32, 1, True, *tail))
    yield Case("MX 32 x 32", "quantize_mxfp8", (x, E4M3, 32, 32, False, *tail))
    yield Case("MX both", "quantize_mxfp8_both", (x, E4M3, False, True, *tail))
    yield Case("INT8 tensor", "quantize_int8_tensor", (x,))
    yield Case("INT8 row", "quantize_int8_row", (x,))
    yield Case("INT8 1 x 128", "quantize_int8_group", (x, 128))
    yield Case("INT4 symmetric 128", "quantize_int4_symmetric", (x, 128))
    yield Case("INT4 asymmetric 128", "quantize_int4_asymmetric", (x, 128))
    amax = x.abs().amax().float()
    yield Case("NVFP4 along K", "quantize_nvfp4", (x, amax, 1, 16, False, "gemm"))
    yield Case("NVFP4 along M", "quantize_nvfp4", (x, amax, 16, 1, True, "gemm"))


def cases(x: Tensor) -> Iterator[Case]:
    """Yield the quantize ops, and the dequantize ops on some of their results."""
    yield from _ops(x)
    ops, bf16 = torch.ops.inductor_ext, torch.bfloat16
    for m, k in ((1, 128), (128, 128)):
        codes, scales = ops.quantize_fp8_block(x, E4M3, m, k)
        name = f"dequantize {m} x {k}"
        yield Case(name, "dequantize_fp8_block", (codes, scales, m, k, bf16))
    codes, scales = ops.quantize_mxfp8(x, E4M3, 1, 32, False, "ceil", "gemm")
    yield Case("dequantize MX", "dequantize_mxfp8", (codes, scales, 1, 32, bf16, "gemm"))


@dataclass(frozen=True)
class Row:
    """Best times of a case in milliseconds; None for what Inductor cannot compile."""

    case: str
    ours: float
    eager: float
    inductor: float | None
    lowered: float | None


def best_times(calls: dict[str, _Call], rounds: int, seconds: float) -> dict[str, float]:
    """Return the best time of each call in milliseconds, from interleaved rounds.

    Args:
        rounds: how many turns each has, at most.  A turn is one call, or several short ones.
        seconds: end after this time, if each has had three turns.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    begin = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - begin > seconds:
            break
        for name, call in calls.items():
            turn = time.perf_counter()
            while True:
                start = clock()
                call()
                best[name] = min(best[name], clock() - start)
                if time.perf_counter() - turn > TURN:
                    break
    return {name: value * 1e3 for name, value in best.items()}


def _compiled(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, ours: bool
) -> _Call | None:
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    with ixt.config.patch(enabled=ours, always_lower=ours):
        try:
            compiled(*arguments)
        except RuntimeError:  # torch 2.11 on some transposes: "unexpected group"
            return None
    return partial(compiled, *arguments)


def measure(case: Case, rounds: int, seconds: float) -> Row:
    """Measure one op and its rivals."""
    op = getattr(torch.ops.inductor_ext, case.op).default
    formula = registry.contract(op).reference
    torch.compiler.reset()
    compiled = {
        "inductor": _compiled(formula, case.arguments, ours=False),
        "lowered": _compiled(op, case.arguments, ours=True),
    }
    calls: dict[str, _Call] = {
        "ours": partial(op, *case.arguments),
        "eager": partial(formula, *case.arguments),
        **{name: call for name, call in compiled.items() if call},
    }
    best = best_times(calls, rounds, seconds)
    return Row(case.name, best["ours"], best["eager"], best.get("inductor"), best.get("lowered"))


def _environment() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "inductor_ext": ixt.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, keep JSON; returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console, environment = Console(width=110), _environment()
    torch.manual_seed(0)
    x = torch.randn(arguments.rows or 4096, arguments.columns or 4096).bfloat16()
    console.print(
        f"{environment['cpu']}, {environment['threads']} threads, {environment['vectors']}, torch "
        f"{environment['torch']}; {x.shape[0]} x {x.shape[1]} bf16 to e4m3; best times, in ms"
    )
    copy = best_times({"copy": x.clone}, 20, arguments.seconds)["copy"]
    table = Table("op", "ours", "eager PyTorch", "Inductor, of the formula", "our lowering")
    measured: list[Row] = []
    with torch.no_grad():
        for case in cases(x):
            if arguments.only not in case.name:
                continue
            row = measure(case, arguments.rounds, arguments.seconds)
            measured.append(row)
            console.print(f"  {row.case}: {row.ours:.2f} ms", style="dim")
            table.add_row(row.case, f"{row.ours:.2f}", *map(partial(_cell, row), RIVALS))
    console.print(table)
    console.print(f"a copy of the input: {copy:.2f} ms; (x times ours)")
    report = {
        "environment": environment,
        "shape": list(x.shape),
        "copy_ms": copy,
        "ops": [asdict(row) for row in measured],
    }
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"numbers kept in {arguments.json}")
    return 0


def _cell(row: Row, rival: str) -> str:
    milliseconds = getattr(row, rival)
    if milliseconds is None:
        return "does not compile"
    return f"{milliseconds:.2f}  x {milliseconds / row.ours:.1f}"
