"""INT4 for weights: one scale a group, two codes a byte (even index in the low nibble), in ATen.

All arithmetic is fp32 with round to nearest even; divisions are correctly rounded.  Source of the
formulas: docs/formats.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .amax import amax_ignoring_nan
from .int8 import for_elements, grouped, rounded_quotient, scale_for


def quantize_int4_symmetric(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize each ``group`` elements of a row to -8..7: ``round_half_even(x / scale)``, NaN -> 0.

    Args:
        x: (*, K) bfloat16, float16 or float32, K a multiple of ``group``.
        group: 32, 64, 128 or 256.

    Returns:
        codes uint8 (*, K / 2), two's complement nibbles; scale float32 (*, K / group),
        ``max(amax / 7, 2**-126)``.  An infinite amax counts as the largest fp32.
    """
    v = grouped(x.float(), group)
    scale = scale_for(amax_ignoring_nan(v, True), 7)
    codes = rounded_quotient(v, scale).clamp(-8, 7)
    return _packed(codes, x.shape), scale.squeeze(-1)


def quantize_int4_asymmetric(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each ``group`` elements of a row to 0..15: ``round_half_even(x / scale) + zero``.

    Args:
        x: (*, K) bfloat16, float16 or float32, K a multiple of ``group``.
        group: 32, 64, 128 or 256.

    Returns:
        codes uint8 (*, K / 2); scale float32 (*, K / group), ``max((max - min) / 15, 2**-126)``
        where min and max skip NaN elements and include 0; zero uint8 (*, K / group), the code of
        0 and of NaN.  A range beyond the largest fp32 counts as that.
    """
    v = grouped(x.float(), group)
    shape = (*v.shape[:-1], 1)
    number = torch.where(v.isnan(), 0.0, v)
    high = number.clamp(min=0.0).amax(-1, keepdim=True) if v.numel() else v.new_zeros(shape)
    low = number.clamp(max=0.0).amin(-1, keepdim=True) if v.numel() else v.new_zeros(shape)
    scale = scale_for(high - low, 15)
    zero = (-low / scale).round().clamp(0, 15)
    codes = (rounded_quotient(v, scale) + zero).clamp(0, 15)
    return _packed(codes, x.shape), scale.squeeze(-1), zero.squeeze(-1).to(torch.uint8)


def dequantize_int4(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """Return ``cast((q - zero) * scale)`` in ``dtype`` (bfloat16, float16 or float32), (*, K).

    Args:
        codes: (*, K / 2) uint8; without ``zero`` the nibbles are two's complement.
        scale: (*, K / group) float32.
        zero: (*, K / group) uint8, or None for symmetric codes.
        group: 32, 64, 128 or 256.
    """
    columns = 2 * codes.shape[-1]
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8)
    if zero is None:
        values = (nibbles - 16 * (nibbles > 7)).float()
    else:
        values = nibbles.float() - for_elements(zero, group, columns).float()
    return (values * for_elements(scale, group, columns)).to(dtype).contiguous()


def _packed(codes: Tensor, shape: torch.Size) -> Tensor:
    """Pack (..., groups, group) numbers of -8..15 into bytes of the shape (*, K / 2)."""
    nibbles = codes.to(torch.int8).view(torch.uint8) & 15
    pairs = nibbles.reshape(*shape[:-1], shape[-1] // 2, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous()
