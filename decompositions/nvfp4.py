"""NVFP4: e2m1 codes two a byte, an e4m3 scale per 16, an fp32 amax per tensor or per row, in ATen.

All arithmetic is fp32 with round to nearest even; divisions are correctly rounded; subnormals are
kept.  ``min`` returns the number where the other operand is NaN.  Source of the formulas:
docs/nvfp4.md (they follow Transformer Engine's kernels).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .amax import amax_ignoring_nan
from .blocks import as_matrix, block_amax, swizzle, unswizzle
from .fp8 import FLOAT32_MAX, saturate_cast
from .philox import block_bits

BLOCK = 16
SCALE_RANGE = 2688.0  # the largest code, 6, times the largest e4m3 scale, 448
SIXTH = 1 / 6
"""Rounded to fp32 where it is used."""
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize_nvfp4(
    x: Tensor,
    amax: Tensor,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    layout: str = "plain",
    hadamard: bool = False,
    rng: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 1x16, of 16x1 (transposed), or of 16x16 elements.

    Args:
        x: (*, K) bfloat16, float16 or float32, seen as (M, K).
        amax: float32, the global amax: one element, or one a row of the result.
        transposed: return the codes and scales of x^T.
        layout: "plain", or "gemm" for the swizzle of cuBLASLt.
        hadamard: transform the 16 elements of each block first (not for 16x16).
        rng: int64 (2,), seed and offset: round stochastically.

    Returns:
        codes uint8 (*, K/2) or (K, M/2); scales float8_e4m3fn.
    """
    v = as_matrix(x.float())
    if transposed:
        v = v.t()
    rows, length = v.shape
    if hadamard:
        v = hadamard_transform(v)
    whole = amax.reshape(()) if amax.numel() == 1 else amax.reshape(rows, 1)
    square = block_m == block_k
    scales, multiplier = _scales(v, whole, square)
    codes = _codes(v * multiplier.repeat_interleave(BLOCK, 1), int(transposed), rng).contiguous()
    if layout == "gemm":
        scales = swizzle(_repeat_rows(scales, rows) if square else scales)
    shape = (rows,) if transposed else x.shape[:-1]
    if not square and layout == "plain":
        scales = scales.reshape(*shape, length // BLOCK)
    return codes.reshape(*shape, length // 2), scales.contiguous().to(torch.float8_e4m3fn)


def quantize_nvfp4_both(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    square: bool,
    layout: str = "plain",
    hadamard: bool = False,
    rng: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize along K, and along M transposed; ``hadamard`` applies to the transposed half."""
    block = BLOCK if square else 1
    rowwise = quantize_nvfp4(x, amax, block, BLOCK, False, layout, False, rng)
    return rowwise + quantize_nvfp4(x, amax_t, BLOCK, block, True, layout, hadamard, rng)


def amax_hadamard(x: Tensor, transposed: bool) -> Tensor:
    """Return max |t| over the transformed ``x`` (along M when transposed), 0-d fp32."""
    v = as_matrix(x.float())
    return amax_ignoring_nan(hadamard_transform(v.t() if transposed else v), False)


def dequantize_nvfp4(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Tensor:
    """Return ``cast(e2m1 * f)``, ``f = (float(scale) * amax) * fl(1/2688)``.

    Args:
        codes: (*, K/2) uint8; scales and amax as ``quantize_nvfp4`` gives them for these codes.
        block_m, block_k: (1, 16) or (16, 16).
    """
    flat = as_matrix(codes)
    rows, length = flat.shape[0], 2 * flat.shape[1]
    blocks = length // BLOCK
    s = scales.float()
    if layout == "gemm":
        s = unswizzle(s, rows, blocks)
    elif block_m == BLOCK:
        s = _repeat_rows(s, rows)
    whole = amax.reshape(()) if amax.numel() == 1 else amax.reshape(rows, 1)
    f = (s.reshape(rows, blocks) * whole) * (1 / SCALE_RANGE)
    nibbles = torch.stack((flat & 15, flat >> 4), -1).reshape(rows, length)
    magnitude = torch.tensor(_GRID, device=codes.device)[(nibbles & 7).long()]
    value = torch.where(nibbles > 7, -magnitude, magnitude)
    y = value * f.repeat_interleave(BLOCK, 1)
    return y.to(dtype).reshape(*codes.shape[:-1], length)


def hadamard_transform(v: Tensor) -> Tensor:
    """Transform each 16 elements of the last dimension: signs, butterflies, 1/4, bf16 rounding.

    The order of the fp32 additions is part of the definition: with a[i] the signed elements,
    for h = 1, 2, 4, 8: (a[i], a[i + h]) becomes (a[i] + a[i + h], a[i] - a[i + h]) for each i
    without bit h; then everything is multiplied by 0.25 and rounded to bfloat16.
    """
    rows, length = v.shape
    signs = torch.tensor(HADAMARD_SIGNS, dtype=v.dtype, device=v.device)
    a = v.reshape(rows, length // BLOCK, BLOCK) * signs
    for h in (1, 2, 4, 8):
        low, high = a.reshape(rows, length // BLOCK, BLOCK // (2 * h), 2, h).unbind(3)
        a = torch.stack((low + high, low - high), 3)
    return (a.reshape(rows, length) * 0.25).bfloat16().float()


def _scales(v: Tensor, amax: Tensor, square: bool) -> tuple[Tensor, Tensor]:
    """Return the scale of each block (fp32 of e4m3 values) and the multiplier of each row's.

    (rows, length / 16) both; for square blocks the scales are (ceil(rows / 16), length / 16).
    """
    encode = torch.fmin(torch.full_like(amax, SCALE_RANGE) / amax, _limit(amax))
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    decode = torch.ones_like(encode) / encode
    largest = block_amax(v, BLOCK if square else 1, BLOCK)
    s = torch.fmin(largest * (encode * SIXTH), _limit(largest))
    s = saturate_cast(s, torch.float8_e4m3fn).float()
    product = s * decode
    multiplier = torch.fmin(torch.ones_like(product) / product, _limit(product))
    return s, _repeat_rows(multiplier, len(v)) if square else multiplier


def _limit(like: Tensor) -> Tensor:
    return torch.full_like(like, FLOAT32_MAX)


def _repeat_rows(s: Tensor, rows: int) -> Tensor:
    return s.repeat_interleave(BLOCK, 0)[:rows]


def _codes(v: Tensor, stream: int, rng: Tensor | None) -> Tensor:
    """Return scaled elements (rows, length) as e2m1 codes, two a byte, the even index low."""
    a = v.abs()
    if rng is None:  # to nearest, ties to the even code
        tests = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    else:
        u = block_bits(v.numel() // BLOCK, stream, rng).reshape(v.shape) * 2.0**-8
        step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
        t = a + u * step  # the product is exact: one rounding
        tests = tuple(t >= value for value in _GRID[1:])
    magnitude = torch.stack(tests).sum(0)
    code = torch.where(v.isnan(), 7, magnitude + 8 * v.signbit()).to(torch.uint8)
    return code[:, 0::2] | (code[:, 1::2] << 4)
