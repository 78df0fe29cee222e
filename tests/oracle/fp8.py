"""Oracle of the FP8 per-tensor and per-row family.

Every function takes float32 arrays decoded from bits, uses numpy's IEEE float32 arithmetic (one
correctly rounded operation at a time, subnormals kept), and returns uint8 codes and float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grids import E4M3, E5M2, F32, FLT_MAX, Grid, decode_bits, encode_bits, largest_input, saturate

GRIDS = {"e4m3": E4M3, "e5m2": E5M2}
ONE = np.float32(1)


class Quantized(NamedTuple):
    codes: NDArray[np.uint8]
    scale_inv: F32
    amax: F32


def _amax(x: F32, row: bool) -> F32:
    """Largest magnitude that is not NaN, 0 for the empty set; rows keep a last axis of 1."""
    mag = np.where(np.isnan(x), np.float32(0), np.abs(x)).astype(np.float32)
    if row:
        return np.max(mag, axis=-1, keepdims=True, initial=np.float32(0))
    return np.asarray(np.max(mag, initial=np.float32(0)), dtype=np.float32)


def quantize_static(x: F32, scale: F32, target: str) -> Quantized:
    """`scale` is 0-d, one element, or `(*x.shape[:-1], 1)`; scale_inv and amax take its shape."""
    scale = np.asarray(scale, dtype=np.float32)
    row = x.ndim > 0 and scale.shape == (*x.shape[:-1], 1) and scale.size != 1
    per_element = scale if row else scale.reshape(())
    with np.errstate(all="ignore"):
        product = np.multiply(x, per_element, dtype=np.float32)
        inverse = np.divide(ONE, scale, dtype=np.float32)
    amax = _amax(x, row) if row else _amax(x, False).reshape(scale.shape)
    return Quantized(saturate(product, GRIDS[target]), np.asarray(inverse), amax)


def current_scale(amax: F32, grid: Grid, eps: float, pow2: bool, ceiling: np.float32) -> F32:
    """Steps 1 to 5 of current scaling, elementwise over blocks."""
    with np.errstate(all="ignore"):
        amax = np.where(amax < np.float32(eps), np.float32(eps), amax).astype(np.float32)
        degenerate = (amax == 0) | np.isinf(amax) | np.isnan(amax)
        scale = np.divide(np.float32(grid.max), np.where(degenerate, ONE, amax), dtype=np.float32)
    scale = np.where(np.isinf(scale), ceiling, scale).astype(np.float32)
    if pow2:
        scale = (np.array(scale, order="C").view(np.uint32) & np.uint32(0xFF800000)).view(
            np.float32
        )
    return np.where(degenerate, ONE, scale.reshape(amax.shape)).astype(np.float32)


def quantize_current(
    x: F32, dtype: str, target: str, *, row: bool, eps: float = 0.0, pow2: bool = False
) -> Quantized:
    """Whole-tensor or per-row current scaling of values whose storage dtype is `dtype`."""
    grid = GRIDS[target]
    amax = _amax(x, row)
    scale = current_scale(amax, grid, eps, pow2, largest_input(dtype) if row else FLT_MAX)
    with np.errstate(all="ignore"):
        product = np.multiply(x, scale, dtype=np.float32)
        inverse = np.divide(ONE, scale, dtype=np.float32)
    return Quantized(saturate(product, grid), np.asarray(inverse, dtype=np.float32), amax)


def dequantize(
    codes: NDArray[np.uint8], source: str, scale_inv: F32, dtype: str
) -> NDArray[np.unsignedinteger]:
    """Bits of `cast(float(q) * scale_inv)`."""
    value = decode_bits(codes, source)
    scale_inv = np.asarray(scale_inv, dtype=np.float32)
    row = value.ndim > 0 and scale_inv.shape == (*value.shape[:-1], 1) and scale_inv.size != 1
    with np.errstate(all="ignore"):
        product = np.multiply(value, scale_inv if row else scale_inv.reshape(()), dtype=np.float32)
    return encode_bits(np.asarray(product), dtype)


def scaled_mm_bounds(
    a: F32, b: F32, scale_a: F32, scale_b: F32, bias: F32 | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Product in float64, and the sum of magnitudes that bounds an accumulation's rounding error.

    Products of fp8 values have at most 8 significant bits: float64 sums of e4m3 ones are exact.
    """
    scales = np.asarray(scale_a, np.float64) * np.asarray(scale_b, np.float64)
    exact = (a.astype(np.float64) @ b.astype(np.float64)) * scales
    magnitude = (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)) * np.abs(scales)
    if bias is not None:
        exact = exact + bias.astype(np.float64)
        magnitude = magnitude + np.abs(bias).astype(np.float64)
    return exact, magnitude
