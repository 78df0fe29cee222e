"""Oracle of INT8, INT4, amax and delayed scaling.

Every function takes float32 arrays decoded from bits and uses numpy's IEEE float32 arithmetic, one
correctly rounded operation at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grids import F32, FLT_MAX, encode_bits

TINY = np.float32(2.0**-126)
ZERO = np.float32(0)


class Groups(NamedTuple):
    codes: NDArray[np.integer]
    scale: F32
    zero: NDArray[np.uint8] | None = None


def amax(x: F32, row: bool) -> F32:
    """Largest magnitude that is not NaN, 0 for the empty set; rows keep a last axis of 1."""
    mag = np.where(np.isnan(x), ZERO, np.abs(x)).astype(np.float32)
    if row:
        return np.max(mag, axis=-1, keepdims=True, initial=ZERO)
    return np.asarray(np.max(mag, initial=ZERO), dtype=np.float32)


def _scale(extent: F32, steps: int) -> F32:
    """max(div(extent, steps), 2^-126); what is infinite counts as the largest fp32."""
    with np.errstate(under="ignore"):
        quotient = np.divide(np.minimum(extent, FLT_MAX), np.float32(steps), dtype=np.float32)
    return np.maximum(quotient, TINY)


def _round(x: F32, scale: F32) -> F32:
    """round_half_even(div(x, scale)), 0 for NaN."""
    with np.errstate(all="ignore"):
        quotient = np.divide(x, scale, dtype=np.float32)
        return np.where(np.isnan(x), ZERO, np.rint(quotient)).astype(np.float32)


def int8(x: F32, row: bool) -> Groups:
    scale = _scale(amax(x, row), 127)
    return Groups(np.clip(_round(x, scale), -127, 127).astype(np.int8), scale)


def int8_group(x: F32, group: int) -> Groups:
    """Group by group; the last one of a row may be short."""
    count = -(-x.shape[-1] // group)
    codes = np.zeros(x.shape, np.int8)
    scale = np.zeros((*x.shape[:-1], count), np.float32)
    for g in range(count):
        part = slice(g * group, (g + 1) * group)
        codes[..., part], scale[..., g : g + 1], _ = int8(x[..., part], True)
    return Groups(codes, scale)


def dequantize_int8(
    codes: NDArray[np.int8], scale: F32, group: int, dtype: str
) -> NDArray[np.unsignedinteger]:
    """Bits of cast(float(q) * scale)."""
    if group:
        scale = np.repeat(scale, group, axis=-1)[..., : codes.shape[-1]]
    elif scale.size == 1:
        scale = scale.reshape(())
    with np.errstate(all="ignore"):
        product = np.multiply(codes.astype(np.float32), scale, dtype=np.float32)
    return encode_bits(product, dtype)


def _pack(nibbles: NDArray[np.integer]) -> NDArray[np.uint8]:
    low, high = nibbles[..., 0::2].astype(np.int64) & 15, nibbles[..., 1::2].astype(np.int64) & 15
    return (low + 16 * high).astype(np.uint8)


def int4_symmetric(x: F32, group: int) -> Groups:
    v = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    scale = _scale(amax(v, True), 7)
    q = np.clip(_round(v, scale), -8, 7).reshape(x.shape)
    return Groups(_pack(q), scale[..., 0])


def int4_asymmetric(x: F32, group: int) -> Groups:
    v = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    number = np.where(np.isnan(v), ZERO, v)
    high = np.max(number, axis=-1, keepdims=True, initial=ZERO)
    low = np.min(number, axis=-1, keepdims=True, initial=ZERO)
    with np.errstate(over="ignore"):
        scale = _scale((high - low).astype(np.float32), 15)
    zero = np.clip(_round(-low, scale), 0, 15)
    q = np.clip(_round(v, scale) + zero, 0, 15).reshape(x.shape)
    return Groups(_pack(q), scale[..., 0], zero[..., 0].astype(np.uint8))


def dequantize_int4(
    codes: NDArray[np.uint8], scale: F32, zero: NDArray[np.uint8] | None, group: int, dtype: str
) -> NDArray[np.unsignedinteger]:
    """Bits of cast((q - zero) * scale)."""
    wide = codes.astype(np.int64)
    q = np.stack((wide % 16, wide // 16), axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    if zero is None:
        q = np.where(q >= 8, q - 16, q)
    else:
        q = q - np.repeat(zero.astype(np.int64), group, axis=-1)
    with np.errstate(all="ignore"):
        product = np.multiply(
            q.astype(np.float32), np.repeat(scale, group, axis=-1), dtype=np.float32
        )
    return encode_bits(product, dtype)


def update_scale(
    history: F32, scale: F32, largest: float, margin: int, algorithm: str
) -> tuple[F32, F32]:
    """Next history and scale, column by column; `scale` has as many elements as columns."""
    columns = history.reshape(len(history), scale.size)
    moved, updated = np.zeros_like(columns), scale.reshape(-1).copy()
    for n in range(columns.shape[1] if len(columns) else 0):
        last = columns[0, n]
        moved[:, n] = [*columns[1:, n], last]
        moved[0, n] = 0
        known = [v for v in columns[:, n] if not np.isnan(v)]
        best = max(known, default=ZERO) if algorithm == "max" else last
        if np.isfinite(best) and best > 0:
            with np.errstate(over="ignore", under="ignore"):
                quotient = np.divide(np.float32(largest * 2.0**-margin), best, dtype=np.float32)
            updated[n] = min(quotient, FLT_MAX)
    return moved.reshape(history.shape), updated.reshape(scale.shape)
