"""The CPU kernels of block formats where their tiles, vectors and threads end.

The values and roundings are the business of the other tests; here the formula in PyTorch is the
reference, and the sizes are those of kernels/cpu/tiles.h, one less and one more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_ext import kernels, registry
from inductor_ext.testing import require_equal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(127, 257), (129, 255), (160, 320), (5, 4097), (131, 8200), (9, 65), (1, 1)]


pytestmark = pytest.mark.skipif(kernels.load().cpu is None, reason="the CPU library is not built")


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random values of many magnitudes, some NaN and infinite, the same on every call."""
    generator = torch.Generator().manual_seed(rows * 10007 + columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-12, 13, x.shape, generator=generator).float())
    x[torch.rand(x.shape, generator=generator) < 1e-3] = float("nan")
    x[torch.rand(x.shape, generator=generator) < 1e-4] = float("inf")
    return x.to(dtype)


def calls(x: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield ops that together run every loop of the CPU kernels."""
    for m, k, transposed in ((1, 128, False), (1, 32, True), (64, 1, True), (32, 1, False)):
        yield "quantize_fp8_block", (x, E4M3, m, k, transposed)
    for size in (32, 64, 128):
        yield "quantize_fp8_block_both", (x, E5M2, size, True, 0.0, False, "gemm")
        yield "quantize_fp8_block_both", (x, E4M3, size, False, 0.0, True, "gemm")
    for transposed in (False, True):
        yield "quantize_fp8_column", (x, E4M3, transposed)
        for mode, layout in (("ceil", "plain"), ("floor", "gemm")):
            yield "quantize_mxfp8_both", (x, E4M3, False, transposed, mode, layout)
            yield "quantize_mxfp8_both", (x, E5M2, True, transposed, mode, layout)
    yield "quantize_fp8_tensor_both", (x.nan_to_num(0.0, 1.0, -1.0), E4M3)
    yield "quantize_fp8_static_both", (x, torch.tensor([3.7]), E5M2)


def dequantizations(x: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield dequantize ops on the results of the formulas."""
    for m, k in ((1, 64), (32, 1), (128, 128)):
        made = registry.contract("inductor_ext::quantize_fp8_block").reference(x, E4M3, m, k)
        yield "dequantize_fp8_block", (*made, m, k, x.dtype)
    for m, k in ((1, 32), (32, 1), (32, 32)):
        for layout in ("plain", "gemm"):
            formula = registry.contract("inductor_ext::quantize_mxfp8").reference
            made = formula(x, E5M2, m, k, False, "ceil", layout)
            yield "dequantize_mxfp8", (*made, m, k, x.dtype, layout)


def check(x: Tensor) -> None:
    """Compare every op with its formula, bit for bit."""
    for name, arguments in (*calls(x), *dequantizations(x)):
        contract = registry.contract(f"inductor_ext::{name}")
        got, want = contract.op(*arguments), contract.reference(*arguments)
        if isinstance(got, Tensor):
            got, want = (got,), (want,)
        require_equal(
            name, "CPU kernel against the formula", got, want, args=arguments,
            nan_equal=tuple(t.dtype.itemsize > 1 for t in got),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_ends_of_tiles(size: tuple[int, int], dtype: torch.dtype) -> None:
    check(matrix(*size, dtype))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check(matrix(300, 520))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ["baseline", "v3", "v4"])
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    """Each in a process of its own: the choice is made once, on the first call."""
    environment = {**os.environ, "INDUCTOR_EXT_CPU_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-W", "error::inductor_ext.errors.InductorExtWarning", __file__],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_unknown_instruction_set_is_refused() -> None:
    code = (
        "import torch, inductor_ext;"
        "torch.ops.inductor_ext.quantize_fp8_row(torch.ones(1, 1), torch.float8_e4m3fn)"
    )
    environment = {**os.environ, "INDUCTOR_EXT_CPU_ISA": "mmx"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert "`INDUCTOR_EXT_CPU_ISA` must be baseline, v3 or v4, got mmx" in done.stderr


if __name__ == "__main__":
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        check(matrix(131, 300, kind))
