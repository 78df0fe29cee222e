"""Products with quantized weights: the exact definition, for every format, in ATen.

``cast(sum_k float(x[m, k]) * w[n, k] + bias[n])`` where ``w`` is what the format's dequantize gives
in fp32.  Here the sum is taken in float64 and rounded to fp32 once, so that it does not depend on
an order; the bias is added in fp32.  What the routes round more: docs/weight_only.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import dequantize_fp8
from .fp8_block import dequantize_fp8_block
from .int4 import dequantize_int4
from .int8 import dequantize_int8
from .mxfp8 import dequantize_mxfp8
from .nvfp4 import dequantize_nvfp4


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``cast(x @ weight.t() + bias)`` in the dtype of ``x``.

    Args:
        x: (*, K) bfloat16, float16 or float32. weight: (N, K) float32. bias: (N,) or None.
    """
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((_rows(x), x.shape[-1]))
    result = torch.mm(flat.double(), weight.double().t()).float()
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _rows(x: Tensor) -> int:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def weight_only_mm_fp8(
    x: Tensor, codes: Tensor, scale_inv: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply by FP8 weights with a scale a tensor or a row; see ``dequantize_fp8``."""
    return product(x, dequantize_fp8(codes, scale_inv, torch.float32), bias)


def weight_only_mm_fp8_block(
    x: Tensor,
    codes: Tensor,
    scale_inv: Tensor,
    block_m: int,
    block_k: int,
    layout: str,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply by FP8 weights with a scale a block; see ``dequantize_fp8_block``."""
    weight = dequantize_fp8_block(codes, scale_inv, block_m, block_k, torch.float32, layout)
    return product(x, weight, bias)


def weight_only_mm_mxfp8(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    block_m: int,
    block_k: int,
    layout: str,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply by MXFP8 weights; see ``dequantize_mxfp8``."""
    weight = dequantize_mxfp8(codes, scales, block_m, block_k, torch.float32, layout)
    return product(x, weight, bias)


def weight_only_mm_nvfp4(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    block_m: int,
    block_k: int,
    layout: str,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply by NVFP4 weights; see ``dequantize_nvfp4``."""
    weight = dequantize_nvfp4(codes, scales, amax, block_m, block_k, torch.float32, layout)
    return product(x, weight, bias)


def weight_only_mm_int8(
    x: Tensor, codes: Tensor, scale: Tensor, group: int, bias: Tensor | None = None
) -> Tensor:
    """Multiply by INT8 weights; see ``dequantize_int8``."""
    return product(x, dequantize_int8(codes, scale, group, torch.float32), bias)


def weight_only_mm_int4(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply by INT4 weights; see ``dequantize_int4``."""
    return product(x, dequantize_int4(codes, scale, zero, group, torch.float32), bias)
