"""``python -m inductor_ext.bench.nvfp4 [file]``: the NVFP4 kernels against a copy of the same run.

Times are medians of ``triton.testing.do_bench`` on random bfloat16 data.  A share is that of the
floor, each input byte read once and each output byte written once, at the copy's speed.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext.ops.nvfp4 import (
    amax_hadamard,
    dequantize_nvfp4,
    quantize_nvfp4,
    quantize_nvfp4_both,
)

from .timing import copy_bandwidth, device_time

SHAPES = ((16384, 8192), (8192, 4096), (4096, 14336))
IN, CODES = 2.0, 0.5 + 1 / 16  # bytes an element
Case = tuple[str, float, Callable[..., Any], tuple[Any, ...]]


def cases(x: Tensor) -> Iterator[Case]:
    """Yield (name, bytes an element, function, arguments) of everything that is timed."""
    amax, row = x.float().abs().amax(), x.float().abs().amax(1, keepdim=True)
    column = x.float().abs().amax(0).view(-1, 1)
    rng = torch.tensor([1, 2], device=x.device)
    one, square, both = IN + CODES, IN + CODES - 15 / 256, IN + 2 * CODES
    q, qq = quantize_nvfp4, quantize_nvfp4_both
    yield "along K", one, q, (x, amax, 1, 16)
    yield "along K, gemm scales", one, q, (x, amax, 1, 16, False, "gemm")
    yield "along K, amax a row", one, q, (x, row, 1, 16, False, "gemm")
    yield "along K, stochastic", one, q, (x, amax, 1, 16, False, "gemm", False, rng)
    yield "along K, Hadamard", one, q, (x, amax, 1, 16, False, "gemm", True)
    yield "16x16", square, q, (x, amax, 16, 16)
    yield "16x16, gemm scales", one, q, (x, amax, 16, 16, False, "gemm")
    yield "along M, transposed", one, q, (x, amax, 16, 1, True)
    yield "along M, gemm scales", one, q, (x, amax, 16, 1, True, "gemm")
    yield "along M, amax a column", one, q, (x, column, 16, 1, True, "gemm")
    yield "along M, stochastic", one, q, (x, amax, 16, 1, True, "gemm", False, rng)
    yield "along M, Hadamard", one, q, (x, amax, 16, 1, True, "gemm", True)
    yield "16x16, transposed", one, q, (x, amax, 16, 16, True, "gemm")
    yield "both", both, qq, (x, amax, amax, False, "gemm")
    yield "both, Hadamard", both, qq, (x, amax, amax, False, "gemm", True)
    yield "both, stochastic", both, qq, (x, amax, amax, False, "gemm", False, rng)
    yield "both, 16x16", both, qq, (x, amax, amax, True, "gemm")
    yield "amax of the Hadamard transform along M", IN, amax_hadamard, (x, True)
    yield "amax of the Hadamard transform along K", IN, amax_hadamard, (x, False)
    codes, scales = q(x, amax, 1, 16)
    yield "dequantize", one, dequantize_nvfp4, (codes, scales, amax, 1, 16, torch.bfloat16)
    codes, scales = q(x, amax, 1, 16, False, "gemm")
    gemm = (codes, scales, amax, 1, 16, torch.bfloat16, "gemm")
    yield "dequantize, gemm scales", one, dequantize_nvfp4, gemm


def measure(shape: tuple[int, int], compiled: bool) -> list[dict[str, Any]]:
    """Time every case of one shape, in eager mode and, where asked, lowered."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    copy = copy_bandwidth(x.numel(), device)
    rows = []
    for name, size, function, args in cases(x):
        floor = x.numel() * size / copy * 1e6
        time = device_time(lambda f=function, a=args: f(*a), device)  # type: ignore[misc]
        row = {"shape": shape, "case": name, "us": time, "share": floor / time, "copy": copy}
        if compiled:
            torch.compiler.reset()
            run = torch.compile(function, fullgraph=True, dynamic=False)
            with ixt.config.patch(enabled=True, always_lower=True):
                run(*args)
                row["lowered_us"] = device_time(lambda f=run, a=args: f(*a), device)  # type: ignore[misc]
        rows.append(row)
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """Return the measurements as text."""
    lines = []
    for row in rows:
        line = f"{row['shape']!s:15} {row['case']:40} {row['us']:8.1f} us {row['share']:7.1%}"
        if "lowered_us" in row:
            line += f"   lowered {row['lowered_us']:8.1f} us"
        lines.append(line + f"   copy {row['copy'] / 1e12:.3f} TB/s")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write JSON to the file that is named."""
    card = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {card}"
    rows = [row for i, shape in enumerate(SHAPES) for row in measure(shape, compiled=i == 0)]
    print(versions)
    print(report(rows))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"on": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
