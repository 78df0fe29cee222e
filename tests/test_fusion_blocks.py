"""What the plain lowerings of block formats fuse into, counted for an H200 that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu

E4M3 = torch.float8_e4m3fn
fp8, mx = blocks.op_of("quantize_fp8_block"), blocks.op_of("quantize_mxfp8")
fp8_both, mx_both = blocks.op_of("quantize_fp8_block_both"), blocks.op_of("quantize_mxfp8_both")
column = blocks.op_of("quantize_fp8_column")
tensor_both = blocks.op_of("quantize_fp8_tensor_both")
from_fp8, from_mx = blocks.op_of("dequantize_fp8_block"), blocks.op_of("dequantize_mxfp8")


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def kernels(fn: Callable[..., Any], *args: Tensor, dynamic: bool | None = None) -> int:
    """Return the number of Triton kernels of the one graph; there is no opaque call in it."""
    torch.compiler.reset()
    with ixt.config.patch(enabled=True, strict=True, templates=False):
        (graph,) = fake_gpu.capture(fn, args, target="sm_90", dynamic=dynamic)
    assert graph.externs == ()
    return len(graph.kernels)


def activations(rows: int = 4096, columns: int = 2048) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2))  # type: ignore[return-value]


QUANTIZE: dict[str, tuple[Callable[..., Any], int]] = {
    # name: (quantize the product, kernels): one that reads the inputs once, where that is to be
    "fp8 1x128": (lambda x: fp8(x, E4M3, 1, 128), 1),
    "fp8 1x128, for a GEMM": (lambda x: fp8(x, E4M3, 1, 128, layout="gemm"), 1),
    "fp8 128x1": (lambda x: fp8(x, E4M3, 128, 1), 1),
    "fp8 128x1 transposed, for a GEMM": (lambda x: fp8(x, E4M3, 128, 1, True, layout="gemm"), 1),
    "fp8 128x128, for a GEMM": (lambda x: fp8(x, E4M3, 128, 128, layout="gemm"), 1),
    "mx 1x32": (lambda x: mx(x, E4M3, 1, 32), 1),
    "mx 1x32, swizzled": (lambda x: mx(x, E4M3, 1, 32, layout="gemm"), 1),
    "mx 32x1 transposed, swizzled": (lambda x: mx(x, E4M3, 32, 1, True, layout="gemm"), 1),
    "mx 32x32": (lambda x: mx(x, E4M3, 32, 32), 1),
    # both orientations: a kernel each, and no more when a half of them is not wanted
    "fp8 rows and columns": (lambda x: fp8_both(x, E4M3, 128, False, layout="gemm"), 2),
    "fp8 rows of both": (lambda x: fp8_both(x, E4M3, 128, False, layout="gemm")[:2], 1),
    "fp8 square, both": (lambda x: fp8_both(x, E4M3, 128, True), 2),
    "mx both, swizzled": (lambda x: mx_both(x, E4M3, False, layout="gemm"), 2),
    "mx columns of both": (lambda x: mx_both(x, E4M3, False, layout="gemm")[2:], 1),
    # a scale a column is a pass in pieces, their maximum, a pass
    "column": (lambda x: column(x, E4M3, True), 3),
    # rows, their maximum, and one pass that stores the codes twice
    "tensor and transpose": (lambda x: tensor_both(x, E4M3), 3),
}


@pytest.mark.parametrize("name", QUANTIZE)
def test_silu_mul_quantize(name: str) -> None:
    quantize, count = QUANTIZE[name]
    assert kernels(lambda a, b: quantize(silu_mul(a, b)), *activations()) == count


@pytest.mark.parametrize("name", ["fp8 1x128", "mx 1x32"])
def test_any_number_of_rows(name: str) -> None:
    def inputs() -> tuple[Tensor, ...]:
        made = [torch.empty(4096, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        for tensor in made:
            torch._dynamo.mark_dynamic(tensor, 0)
        return tuple(made)

    torch.compiler.reset()
    with ixt.config.patch(enabled=True, strict=True, templates=False):
        (graph,) = fake_gpu.capture(lambda a, b: QUANTIZE[name][0](silu_mul(a, b)), inputs)
    (kernel,) = graph.kernels.values()
    assert re.search(r"def \w+\(.*\bxnumel\b", kernel.source)
    assert not re.search(r"^ +xnumel = \d", kernel.source, re.M)  # known when it runs


@pytest.mark.parametrize("name", ["fp8 1x128", "mx 1x32"])
def test_norm_quantize(name: str) -> None:
    """Two: the norm's statistic is a number a row, the amax one a block of it."""
    x, w = torch.empty(4096, 2048, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.bfloat16)
    assert kernels(lambda x, w: QUANTIZE[name][0](rms_norm(x, w)), x, w) == 2


@pytest.mark.parametrize("layout", ["plain", "gemm"])
def test_dequantize_fuses_into_what_follows(layout: str) -> None:
    codes, other = torch.empty(4096, 2048, dtype=E4M3), activations()[0]
    scales = torch.empty(4096, 64, dtype=torch.uint8)

    def from_blocks(codes: Tensor, scale: Tensor, other: Tensor) -> Tensor:
        return silu_mul(from_fp8(codes, scale, 1, 128, torch.bfloat16, layout), other)

    def from_mx_blocks(codes: Tensor, scale: Tensor, other: Tensor) -> Tensor:
        return silu_mul(from_mx(codes, scale, 1, 32, torch.bfloat16, layout), other)

    assert kernels(from_blocks, codes, torch.empty(4096, 16), other) == 1
    assert kernels(from_mx_blocks, codes, scales, other) == 1


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)], ids=str)
def test_fake_quantization_is_one_kernel(block: tuple[int, int]) -> None:
    def run(x: Tensor) -> Tensor:
        codes, scale_inv = fp8(x, E4M3, *block)
        return from_fp8(codes, scale_inv, *block, torch.bfloat16)

    assert kernels(run, activations()[0]) == 1


@pytest.mark.parametrize("name", ["fp8 1x128", "fp8 square, both", "mx both, swizzled", "column"])
def test_sizes_of_which_nothing_is_known(name: str) -> None:
    """Ragged, empty, or one row: chains still compile, to Triton alone."""
    with _compat.fx_config.patch(backed_size_oblivious=True):
        assert kernels(QUANTIZE[name][0], activations(3, 200)[0], dynamic=True) >= 1
