"""MXFP8: FP8 codes with an e8m0 scale for every 32 elements, in ATen.

The scale is a power of two, stored as its biased exponent in a uint8.  Source of the formulas:
docs/formats.md; "ceil" follows Transformer Engine's kernels, "floor" the OCP specification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import (
    as_matrix,
    block_amax,
    ceil_div,
    spread,
    swizzle,
    transposed_codes,
    unswizzle,
)
from .fp8 import saturate_cast

BLOCK = 32
INVERSE_MAX_BITS = {torch.float8_e4m3fn: 0x3B124925, torch.float8_e5m2: 0x37924925}
"""fl(1 / max_finite), the bits of a float32."""
MAX_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_TINY = 0x00400000  # 2^-127, a subnormal
_NAN = 0x7FC00000


def quantize_mxfp8(
    x: Tensor,
    dtype: torch.dtype,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    mode: str = "ceil",
    layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    """Quantize each block with the power of two that its amax gives.

    Args:
        x: (*, K) bfloat16, float16 or float32; (M, K) below.
        block_m, block_k: (1, 32), (32, 1) or (32, 32).
        transposed: give the codes of the transpose, (K, M).
        mode: "ceil" (no element saturates) or "floor" (OCP).
        layout: "plain", or "gemm" for the swizzle of cuBLASLt; see :func:`laid_out`.

    Returns:
        codes like ``x``, or (K, M); scales uint8, (ceil(M / block_m), ceil(K / block_k)),
        (*, ceil(K / block_k)) for block_m 1, or its transpose.
    """
    v = as_matrix(x).float()
    scales = e8m0_from_amax(block_amax(v, block_m, block_k), dtype, mode)
    inverse = e8m0_inverse(scales)
    codes = saturate_cast(v * spread(inverse, block_m, block_k, *v.shape), dtype)
    codes = transposed_codes(codes) if transposed else codes.view(x.shape)
    if layout == "gemm":
        return codes, laid_out(scales, block_m, block_k, transposed, v.shape)
    if transposed:
        return codes, scales.t().contiguous()
    if block_m == 1:
        return codes, scales.reshape(*x.shape[:-1], scales.shape[-1])
    return codes, scales


def laid_out(
    scales: Tensor, block_m: int, block_k: int, transposed: bool, shape: torch.Size
) -> Tensor:
    """Bring (nM, nK) scales into the swizzle of the GEMM operand that the codes are.

    The operand has R rows and C blocks along its contraction: along K, R = M and C = nK; along
    M, transposed or not, R = K and C = nM.  A square block's scale is repeated for its rows.
    """
    rows, columns = shape
    along_m = block_k == 1 or (block_m == block_k and transposed)
    if along_m:
        scales, block_m, rows = scales.t(), block_k, columns
    if block_m > 1:
        scales = scales.repeat_interleave(block_m, 0)[:rows]
    return swizzle(scales)


def quantize_mxfp8_both(
    x: Tensor,
    dtype: torch.dtype,
    square: bool,
    transposed: bool = True,
    mode: str = "ceil",
    layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize along K and along M.

    Args:
        square: blocks of 32 x 32 for both; otherwise 1 x 32, and 32 x 1 along M.
        transposed: whether the half along M is given transposed.

    Returns:
        codes and scales along K, then along M, each as :func:`quantize_mxfp8`'s.
    """
    other = BLOCK if square else 1
    along_k = quantize_mxfp8(x, dtype, other, BLOCK, False, mode, layout)
    along_m = quantize_mxfp8(x, dtype, BLOCK, other, transposed, mode, layout)
    return (*along_k, *along_m)


def dequantize_mxfp8(
    codes: Tensor,
    scales: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Tensor:
    """Return ``cast(float(codes) * 2^(scales - 127))``.

    Args:
        codes: (*, K) seen as a matrix of its own: a transposed result is (K, M) here, and its
            32 x 1 blocks are 1 x 32.
        scales: uint8, as :func:`quantize_mxfp8` lays them out.
    """
    q = as_matrix(codes).float()
    rows, columns = q.shape
    count = ceil_div(rows, block_m), ceil_div(columns, block_k)
    if layout == "plain":
        scales = scales.reshape(count)
    elif block_k == 1:
        scales = unswizzle(scales, columns, count[0]).t()
    else:
        scales = unswizzle(scales, rows, count[1])[::block_m]
    scale = spread(e8m0_value(scales), block_m, block_k, rows, columns)
    return (q * scale).to(dtype).contiguous().view(codes.shape)


def e8m0_from_amax(amax: Tensor, dtype: torch.dtype, mode: str) -> Tensor:
    """Return the biased exponent of a block's scale, uint8, for an fp32 amax that is no NaN."""
    if mode == "floor":
        exponent = (amax.view(torch.int32) >> 23) - MAX_EXPONENT[dtype]
        return exponent.clamp(0, 254).to(torch.uint8)
    bits = torch.full_like(amax, INVERSE_MAX_BITS[dtype], dtype=torch.int32)
    d = (amax * bits.view(torch.float32)).view(torch.int32)
    exponent, mantissa = d >> 23, d & 0x7FFFFF
    # An infinity has the exponent 255 and becomes 254, which never rounds up; a subnormal of at
    # most 2^-127 is the code 0.
    up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= _TINY))
    return (exponent + up.to(torch.int32)).clamp(max=254).to(torch.uint8)


def e8m0_inverse(scales: Tensor) -> Tensor:
    """Return what an element is multiplied by: 2^(127 - e), NaN for 255."""
    e = scales.to(torch.int32)
    bits = torch.where(e == 254, _TINY, (254 - e) << 23)
    return torch.where(e == 255, _NAN, bits).view(torch.float32)


def e8m0_value(scales: Tensor) -> Tensor:
    """Return what a code is multiplied by: 2^(e - 127), NaN for 255."""
    e = scales.to(torch.int32)
    bits = torch.where(e == 0, _TINY, e << 23)
    return torch.where(e == 255, _NAN, bits).view(torch.float32)
