"""FP8 (e4m3fn, e5m2) with a scale a block: the arithmetic of every implementation, in ATen.

A block is (block_m, block_k) elements of the input seen as a matrix (M, K).  Source of the
formulas: docs/formats.md (they follow Transformer Engine's kernels).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import as_matrix, block_amax, ceil_div, spread, transposed_codes
from .fp8 import current_scale, saturate_cast


def quantize_fp8_block(
    x: Tensor,
    dtype: torch.dtype,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
    layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """Quantize each block with the scale taken from its own amax.

    Args:
        x: (*, K) bfloat16, float16 or float32; (M, K) below.
        block_m, block_k: (1, G), (G, 1) or (G, G) with G 32, 64 or 128.
        transposed: give the codes of the transpose, (K, M).
        layout: "plain", or "gemm" for what cuBLASLt takes; see :func:`laid_out`.

    Returns:
        codes like ``x``, or (K, M); scale_inv float32, (ceil(M / block_m), ceil(K / block_k)),
        (*, ceil(K / block_k)) for block_m 1, or its transpose.
    """
    v = as_matrix(x).float()
    limit = torch.finfo(x.dtype).max
    scale = current_scale(block_amax(v, block_m, block_k), dtype, eps, pow2, limit)
    codes = saturate_cast(v * spread(scale, block_m, block_k, *v.shape), dtype)
    inverse = torch.ones_like(scale) / scale
    square = block_m == block_k
    if transposed:
        return transposed_codes(codes), laid_out(inverse.t(), square, layout)
    if block_m == 1 and layout == "plain":
        inverse = inverse.reshape(*x.shape[:-1], inverse.shape[-1])
    return codes.view(x.shape), laid_out(inverse, square, layout)


def laid_out(scale_inv: Tensor, square: bool, layout: str) -> Tensor:
    """Bring scales (R, C) into a layout.

    Returns:
        "plain": contiguous.  "gemm": for square blocks (R, round_up(C, 4)), contiguous, padded
        with 0; for the others (R, C) with the strides (1, R).
    """
    if layout == "plain":
        return scale_inv.contiguous()
    if square:
        return F.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous()
    return scale_inv.t().contiguous().t()


def quantize_fp8_block_both(
    x: Tensor,
    dtype: torch.dtype,
    block: int,
    square: bool,
    eps: float = 0.0,
    pow2: bool = False,
    layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize a matrix and its transpose.

    Args:
        square: blocks of G x G for both; otherwise 1 x G, and G x 1 for the transpose.

    Returns:
        codes and scale_inv, then those of the transpose, each as :func:`quantize_fp8_block`'s.
    """
    block_m = block if square else 1
    block_k = block if square else 1
    rows = quantize_fp8_block(x, dtype, block_m, block, False, eps, pow2, layout)
    columns = quantize_fp8_block(x, dtype, block, block_k, True, eps, pow2, layout)
    return (*rows, *columns)


def dequantize_fp8_block(
    codes: Tensor,
    scale_inv: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Tensor:
    """Return ``cast(float(codes) * scale_inv)``.

    Args:
        codes: (*, K) seen as a matrix of its own: a transposed result is (K, M) here, and its
            G x 1 blocks are 1 x G.
        scale_inv: as :func:`quantize_fp8_block` lays it out.
    """
    q = as_matrix(codes).float()
    rows, columns = q.shape
    count = ceil_div(rows, block_m), ceil_div(columns, block_k)
    if layout == "gemm" and block_m == block_k:
        scale_inv = scale_inv[:, : count[1]]
    scale = spread(scale_inv.reshape(count), block_m, block_k, rows, columns)
    return (q * scale).to(dtype).contiguous().view(codes.shape)
