"""Scaled MXFP8 matrix product: an opaque op.

Definition: ``decompositions/scaled_mm.py``; which kernel: ``_routes_gemm.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import mxfp8
from inductor_ext.decompositions import scaled_mm as reference
from inductor_ext.decompositions.blocks import swizzle

from ..validation import FP8_DTYPES
from ._gemm import Gemm, check_block_scale, check_operands, check_result
from ._gemm_calls import (
    add_bias,
    aligned,
    padded_out,
    prepared,
    round_sizes,
    scaled_mm_v1,
    wide_mm,
)
from ._pad import Wanted
from ._routes_gemm import route

BLOCK = 32
MULTIPLES = (1, 16, 32)
"""Of (M, N, K): 16-byte rows of the result's and B's codes, whole blocks of K."""


def check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> tuple[int, int]:
    """Raise TypeError or ValueError for arguments that ``scaled_mm_mxfp8`` does not take."""
    m, n = check_operands(a, b, FP8_DTYPES, scale_a=scale_a, scale_b=scale_b, bias=bias)
    sides = (
        ("scale_a", scale_a, m, square_a, layout_a),
        ("scale_b", scale_b, n, square_b, layout_b),
    )
    for name, scale, rows, square, layout in sides:
        shape = (BLOCK if square else 1, BLOCK)
        check_block_scale(name, scale, torch.uint8, (rows, a.shape[1]), shape, layout, tiled=True)
    check_result(bias, n, dtype)
    return m, n


def _choose(a: Tensor, *args: Any) -> tuple[str, str]:
    return route("mxfp8", a)


def tiled_scales(scale: Tensor, rows: int, block: int, square: bool, layout: str) -> Tensor:
    """Return plain scales in cuBLASLt's tiles of 128 x 4, a scale for every row.

    Scales of the "gemm" layout are that already.
    """
    if layout == "plain":
        if square:
            scale = scale.unsqueeze(1).expand(-1, block, -1).reshape(-1, scale.shape[1])[:rows]
        kept = scale.dtype
        scale = swizzle(scale.view(torch.uint8)).view(kept)
    return aligned(scale)


def _library(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> None:
    m, n = out.shape
    _, n16, k32 = round_sizes((m, n, a.shape[1]), MULTIPLES)
    scale_a = tiled_scales(scale_a, m, BLOCK, square_a, layout_a).view(torch.float8_e8m0fnu)
    scale_b = tiled_scales(scale_b, n, BLOCK, square_b, layout_b).view(torch.float8_e8m0fnu)
    inside = bias is not None and dtype != torch.float32  # cuBLASLt adds no fp32 bias
    product = padded_out(out, m, n16, dtype)
    wanted = [Wanted(a, m, k32), Wanted(b, n16, k32)]
    if bias is not None and inside:
        wanted.append(Wanted(bias[None], 1, n16))
    a, b, *added = prepared(*wanted)
    scaled_mm_v1(product, a, b, scale_a, scale_b, added[0][0] if added else None)
    if product is not out or (bias is not None and not inside):
        add_bias(out, product, None if inside else bias)


def _dequantize(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> None:
    """Multiply in bf16, which holds ``code * 2^e`` without rounding (down to 2^-133)."""
    dequantize = torch.ops.inductor_ext.dequantize_mxfp8.default
    a = dequantize(a, scale_a, BLOCK if square_a else 1, BLOCK, torch.bfloat16, layout_a)
    b = dequantize(b, scale_b, BLOCK if square_b else 1, BLOCK, torch.bfloat16, layout_b)
    wide_mm(out, a, b, bias)


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for m, k, n in ((5, 80, 7), (16, 64, 35)):
        x = torch.randn(m, k, generator=generator, device=device)
        w = torch.randn(n, k, generator=generator, device=device)
        bias = torch.randn(n, generator=generator, device=device).to(torch.bfloat16)
        a, scale_a = mxfp8.quantize_mxfp8(x, torch.float8_e4m3fn, 1, 32)
        b, scale_b = mxfp8.quantize_mxfp8(w, torch.float8_e5m2, 32, 32)
        yield a, b, scale_a, scale_b, bias, torch.bfloat16, False, True
        b, scale_b = mxfp8.quantize_mxfp8(w, torch.float8_e4m3fn, 1, 32, layout="gemm")
        yield a, b, scale_a, scale_b, None, torch.float32, False, False, "plain", "gemm"


GEMM = Gemm(
    "scaled_mm_mxfp8",
    "a b scale_a scale_b",
    'bool square_a=False, bool square_b=False, str layout_a="plain", str layout_b="plain"',
    check=check,
    reference=reference.scaled_mm_mxfp8,
    choose=_choose,
    routes={"library": _library, "dequantize": _dequantize},
    inputs=_inputs,
)
