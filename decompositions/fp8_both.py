"""FP8 with a transpose beside the codes, and FP8 with a scale a column, in ATen."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import as_matrix, column_amax, transposed_codes
from .fp8 import current_scale, quantize_fp8_static, quantize_fp8_tensor, saturate_cast


def quantize_fp8_static_both(
    x: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize with a given scale, and transpose.

    Args:
        x: (*, K) bfloat16, float16 or float32; (M, K) below.
        scale: float32 of one element.

    Returns:
        codes like ``x``; the same codes as (K, M); scale_inv and amax like ``scale``.
    """
    codes, scale_inv, amax = quantize_fp8_static(x, scale.reshape(()), dtype)
    codes_t = transposed_codes(as_matrix(codes))
    return codes, codes_t, scale_inv.reshape(scale.shape), amax.reshape(scale.shape)


def quantize_fp8_tensor_both(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with the scale that the amax of the whole tensor gives, and transpose.

    Returns:
        codes like ``x``; the same codes as (K, M); scale_inv, 0-d.
    """
    codes, scale_inv = quantize_fp8_tensor(x, dtype, eps, pow2)
    return codes, transposed_codes(as_matrix(codes)), scale_inv


def quantize_fp8_column(
    x: Tensor,
    dtype: torch.dtype,
    transposed: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize each column of (M, K) with the scale taken from its own amax.

    Returns:
        codes like ``x`` and scale_inv (1, K); or codes (K, M) and scale_inv (K, 1).
    """
    v = as_matrix(x).float()
    scale = current_scale(column_amax(v), dtype, eps, pow2, torch.finfo(x.dtype).max)
    codes, inverse = saturate_cast(v * scale, dtype), torch.ones_like(scale) / scale
    if transposed:
        return transposed_codes(codes), inverse.reshape(-1, 1)
    return codes.view(x.shape), inverse
