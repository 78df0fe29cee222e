"""Scaled matrix products in float64, from the definitions in docs/gemm.md, one number at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .grids import decode_bits

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8(codes: U8, dtype: str) -> F64:
    return decode_bits(codes, dtype).astype(np.float64)


def e2m1(codes: U8) -> F64:
    """Two codes a byte, the even element in the low nibble; the sign is bit 3."""
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), 2 * codes.shape[1])
    return np.where(nibbles > 7, -1.0, 1.0) * E2M1[nibbles & 7]


def e8m0(scales: U8) -> F64:
    return np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))


def of_blocks(scales: NDArray[np.generic], rows: int, k: int, height: int, width: int) -> F64:
    """The scale of each element; what lies beyond the last block is padding."""
    r, c = np.indices((rows, k))
    return np.asarray(scales)[r // height, c // width].astype(np.float64)


def of_tiles(scales: NDArray[np.generic], rows: int, k: int, width: int) -> NDArray[np.generic]:
    """The scale of each block (rows, ceil(k / width)), out of cuBLASLt's tiles of 128 x 4."""
    flat = np.asarray(scales).reshape(-1)
    blocks = -(-k // width)
    r, c = np.indices((rows, blocks))
    tile = (r // 128) * -(-blocks // 4) + c // 4
    return flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]


def product(a: F64, b: F64) -> tuple[F64, F64]:
    """A B^T and the sum of magnitudes, which bounds what an accumulation loses."""
    return a @ b.T, np.abs(a) @ np.abs(b).T
