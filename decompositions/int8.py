"""INT8, symmetric, with one scale for the tensor, a row or a group of a row, in ATen.

All arithmetic is fp32 with round to nearest even; divisions are correctly rounded.  Source of the
formulas: docs/formats.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .amax import amax_ignoring_nan

INT8_MAX = 127
SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32: a scale is never 0 nor subnormal."""
_FLOAT32_MAX = torch.finfo(torch.float32).max


def quantize_int8_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with one scale: ``clamp(round_half_even(x / scale), -127, 127)``, NaN -> 0.

    Args:
        x: (...) bfloat16, float16 or float32.

    Returns:
        codes int8 like ``x``; scale 0-d float32, ``max(amax / 127, 2**-126)``.  An infinite amax
        counts as the largest fp32: infinities become +-127, and no code dequantizes to NaN.
    """
    v = x.float()
    scale = scale_for(amax_ignoring_nan(v, False), INT8_MAX)
    return _codes(v, scale), scale


def quantize_int8_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row (the last dimension) with a scale of its own.

    Returns:
        codes int8 like ``x`` (*, K); scale (*, 1) float32.
    """
    v = x.float()
    scale = scale_for(amax_ignoring_nan(v, True), INT8_MAX)
    return _codes(v, scale), scale


def quantize_int8_group(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize each ``group`` elements of a row with a scale of their own.

    Args:
        x: (*, K); the last group of a row may be shorter.
        group: 32, 64, 128 or 256.

    Returns:
        codes int8 like ``x``; scale (*, ceil(K / group)) float32.
    """
    v = x.float()
    scale = scale_for(amax_ignoring_nan(grouped(v, group), True).squeeze(-1), INT8_MAX)
    return _codes(v, for_elements(scale, group, x.shape[-1])), scale


def dequantize_int8(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return ``cast(float(codes) * scale)`` in ``dtype`` (bfloat16, float16 or float32).

    Args:
        codes: (*, K) int8.
        scale: float32: with ``group`` 0 one element or (*, 1), else (*, ceil(K / group)).
        group: 0, 32, 64, 128 or 256.
    """
    if group:
        scale = for_elements(scale, group, codes.shape[-1])
    elif scale.numel() == 1:
        scale = scale.reshape(())
    return (codes.float() * scale).to(dtype).contiguous()


def scale_for(largest: Tensor, steps: int) -> Tensor:
    """Return the scale that spreads [0, largest] over ``steps`` codes."""
    finite = largest.clamp(max=_FLOAT32_MAX)
    return (finite / torch.full_like(finite, steps)).clamp(min=SMALLEST_SCALE)


def rounded_quotient(v: Tensor, scale: Tensor) -> Tensor:
    """Return ``round_half_even(v / scale)``, 0 for NaN; v may be infinite, scale may not."""
    return torch.where(v.isnan(), 0.0, v / scale).round()


def grouped(v: Tensor, group: int) -> Tensor:
    """Return (*, K) as (*, ceil(K / group), group), filled up with zeros."""
    columns = v.shape[-1]
    count = -(-columns // group)
    return pad(v, (0, count * group - columns)).reshape(*v.shape[:-1], count, group)


def for_elements(per_group: Tensor, group: int, columns: int) -> Tensor:
    """Return (*, groups) as (*, columns): each element's own."""
    return per_group.repeat_interleave(group, -1)[..., :columns]


def _codes(v: Tensor, scale: Tensor) -> Tensor:
    codes = rounded_quotient(v, scale).clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8).contiguous()
