"""Oracle of the block formats: FP8 with a scale a block or a column, and MXFP8.

A matrix is float32 (M, K), a block (block_m, block_k) of it; results are in the order of the
matrix, and the layouts that the ops give them are functions of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fp8 import GRIDS, ONE, current_scale
from .grids import F32, decode_bits, encode_bits, largest_input, saturate

U8 = NDArray[np.uint8]


class Blocks(NamedTuple):
    """Codes (M, K), and a scale for each block (ceil(M / block_m), ceil(K / block_k))."""

    codes: U8
    scales: NDArray[np.generic]


def amax_of(x: F32, block_m: int, block_k: int) -> F32:
    """Largest magnitude of each block that is not NaN; a ragged block has fewer elements."""
    mag = np.where(np.isnan(x), np.float32(0), np.abs(x)).astype(np.float32)
    for axis, size in ((0, block_m), (1, block_k)):
        starts = np.arange(0, mag.shape[axis], size)
        mag = np.maximum.reduceat(mag, starts, axis=axis) if len(starts) else mag
    return mag


def _spread(scales: F32, block_m: int, block_k: int, shape: tuple[int, ...]) -> F32:
    rows, columns = np.arange(shape[0]) // block_m, np.arange(shape[1]) // block_k
    return scales[rows][:, columns]


def quantize_fp8(
    x: F32, dtype: str, target: str, block_m: int, block_k: int, eps: float, pow2: bool
) -> Blocks:
    """Current scaling of each block; the scales are `scale_inv`."""
    grid = GRIDS[target]
    scale = current_scale(amax_of(x, block_m, block_k), grid, eps, pow2, largest_input(dtype))
    with np.errstate(all="ignore"):
        product = np.multiply(x, _spread(scale, block_m, block_k, x.shape), dtype=np.float32)
        inverse = np.divide(ONE, scale, dtype=np.float32)
    return Blocks(saturate(product, grid), inverse)


def quantize_column(x: F32, dtype: str, target: str, eps: float, pow2: bool) -> Blocks:
    """Current scaling of each column, scale_inv (1, K)."""
    if len(x):
        return quantize_fp8(x, dtype, target, len(x), 1, eps, pow2)
    none = np.zeros((1, x.shape[1]), np.float32)  # the maximum of nothing is 0
    scales = quantize_fp8(none, dtype, target, 1, 1, eps, pow2).scales
    return Blocks(np.zeros(x.shape, np.uint8), scales)


# ---- MXFP8 ----


def e8m0_of(amax: F32, target: str, mode: str) -> U8:
    """Biased exponent of the scale of blocks with this amax."""
    if mode == "floor":
        field = amax.view(np.uint32).astype(np.int64) >> 23
        return np.clip(field - {"e4m3": 8, "e5m2": 15}[target], 0, 254).astype(np.uint8)
    inverse = np.float32(1) / np.float32(GRIDS[target].max)
    with np.errstate(all="ignore"):
        d = np.multiply(amax, inverse, dtype=np.float32)
    bits = d.view(np.uint32).astype(np.int64)
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (field != 254) & ~((field == 0) & (mantissa <= 0x400000))
    e = np.where(up, field + 1, field)
    return np.where(np.isnan(d), 255, np.where(np.isinf(d), 254, e)).astype(np.uint8)


def e8m0_inverse(e: U8) -> F32:
    """What an element is multiplied by, 2^(127 - e)."""
    value = np.ldexp(np.float64(1), 127 - e.astype(np.int64)).astype(np.float32)
    return np.where(e == 255, np.float32(np.nan), value)


def e8m0_value(e: U8) -> F32:
    """What a code is multiplied by, 2^(e - 127)."""
    with np.errstate(over="ignore"):
        value = np.ldexp(np.float64(1), e.astype(np.int64) - 127).astype(np.float32)
    return np.where(e == 255, np.float32(np.nan), value)


def quantize_mxfp8(x: F32, target: str, block_m: int, block_k: int, mode: str) -> Blocks:
    """The scales are e8m0."""
    e = e8m0_of(amax_of(x, block_m, block_k), target, mode)
    with np.errstate(all="ignore"):
        inverse = _spread(e8m0_inverse(e), block_m, block_k, x.shape)
        product = np.multiply(x, inverse, dtype=np.float32)
    return Blocks(saturate(product, GRIDS[target]), e)


# ---- dequantize ----


def dequantize(
    codes: U8, source: str, scales: F32, block_m: int, block_k: int, dtype: str
) -> NDArray[np.unsignedinteger]:
    """Bits of `cast(float(q) * scale)`; `scales` (ceil(M / block_m), ceil(K / block_k))."""
    factor = _spread(scales, block_m, block_k, codes.shape)
    with np.errstate(all="ignore"):
        product = np.multiply(decode_bits(codes, source), factor, dtype=np.float32)
    return encode_bits(product, dtype)


# ---- layouts ----


def padded_to_4(scales: NDArray[np.generic]) -> NDArray[np.generic]:
    """Columns rounded up to a multiple of 4, with zeros."""
    room = np.zeros((scales.shape[0], -(-scales.shape[1] // 4) * 4), scales.dtype)
    room[:, : scales.shape[1]] = scales
    return room


def swizzled(scales: U8) -> U8:
    """cuBLASLt's order of (R, C) one-byte scales, padded to (128, 4) with zeros."""
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    flat = np.zeros(rows * columns, np.uint8)
    r, c = np.indices(scales.shape)
    tile = (r // 128) * (columns // 4) + c // 4
    r, c = r % 128, c % 4
    flat[tile * 512 + (r % 32) * 16 + (r // 32) * 4 + c] = scales
    return flat.reshape(rows, columns)


def mx_operand(e: U8, block_m: int, block_k: int, transposed: bool, shape: tuple[int, int]) -> U8:
    """Scales (R, C) of the GEMM operand, before the swizzle.

    Along K: R = M, C = nK. Along M, transposed or not: R = K, C = nM. A square block's scale is
    repeated for every row of the operand.
    """
    square = block_m == block_k
    along_m = block_m == 32 and (not square or transposed)
    operand, rows = (e.T, shape[1]) if along_m else (e, shape[0])
    return operand[np.arange(rows) // 32] if square else operand
