"""FP8 (e4m3fn, e5m2) per tensor, row and head: the arithmetic of every implementation, in ATen.

All arithmetic is fp32 with round to nearest even; divisions are correctly rounded; subnormals are
kept.  Source of the formulas: docs/formats.md (they follow Transformer Engine's kernels).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .amax import amax_ignoring_nan

FLOAT32_MAX = torch.finfo(torch.float32).max
_SIGN_AND_EXPONENT = -0x00800000  # 0xFF800000 as a signed 32-bit integer


def quantize_fp8_static(
    x: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with a given scale: ``q = sat(x * scale)``, ``1 / scale``, and the amax of ``x``.

    Args:
        x: (*, K) bfloat16, float16 or float32.
        scale: float32 of one element, or (*, 1) with a scale a row.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        codes like ``x``; scale_inv and amax like ``scale``.  NaN elements do not enter the amax.
    """
    v = x.float()
    rowwise = scale.dim() == x.dim() > 0 and scale.shape == (*x.shape[:-1], 1)
    amax = amax_ignoring_nan(v, rowwise).reshape(scale.shape)
    multiplier = scale if rowwise else scale.reshape(())
    return saturate_cast(v * multiplier, dtype), torch.ones_like(scale) / scale, amax


def quantize_fp8_tensor(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize with the scale taken from the amax of the whole tensor.

    Returns:
        codes like ``x``; scale_inv, 0-d float32.
    """
    v = x.float()
    scale = current_scale(amax_ignoring_nan(v, False), dtype, eps, pow2, FLOAT32_MAX)
    return saturate_cast(v * scale, dtype), torch.ones_like(scale) / scale


def quantize_fp8_row(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize each row (the last dimension) with the scale taken from its own amax.

    Returns:
        codes like ``x`` (*, K); scale_inv (*, 1) float32.
    """
    v = x.float()
    limit = torch.finfo(x.dtype).max
    scale = current_scale(amax_ignoring_nan(v, True), dtype, eps, pow2, limit)
    return saturate_cast(v * scale, dtype), torch.ones_like(scale) / scale


def quantize_fp8_heads(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize each head (the last two dimensions) with the scale taken from its own amax.

    Returns:
        codes like ``x`` (B, H, S, D); scale_inv (B, H) float32.
    """
    codes, scale_inv = quantize_fp8_row(_rows_of_heads(x), dtype, eps, pow2)
    return codes.view(x.shape), scale_inv.view(x.shape[:2])


def quantize_fp8_heads_by_row(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what :func:`quantize_fp8_heads` does, by the op of rows."""
    quantize = torch.ops.inductor_ext.quantize_fp8_row.default
    codes, scale_inv = quantize(_rows_of_heads(x), dtype, eps, pow2)
    return codes.view(x.shape), scale_inv.view(x.shape[:2])


def _rows_of_heads(x: Tensor) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.reshape(batch * heads, tokens * dim)


def dequantize_fp8(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``cast(float(codes) * scale_inv)`` in ``dtype`` (bfloat16, float16 or float32)."""
    if scale_inv.numel() == 1:
        scale_inv = scale_inv.reshape(())
    return (codes.float() * scale_inv).to(dtype).contiguous()


def current_scale(amax: Tensor, dtype: torch.dtype, eps: float, pow2: bool, limit: float) -> Tensor:
    """Return the quantization multiplier for an amax: max_finite / amax, with its corner cases.

    Args:
        limit: what an infinite scale becomes: the largest fp32 for a whole tensor, the largest
            value of the input's dtype for rows and blocks.
    """
    if eps > 0.0:
        amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    ordinary = (amax > 0) & (amax != float("inf"))
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
    scale = torch.where(scale == float("inf"), limit, scale)
    if pow2:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    return torch.where(ordinary, scale, 1.0)


def saturate_cast(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp to the largest finite code and round to nearest even; every NaN becomes code 0x7F."""
    limit = torch.finfo(dtype).max
    clamped = torch.where(v.isnan(), float("nan"), v.clamp(-limit, limit))
    return clamped.to(dtype).contiguous()
