"""Grouped scaled matrix products, the exact definition: a product of its own for each expert.

The tokens of all experts lie in one tensor, sorted by expert; ``offsets`` (E,) int32 says where
each expert's end.  An offset below the one before it, or beyond the tokens, is taken as that one,
or as their number.  The offsets are read by the host here, which on a GPU waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .blocks import ceil_div, spread
from .scaled_mm import scaled_mm

WIDTH = 128


def groups(offsets: Tensor, total: int) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of each expert's tokens."""
    start = 0
    for offset in offsets.tolist():
        end = max(start, min(offset, total))
        yield start, end
        start = end


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return :func:`~decompositions.scaled_mm.scaled_mm` of each expert's share.

    Args:
        a: (T, K) codes. b: (E, N, K) codes, or (N, T) with ``a`` (M, T).
        scale_a: what broadcasts to (T, 1), or to (E, M, 1). scale_b: to (E, N, 1).
        offsets: (E,) int32.
        dtype: of the result.
        fast_accum: no effect here; a GPU may accumulate in fewer bits.

    Returns:
        (T, N), 0 for tokens of no expert; or, with ``b`` (N, T), the product over each expert's
        tokens, (E, M, N), 0 for experts without any.
    """
    experts = offsets.shape[0]
    scale_b = scale_b.expand(experts, b.shape[-2], 1).transpose(1, 2)  # (E, 1, N)
    if b.dim() == 3:
        scale_a = scale_a.expand(a.shape[0], 1)
        result = a.new_zeros((a.shape[0], b.shape[1]), dtype=dtype)
        for e, (start, end) in enumerate(groups(offsets, a.shape[0])):
            share = a[start:end], b[e].t(), scale_a[start:end], scale_b[e]
            result[start:end] = scaled_mm(*share, None, dtype)
        return result
    scale_a = scale_a.expand(experts, a.shape[0], 1)
    result = a.new_zeros((experts, a.shape[0], b.shape[0]), dtype=dtype)
    for e, (start, end) in enumerate(groups(offsets, a.shape[1])):
        if start < end:
            share = a[:, start:end], b[:, start:end].t(), scale_a[e], scale_b[e]
            result[e] = scaled_mm(*share, None, dtype)
    return result


def scaled_grouped_mm_fp8_block(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product of each expert's dequantized share, in float64 until its cast.

    Args:
        a: (T, K) codes. b: (E, N, K) codes, or (N, T) with ``a`` (M, T).
        scale_a: a scale a row and 128 columns of ``a``.
        scale_b: a scale a row, or 128 rows, and 128 columns of each matrix of ``b``.
        offsets, dtype: as for :func:`scaled_grouped_mm`, and so the result.
    """
    wide_a = _dequantized(a, scale_a)
    if b.dim() == 3:
        result = a.new_zeros((a.shape[0], b.shape[1]), dtype=dtype)
        for e, (start, end) in enumerate(groups(offsets, a.shape[0])):
            product = wide_a[start:end] @ _dequantized(b[e], scale_b[e]).t()
            result[start:end] = product.float().to(dtype)
        return result
    wide_b = _dequantized(b, scale_b)
    result = a.new_zeros((offsets.shape[0], a.shape[0], b.shape[0]), dtype=dtype)
    for e, (start, end) in enumerate(groups(offsets, a.shape[1])):
        if start < end:
            product = wide_a[:, start:end] @ wide_b[:, start:end].t()
            result[e] = product.float().to(dtype)
    return result


def _dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    rows, columns = codes.shape
    height = 1 if scale.shape[0] == rows else WIDTH
    assert scale.shape[0] == ceil_div(rows, height)
    return codes.to(torch.float64) * spread(scale.to(torch.float64), height, WIDTH, rows, columns)
