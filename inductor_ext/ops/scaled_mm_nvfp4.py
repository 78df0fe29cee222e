"""Scaled NVFP4 matrix product: an opaque op.

Definition: ``decompositions/scaled_mm.py``; which kernel: ``_routes_gemm.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import nvfp4
from inductor_ext.decompositions import scaled_mm as reference

from ..validation import check_dtype
from ._gemm import Gemm, check_block_scale, check_operands, check_result
from ._gemm_calls import (
    add_bias,
    padded_out,
    prepared,
    round_sizes,
    scaled_mm_v2,
    unscaled_mm,
)
from ._pad import Wanted
from ._routes_gemm import route
from ._scale_product import finish
from .scaled_mm_mxfp8 import tiled_scales

BLOCK = 16
MULTIPLES = (1, 16, 16)
"""Of M, N and the packed bytes of K, of which a row must have a multiple of 16."""
WHOLE, VECTOR, TILED = 0, 2, 1
"""``torch.nn.functional``'s ScalingType TensorWise and BlockWise1x16, SwizzleType 32_4_4."""


def check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    amax_a: Tensor,
    amax_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> tuple[int, int]:
    """Raise TypeError or ValueError for arguments that ``scaled_mm_nvfp4`` does not take."""
    m, n = check_operands(
        a, b, (torch.uint8,),
        scale_a=scale_a, scale_b=scale_b, amax_a=amax_a, amax_b=amax_b, bias=bias,
    )  # fmt: skip
    k = 2 * a.shape[1]
    if k % BLOCK != 0:
        raise ValueError(f"`a` must have a multiple of 8 columns (16 elements), got {k // 2}")
    sides = (
        ("a", scale_a, amax_a, m, square_a, layout_a),
        ("b", scale_b, amax_b, n, square_b, layout_b),
    )
    for name, scale, amax, rows, square, layout in sides:
        block = (BLOCK if square else 1, BLOCK)
        check_block_scale(
            f"scale_{name}", scale, torch.float8_e4m3fn, (rows, k), block, layout, tiled=True
        )
        _check_amax(f"amax_{name}", amax, rows)
    check_result(bias, n, dtype)
    return m, n


def _check_amax(name: str, amax: Tensor, rows: int) -> None:
    check_dtype(name, amax.dtype, (torch.float32,))
    if amax.numel() == 1:
        return
    if amax.dim() != 2 or amax.shape[0] != rows or amax.shape[1] != 1:
        raise ValueError(
            f"`{name}` must have one element or the shape {(rows, 1)}, got {tuple(amax.shape)}"
        )


def _choose(a: Tensor, *args: Any) -> tuple[str, str]:
    return route("nvfp4", a)


UNIT = 1 / nvfp4.SCALE_RANGE
"""Times an amax, the factor of all of an operand's elements, or of a row's."""


def _library(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    amax_a: Tensor,
    amax_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> None:
    m, n = out.shape
    _, n16, k16 = round_sizes((m, n, a.shape[1]), MULTIPLES)
    fp4 = torch.float4_e2m1fn_x2
    inside = bias is not None and dtype != torch.float32  # cuBLASLt adds no fp32 bias
    whole = amax_a.numel() == amax_b.numel() == 1
    wanted = [Wanted(a, m, k16), Wanted(b, n16, k16)]
    if bias is not None and inside and whole:
        wanted.append(Wanted(bias[None], 1, n16))
    a, b, *added = prepared(*wanted)
    codes = a.view(fp4), b.view(fp4)
    scales = [
        [tiled_scales(scale_a, m, BLOCK, square_a, layout_a)],
        [tiled_scales(scale_b, n, BLOCK, square_b, layout_b)],
    ]
    if not whole:  # cuBLASLt has one factor for everything
        product = out.new_empty((m, n16), dtype=torch.float32)
        scaled_mm_v2(product, *codes, scales[0], [VECTOR], scales[1], [VECTOR], [TILED], None)
        finish(out, product, amax_a, amax_b, bias, UNIT)
        return
    for scale, amax in zip(scales, (amax_a, amax_b), strict=True):
        scale.append(amax.reshape(()) * UNIT)
    recipe, swizzle = [VECTOR, WHOLE], [TILED, 0]
    product = padded_out(out, m, n16, dtype)
    inner = added[0][0] if added else None
    scaled_mm_v2(product, *codes, scales[0], recipe, scales[1], recipe, swizzle, inner)
    if product is not out or (bias is not None and not inside):
        add_bias(out, product, None if inside else bias)


def _dequantize(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    amax_a: Tensor,
    amax_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> None:
    """Multiply ``e2m1 * scale`` in bf16, which holds it, and the global factors afterwards.

    With an amax of 2688 the dequantization gives exactly that: its factor is the block's scale to
    within an ulp of fp32, and the product has 6 significant bits.
    """
    dequantize = torch.ops.inductor_ext.dequantize_nvfp4.default
    unit = torch.full((), nvfp4.SCALE_RANGE, dtype=torch.float32, device=a.device)
    wide = torch.bfloat16
    a = dequantize(a, scale_a, unit, BLOCK if square_a else 1, BLOCK, wide, layout_a)
    b = dequantize(b, scale_b, unit, BLOCK if square_b else 1, BLOCK, wide, layout_b)
    finish(out, unscaled_mm(a, b), amax_a, amax_b, bias, UNIT)


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for m, k, n in ((5, 80, 7), (16, 64, 35)):
        x = torch.randn(m, k, generator=generator, device=device)
        w = torch.randn(n, k, generator=generator, device=device)
        bias = torch.randn(n, generator=generator, device=device).to(torch.bfloat16)
        amax_w = w.abs().amax()
        amax_x = x.abs().amax(1, keepdim=True)
        a, scale_a = nvfp4.quantize_nvfp4(x, amax_x, 1, BLOCK)
        b, scale_b = nvfp4.quantize_nvfp4(w, amax_w, BLOCK, BLOCK, layout="gemm")
        square = (False, True, "plain", "gemm")
        yield a, b, scale_a, scale_b, amax_x, amax_w, bias, torch.bfloat16, *square
        b, scale_b = nvfp4.quantize_nvfp4(w, amax_w, 1, BLOCK)
        yield a, b, scale_a, scale_b, amax_x, amax_w, None, torch.float32


GEMM = Gemm(
    "scaled_mm_nvfp4",
    "a b scale_a scale_b amax_a amax_b",
    'bool square_a=False, bool square_b=False, str layout_a="plain", str layout_b="plain"',
    check=check,
    reference=reference.scaled_mm_nvfp4,
    choose=_choose,
    routes={"library": _library, "dequantize": _dequantize},
    inputs=_inputs,
)
