"""Scaled matrix products, the exact definitions.

A is (M, K), B is (N, K) and is used transposed (``scaled_mm`` alone takes it as (K, N)).  Products
are summed in float64, where a sum of products of codes is exact (of codes with fp32 scales: good
to 2^-52), so that the order of the sum does not matter; the sum is rounded to fp32 once.  Scales
for all of K (of a tensor or a row) are multiplied after that, A's first, then the bias is added,
each in fp32; the result is cast to ``dtype``.  Source of the formulas: docs/gemm.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import ceil_div, spread, unswizzle
from .int8 import for_elements
from .mxfp8 import e8m0_value
from .nvfp4 import SCALE_RANGE, dequantize_nvfp4


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``cast((a @ b) * scale_a * scale_b + bias)``.

    Args:
        a: (M, K) codes. b: (K, N) codes.
        scale_a: one element or (M, 1). scale_b: one element or (1, N); dequantization multipliers.
        bias: (N,) or None.
        dtype: of the result, (M, N).
        fast_accum: no effect here; a GPU may accumulate in fewer bits.
    """
    product = torch.mm(a.to(torch.float64), b.to(torch.float64)).float()
    return _cast(product * _broadcast(scale_a) * _broadcast(scale_b), bias, dtype)


def scaled_mm_fp8_block(
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
) -> Tensor:
    """Return ``cast(float32(A @ B^T) + bias)`` of the elements ``code * scale``.

    Args:
        a: (M, K) FP8 codes. b: (N, K).
        scale_a, scale_b: float32, one for each ``block`` elements of a row, (M, ceil(K / block)),
            or for each square, (ceil(M / block), ceil(K / block)); as ``quantize_fp8_block``
            lays them out.
    """
    wide_a = a.double() * _block_scales(a, scale_a, block, square_a)
    wide_b = b.double() * _block_scales(b, scale_b, block, square_b)
    return _product(wide_a, wide_b, bias, dtype)


def _block_scales(codes: Tensor, scale: Tensor, block: int, square: bool) -> Tensor:
    """Return each element's scale in float64; columns beyond K's blocks are padding."""
    rows, columns = codes.shape
    scale = scale.double()[:, : ceil_div(columns, block)]
    return spread(scale, block if square else 1, block, rows, columns)


def scaled_mm_mxfp8(
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
) -> Tensor:
    """Return ``cast(float32(A @ B^T) + bias)`` of the elements ``code * 2^(scale - 127)``.

    Args:
        a: (M, K) FP8 codes. b: (N, K).
        scale_a, scale_b: uint8 (e8m0), as ``quantize_mxfp8`` lays them out.
    """
    wide_a = a.double() * _mx_scales(a, scale_a, square_a, layout_a)
    wide_b = b.double() * _mx_scales(b, scale_b, square_b, layout_b)
    return _product(wide_a, wide_b, bias, dtype)


def _mx_scales(codes: Tensor, scale: Tensor, square: bool, layout: str) -> Tensor:
    rows, columns = codes.shape
    if layout == "gemm":  # one for every row, also of squares
        scale, square = unswizzle(scale, rows, ceil_div(columns, 32)), False
    return spread(e8m0_value(scale), 32 if square else 1, 32, rows, columns).double()


def scaled_mm_nvfp4(
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
) -> Tensor:
    """Return ``cast(float32(A @ B^T) * g_a * g_b + bias)`` of the elements ``e2m1 * scale``.

    ``g = amax * fl(1/2688)``, rounded to fp32: one for the operand, or one for each of its rows.

    Args:
        a: (M, K/2) uint8, two codes a byte. b: (N, K/2).
        scale_a, scale_b: float8_e4m3fn, as ``quantize_nvfp4`` lays them out.
        amax_a: float32, one element or (M, 1). amax_b: one element or (N, 1).
    """
    wide_a = _e2m1_times_scale(a, scale_a, square_a, layout_a)
    wide_b = _e2m1_times_scale(b, scale_b, square_b, layout_b)
    factor_a, factor_b = (_broadcast(amax * (1 / SCALE_RANGE)) for amax in (amax_a, amax_b))
    product = torch.mm(wide_a, wide_b.t()).float()
    return _cast(product * factor_a * factor_b.t(), bias, dtype)


def _e2m1_times_scale(codes: Tensor, scale: Tensor, square: bool, layout: str) -> Tensor:
    """Return the elements without their global factor, in float64.

    With an amax of 2688 the dequantization gives them to within an ulp of fp32; bf16 has room for
    the 6 bits of the product, and the cast lands on it.
    """
    unit = torch.full((), SCALE_RANGE, device=codes.device)
    block = 16 if square else 1
    return dequantize_nvfp4(codes, scale, unit, block, 16, torch.bfloat16, layout).double()


def scaled_mm_int8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    group_a: int = 0,
    group_b: int = 0,
) -> Tensor:
    """Return ``cast((A @ B^T) * scale_a * scale_b + bias)``; scales of groups go to elements.

    Args:
        a: (M, K) int8. b: (N, K).
        scale_a: float32, one element, (M, 1), or with ``group_a`` (M, ceil(K / group_a));
            scale_b likewise.
        group_a, group_b: 0, or how many elements of a row share a scale.
    """
    wide_a, wide_b = a.double(), b.double()
    if group_a:
        wide_a = wide_a * for_elements(scale_a.double(), group_a, a.shape[1])
    if group_b:
        wide_b = wide_b * for_elements(scale_b.double(), group_b, b.shape[1])
    product = torch.mm(wide_a, wide_b.t()).float()
    if not group_a:
        product = product * _broadcast(scale_a)
    if not group_b:
        product = product * _broadcast(scale_b).t()
    return _cast(product, bias, dtype)


def _broadcast(scale: Tensor) -> Tensor:
    return scale.reshape(1, 1) if scale.numel() == 1 else scale


def _product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return _cast(torch.mm(a, b.t()).float(), bias, dtype)


def _cast(value: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (value if bias is None else value + bias.float()).to(dtype)
