"""Oracle of NVFP4, from docs/nvfp4.md alone: numpy's float32, one operation at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grids import E4M3, F32, FLT_MAX, Grid, encode_bits, saturate

E2M1 = Grid("e2m1", 2, 1, codes=8, nan=7, overflow=7)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
ONE = np.float32(1)
U8 = NDArray[np.uint8]


class Quantized(NamedTuple):
    codes: U8
    scales: U8


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k0, q & 0xFFFFFFFF, (p >> 32) ^ d ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def random_bytes(blocks: int, stream: int, seed: int, offset: int) -> NDArray[np.int64]:
    """16 bytes for each block, in the order of the elements."""
    made = []
    for block in range(blocks):
        high = (block >> 32) | (stream << 31)
        counter = (block & 0xFFFFFFFF, high, offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF)
        words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
        made.append(b"".join(word.to_bytes(4, "little") for word in words))
    return np.frombuffer(b"".join(made), np.uint8).astype(np.int64).reshape(blocks, 16)


def hadamard(v: F32) -> F32:
    """Transform blocks of 16 along the last axis; every addition is rounded to fp32 in turn."""
    with np.errstate(all="ignore"):
        a = [v[:, i::16] * SIGNS[i] for i in range(16)]
        for h in (1, 2, 4, 8):
            for i in range(16):
                if not i & h:
                    a[i], a[i + h] = a[i] + a[i + h], a[i] - a[i + h]
        y = np.stack(a, -1).reshape(v.shape) * np.float32(0.25)
    bits = encode_bits(y, "bf16").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def block_amax(v: F32, square: bool) -> F32:
    """Largest magnitude of each block that is not NaN: (rows or ceil(rows / 16), length / 16)."""
    magnitude = np.where(np.isnan(v), np.float32(0), np.abs(v)).astype(np.float32)
    by_column = magnitude.reshape(v.shape[0], v.shape[1] // 16, 16).max(-1, initial=np.float32(0))
    if not square:
        return by_column
    rows = [by_column[i : i + 16].max(0) for i in range(0, len(v), 16)]
    return np.stack(rows) if rows else by_column


def global_scales(amax: F32) -> tuple[F32, F32]:
    """S_enc and S_dec."""
    with np.errstate(all="ignore"):
        encode = np.fmin(np.float32(2688) / amax, FLT_MAX).astype(np.float32)
        encode = np.where((amax == 0) | (encode == 0), ONE, encode).astype(np.float32)
        return encode, ONE / encode


def to_nearest(v: F32) -> U8:
    return E2M1.encode(v).astype(np.uint8)


def stochastic(v: F32, random: NDArray[np.int64]) -> U8:
    """Round down to the grid after adding u steps."""
    with np.errstate(all="ignore"):
        a = np.abs(v)
        step = np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))
        # u * step has 9 bits and the sum is rounded once: float64 holds it before that
        t = (a.astype(np.float64) + random / 256.0 * step).astype(np.float32)
    code = np.searchsorted(E2M1.values, t.astype(np.float64), side="right") - 1
    code = code + 8 * np.signbit(v)
    return np.where(np.isnan(v), 7, code).astype(np.uint8)


def quantize(
    x: F32,
    amax: F32,
    square: bool,
    transform: bool,
    layout: str,
    stream: int = 0,
    rng: tuple[int, int] | None = None,
) -> Quantized:
    """Quantize a matrix along its rows; `amax` is 0-d or (rows, 1)."""
    v = hadamard(x) if transform else x
    encode, decode = global_scales(np.asarray(amax, np.float32))
    with np.errstate(all="ignore"):
        folded = encode * (ONE / np.float32(6))
        s = np.fmin(block_amax(v, square) * folded, FLT_MAX).astype(np.float32)
        scales = saturate(s, E4M3)
        product = E4M3.decode(scales) * decode
        multiplier = np.fmin(ONE / product, FLT_MAX).astype(np.float32)
        if square:
            multiplier = multiplier.repeat(16, 0)[: len(v)]
        scaled = v * multiplier.repeat(16, 1)
    if rng is None:
        code = to_nearest(scaled)
    else:
        random = random_bytes(scaled.size // 16, stream, *rng)
        code = stochastic(scaled, random.reshape(scaled.shape))
    if layout == "gemm":
        scales = swizzle(scales.repeat(16, 0)[: len(v)] if square else scales)
    return Quantized(code[:, 0::2] | (code[:, 1::2] << 4), scales)


def swizzle(scales: U8) -> U8:
    """One scale at a time, into zeros."""
    rows, columns = scales.shape
    height, width = -(-rows // 128) * 128, -(-columns // 4) * 4
    flat = np.zeros(height * width, np.uint8)
    r, c = np.indices(scales.shape)
    tile = (r // 128) * (width // 4) + c // 4
    flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scales
    return flat.reshape(height, width)


def amax_hadamard(x: F32) -> F32:
    y = hadamard(x)
    y = np.where(np.isnan(y), np.float32(0), np.abs(y))
    return np.asarray(y.max(initial=np.float32(0)), np.float32)


def dequantize(
    codes: U8, scales: U8, amax: F32, square: bool, dtype: str
) -> NDArray[np.unsignedinteger]:
    """Bits of the values of plain codes and scales."""
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), 2 * codes.shape[1])
    value = E2M1.decode(nibbles)
    with np.errstate(all="ignore"):
        s = E4M3.decode(scales)
        if square:
            s = s.repeat(16, 0)[: len(codes)]
        factor = (s * np.asarray(amax, np.float32)) * (ONE / np.float32(2688))
        return encode_bits(value * factor.repeat(16, 1), dtype)
