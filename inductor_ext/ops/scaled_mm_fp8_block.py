"""Scaled FP8 matrix product with scales of blocks, 1 x G or G x G: an opaque op.

Definition: ``decompositions/scaled_mm.py``; which kernel: ``_routes_gemm.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import fp8_block
from inductor_ext.decompositions import scaled_mm as reference

from ..validation import FP8_DTYPES
from ._blocks import ceil_div, round_up
from ._gemm import Direct, Gemm, check_block_scale, check_operands, check_result
from ._gemm_calls import (
    add_bias,
    is_prepared,
    padded_out,
    prepared,
    round_sizes,
    scaled_mm_v2,
    wide_mm,
)
from ._pad import Wanted
from ._routes_gemm import BLOCK_OF_LIBRARY, route

MULTIPLES = (4, 16, 128)
"""Of (M, N, K) for cuBLASLt: 16-byte columns of scales, 16-byte rows of codes, whole blocks."""
OUTPUTS = (torch.bfloat16, torch.float32)
"""What cuBLASLt writes; a bias, and fp16, are added and cast after an fp32 product."""
VECTOR, SQUARE = 4, 5
"""``torch.nn.functional.ScalingType``'s BlockWise1x128 and BlockWise128x128."""
BLOCKS = (32, 64, 128)


def check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: int,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> tuple[int, int]:
    """Raise TypeError or ValueError for arguments that ``scaled_mm_fp8_block`` does not take."""
    m, n = check_operands(a, b, FP8_DTYPES, scale_a=scale_a, scale_b=scale_b, bias=bias)
    if block not in BLOCKS:
        raise ValueError(f"`block` must be 32, 64 or 128, got {block}")
    sides = (
        ("scale_a", scale_a, m, square_a, layout_a),
        ("scale_b", scale_b, n, square_b, layout_b),
    )
    for name, scale, rows, square, layout in sides:
        shape = (block if square else 1, block)
        check_block_scale(
            name, scale, torch.float32, (rows, a.shape[1]), shape, layout, tiled=False
        )
    check_result(bias, n, dtype)
    return m, n


def _choose(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: int,
    *args: Any,
) -> tuple[str, str]:
    return route("fp8_block", a, block, e5m2=torch.float8_e5m2 in (a.dtype, b.dtype))


def spread_rows(scale: Tensor, blocks: int, rows: int) -> Tensor:
    """Return 128 x 128 scales as the 1 x 128 scales of every row: (rows, nK)."""
    scale = scale[:, :blocks].unsqueeze(1).expand(-1, BLOCK_OF_LIBRARY, -1)
    return scale.reshape(-1, blocks)[:rows]


def laid_out(scale: Tensor, square: bool, blocks: int, rows: int) -> Wanted:
    """Return scales as cuBLASLt takes them, transposed.

    1 x 128: (rows, nK) column-major, zeros below.  128 x 128: (n, nK or padded) as (L, n), where
    L = round_up(nK, 4), strides (1, L).
    """
    if square:
        return Wanted(scale, scale.shape[0], round_up(blocks, 4))
    return Wanted(scale.t(), blocks, rows)


def _library(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: int,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> None:
    (m, n), k = out.shape, a.shape[1]
    m4, n16, k128 = round_sizes((m, n, k), MULTIPLES)
    blocks = ceil_div(k, BLOCK_OF_LIBRARY)
    if square_a and square_b:  # cuBLASLt takes one square operand
        scale_a, square_a = spread_rows(scale_a, blocks, m), False
    inside = bias is None and dtype in OUTPUTS
    product = padded_out(out, m4, n16, dtype if inside else torch.float32)
    a, b, scale_a, scale_b = prepared(
        Wanted(a, m4, k128),
        Wanted(b, n16, k128),
        laid_out(scale_a, square_a, blocks, m4),
        laid_out(scale_b, square_b, blocks, n16),
    )
    recipes = [[SQUARE if square else VECTOR] for square in (square_a, square_b)]
    scaled_mm_v2(product, a, b, [scale_a.t()], recipes[0], [scale_b.t()], recipes[1], [], None)
    if product is not out or bias is not None:
        add_bias(out, product, bias)


def _direct(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: int,
    square_a: bool = False,
    square_b: bool = False,
    *layouts: str,
) -> Direct | None:
    """Return the call of the library alone where it takes everything as it is."""
    (m, k), n = a.shape, b.shape[0]
    if round_sizes((m, n, k), MULTIPLES) != (m, n, k) or (square_a and square_b):
        return None
    if bias is not None or dtype not in OUTPUTS:
        return None
    wanted = (
        Wanted(a, m, k),
        Wanted(b, n, k),
        laid_out(scale_a, square_a, k // BLOCK_OF_LIBRARY, m),
        laid_out(scale_b, square_b, k // BLOCK_OF_LIBRARY, n),
    )
    return _call if all(map(is_prepared, wanted)) else None


def _call(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: None,
    dtype: torch.dtype,
    block: int,
    square_a: bool = False,
    square_b: bool = False,
    *layouts: str,
    out: Tensor | None,
) -> Tensor:
    recipe_a, recipe_b = [VECTOR], [VECTOR]
    if square_a:
        scale_a, recipe_a = scale_a.t(), [SQUARE]
    elif square_b:
        scale_b, recipe_b = scale_b.t(), [SQUARE]
    return torch._scaled_mm_v2(
        a, b.t(), [scale_a], recipe_a, [], [scale_b], recipe_b, [], None, dtype, out=out
    )


def _dequantize(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: int,
    square_a: bool = False,
    square_b: bool = False,
    layout_a: str = "plain",
    layout_b: str = "plain",
) -> None:
    """Round ``code * scale`` to bf16, or keep it in fp32 for an fp32 result, and multiply."""
    wide = torch.float32 if dtype == torch.float32 else torch.bfloat16
    dequantize = torch.ops.inductor_ext.dequantize_fp8_block.default
    height_a, height_b = block if square_a else 1, block if square_b else 1
    a = dequantize(a, scale_a, height_a, block, wide, layout_a)
    b = dequantize(b, scale_b, height_b, block, wide, layout_b)
    wide_mm(out, a, b, bias)


SAMPLES = ((6, 520, 7, 128), (16, 150, 35, 32))


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for m, k, n, size in SAMPLES:
        x = torch.randn(m, k, generator=generator, device=device)
        w = torch.randn(n, k, generator=generator, device=device)
        bias = torch.randn(n, generator=generator, device=device).to(torch.bfloat16)
        quantize, e4m3 = fp8_block.quantize_fp8_block, torch.float8_e4m3fn
        a, scale_a = quantize(x, e4m3, 1, size)
        b, scale_b = quantize(w, e4m3, size, size, layout="gemm")
        yield (a, b, scale_a, scale_b, bias, torch.bfloat16, size, False, True, "plain", "gemm")
        b, scale_b = quantize(w, e4m3, 1, size, layout="gemm")
        yield (a, b, scale_a, scale_b, None, torch.float32, size, False, False, "plain", "gemm")


GEMM = Gemm(
    "scaled_mm_fp8_block",
    "a b scale_a scale_b",
    "int block, bool square_a=False, bool square_b=False, "
    'str layout_a="plain", str layout_b="plain"',
    check=check,
    reference=reference.scaled_mm_fp8_block,
    choose=_choose,
    routes={"library": _library, "dequantize": _dequantize},
    inputs=_inputs,
    direct=_direct,
)
