"""Blocks of a matrix and the layouts of their scales, in ATen; shared by the block formats."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4


def ceil_div(n: int, by: int) -> int:
    """Return n / by, rounded up."""
    return (n + by - 1) // by


def round_up(n: int, to: int) -> int:
    """Return the smallest multiple of ``to`` that is at least ``n``."""
    return ceil_div(n, to) * to


def as_matrix(x: Tensor) -> Tensor:
    """Return (*, K) as (M, K)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def block_amax(v: Tensor, block_m: int, block_k: int) -> Tensor:
    """Return max |v| of each block of (M, K): (ceil(M / block_m), ceil(K / block_k)).

    NaN elements are skipped; a ragged last block has its real elements only.
    """
    rows, columns = v.shape
    magnitude = torch.where(v.isnan(), 0.0, v.abs())
    padded = F.pad(magnitude, (0, -columns % block_k, 0, -rows % block_m))
    tiles = padded.view(
        ceil_div(rows, block_m), block_m, ceil_div(columns, block_k), block_k
    )  # (nM, block_m, nK, block_k)
    return tiles.amax((1, 3))


def column_amax(v: Tensor) -> Tensor:
    """Return max |v| of each column of (M, K), NaN skipped: (1, K)."""
    if v.shape[0] == 0:
        return v.new_zeros((1, v.shape[1]))
    return torch.where(v.isnan(), 0.0, v.abs()).amax(0, keepdim=True)


def spread(scale: Tensor, block_m: int, block_k: int, rows: int, columns: int) -> Tensor:
    """Repeat the scale of each block for its elements: (nM, nK) to (rows, columns)."""
    by_row = scale.repeat_interleave(block_m, 0)[:rows]
    return by_row.repeat_interleave(block_k, 1)[:, :columns]


def transposed_codes(codes: Tensor) -> Tensor:
    """Return (M, K) codes as contiguous (K, M)."""
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def swizzle(scales: Tensor) -> Tensor:
    """Bring (R, C) scales into the order of cuBLASLt, padded with zeros.

    Tiles of 128 rows x 4 columns lie in row-block-major order; inside a tile the byte of (r, c)
    is ``r % 32 * 16 + r // 32 * 4 + c``.  Source: docs/formats.md.

    Returns:
        (round_up(R, 128), round_up(C, 4)), contiguous.
    """
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % SWIZZLE_COLUMNS, 0, -rows % SWIZZLE_ROWS))
    tiles = padded.view(
        padded.shape[0] // SWIZZLE_ROWS, 4, 32, padded.shape[1] // SWIZZLE_COLUMNS, 4
    )  # (row tile, r // 32, r % 32, column tile, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def unswizzle(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Undo :func:`swizzle` and drop its padding: (rows, columns)."""
    tiles = scales.reshape(
        scales.shape[0] // SWIZZLE_ROWS, scales.shape[1] // SWIZZLE_COLUMNS, 32, 4, 4
    )  # (row tile, column tile, r % 32, r // 32, c)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape)[:rows, :columns]
