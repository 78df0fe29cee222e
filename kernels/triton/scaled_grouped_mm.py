"""Grouped FP8 matrix products: one launch for all experts, offsets read on the device only.

The grid is sized by what the host knows: T rows in E groups make at most
``(T + groups * (BLOCK_M - 1)) // BLOCK_M`` tiles of BLOCK_M rows, and at most T.  A program finds
its group from the offsets; those beyond the last tile return at once.  Nothing waits for another.

Offsets are clamped to [0, T] and to their running maximum, so that no offset, however wrong, makes
a program read or write outside of the tensors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

WIDTH = 128
"""Columns that one step multiplies, and the width of a block that shares a scale."""
_ORDER = 8  # tiles of rows that programs visit before the next tile of columns: reuse in L2


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y)


@triton.jit
def _ends(offsets, experts, total, EXPERTS: tl.constexpr):
    """Return the end of each group (EXPERTS,): after the experts one group up to ``total``."""
    number = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + number, mask=number < experts, other=total)
    ends = tl.minimum(tl.maximum(ends, 0), total)
    return number, tl.associative_scan(ends, 0, _maximum)


@triton.jit
def _step(
    acc, x, y, scale_x, scale_y,
    SCALED: tl.constexpr, ONE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    if SCALED:
        if ONE:  # a scale of `b` serves the tile: no pointer a column
            acc += tl.dot(x, y) * (tl.load(scale_x) * tl.load(scale_y))[:, None]
        else:
            acc += tl.dot(x, y) * tl.load(scale_x)[:, None] * tl.load(scale_y)[None, :]
    elif FAST:  # Hopper adds in the tensor core, which keeps fewer bits
        acc = tl.dot(x, y, acc)
    else:
        acc += tl.dot(x, y)
    return acc


@triton.jit
def _edge(rows, at, stride, within, total):
    """Return a block of which only the columns ``within`` count, the others 0.

    All of its columns are read, as far as there are any: masks would make loads of single bytes.
    """
    pointers = rows[:, None] + (at * stride)[None, :]
    if tl.max(at, 0) < total:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(at < total)[None, :], other=0.0)
    return tl.where(within[None, :], x, 0.0)


@triton.jit
def _product(
    a, b, scale_a, scale_b, a_k, b_k, scale_a_k, scale_b_k, start, end, total,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    SCALED: tl.constexpr, ONE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return the product (BLOCK_M, BLOCK_N) of the columns [start, end).

    ``a`` (BLOCK_M,), ``b`` (BLOCK_N,) and the scales are pointers to the beginnings of rows.
    Blocks of WIDTH columns are counted from column 0, whatever ``start`` is.  The whole ones are
    read as they are; then comes what is left at the edges, of ``total`` columns.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    inside = tl.arange(0, WIDTH)
    first, last = tl.cdiv(start, WIDTH), end // WIDTH
    for block in range(first, last):
        at = (block * WIDTH + inside).to(tl.int64)
        x = tl.load(a[:, None] + (at * a_k)[None, :])
        y = tl.load(b[None, :] + (at * b_k)[:, None])
        scales = scale_a + block * scale_a_k, scale_b + block * scale_b_k
        acc = _step(acc, x, y, scales[0], scales[1], SCALED, ONE, FAST)
    for block in range(first - 1, last + 1, tl.maximum(last - first + 1, 1)):
        if (block * WIDTH < end) & (block * WIDTH + WIDTH > start):
            at = (block * WIDTH + inside).to(tl.int64)
            within = (at >= start) & (at < end)
            x = _edge(a, at, a_k, within, total)
            y = tl.trans(_edge(b, at, b_k, within, total))
            scales = scale_a + block * scale_a_k, scale_b + block * scale_b_k
            acc = _step(acc, x, y, scales[0], scales[1], SCALED, ONE, FAST)
    return acc


@triton.jit
def _place(
    offsets, total, experts, n, tiles_m,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Return a program's group (EXPERTS for none), its first row and column, its group's end."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    wave = program // (ORDER * tiles_n)
    height = tl.minimum(tiles_m - wave * ORDER, ORDER)
    tile = wave * ORDER + program % (ORDER * tiles_n) % height
    column = program % (ORDER * tiles_n) // height * BLOCK_N

    number, ends = _ends(offsets, experts, total, EXPERTS)
    before = tl.max(tl.where(number[:, None] < number[None, :], ends[:, None], 0), 0)
    tiles = tl.cdiv(ends - before, BLOCK_M)
    until = tl.cumsum(tiles, 0)
    group = tl.sum((until <= tile).to(tl.int32), 0)
    mine = number == group
    start, end = tl.sum(tl.where(mine, before, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    row = start + (tile - tl.sum(tl.where(mine, until - tiles, 0), 0)) * BLOCK_M
    return group, row, column, end


@triton.jit
def _store_rows(
    out, acc, scale_a, scale_b, rows, columns, end, n, is_expert, SCALED: tl.constexpr
):  # fmt: skip
    if not SCALED:
        acc = acc * tl.load(scale_a)[:, None] * tl.load(scale_b)[None, :]
    acc = tl.where(is_expert, acc, 0.0)
    place = out + (rows.to(tl.int64) * n)[:, None] + columns[None, :]
    mask = (rows < end)[:, None] & (columns < n)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total", "tiles_m"])  # one kernel for any number of tokens
def _rows_kernel(
    a, b, scale_a, scale_b, offsets, out, total, experts, n, k, tiles_m,
    a_m, a_k, b_e, b_n, b_k, scale_a_m, scale_a_k, scale_b_e, scale_b_n, scale_b_k,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_N: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr, ORDER: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """``out[t] = a[t] @ b[expert of t]^T``; rows beyond the last offset become 0.

    With TMA ``a`` is a descriptor of (T, K) and ``b`` one of (E * N, K).
    """
    group, row, column, end = _place(
        offsets, total, experts, n, tiles_m, EXPERTS, BLOCK_M, BLOCK_N, ORDER
    )
    if group >= EXPERTS:
        return
    is_expert = group < experts
    expert = tl.minimum(group, experts - 1)
    wide = expert.to(tl.int64)
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    # what lies outside of the group repeats its last row: read, and not stored
    m, at_n = tl.minimum(rows, end - 1).to(tl.int64), tl.minimum(columns, n - 1).to(tl.int64)
    scales_a = scale_a + m * scale_a_m
    one: tl.constexpr = SCALE_N % BLOCK_N == 0
    scales_b = scale_b + wide * scale_b_e
    scales_b += (column if one else at_n) // SCALE_N * scale_b_n
    until = tl.where(is_expert, k, 0)
    if TMA:  # beyond K it reads zeros, beyond the group rows that are not stored
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in range(tl.cdiv(until, WIDTH)):
            x = a.load([row, block * WIDTH])
            y = b.load([expert * n + column, block * WIDTH]).T
            scales = scales_a + block * scale_a_k, scales_b + block * scale_b_k
            acc = _step(acc, x, y, scales[0], scales[1], SCALED, one, FAST)
    else:
        acc = _product(
            a + m * a_m, b + wide * b_e + at_n * b_n, scales_a, scales_b,
            a_k, b_k, scale_a_k, scale_b_k, 0, until, k,
            BLOCK_M, BLOCK_N, WIDTH, SCALED, one, FAST,
        )  # fmt: skip
    _store_rows(out, acc, scales_a, scales_b, rows, columns, end, n, is_expert, SCALED)


@triton.jit(do_not_specialize=["total"])
def _columns_kernel(
    a, b, scale_a, scale_b, offsets, out, total, experts, m, n,
    a_m, a_k, b_n, b_k, scale_a_e, scale_a_m, scale_a_k, scale_b_e, scale_b_n, scale_b_k,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    SCALE_N: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """``out[e] = a[:, columns of e] @ b[:, columns of e]^T``; 0 where there are none."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * tiles_n
    program = tl.program_id(0)
    expert, tile = program // tiles, program % tiles
    rows = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % tiles_n * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)

    number, ends = _ends(offsets, experts, total, EXPERTS)
    start = tl.max(tl.where(number < expert, ends, 0), 0)
    end = tl.sum(tl.where(number == expert, ends, 0), 0)
    wide = expert.to(tl.int64)
    at_m, at_n = tl.minimum(rows, m - 1).to(tl.int64), tl.minimum(columns, n - 1).to(tl.int64)
    scales_a = scale_a + wide * scale_a_e + at_m * scale_a_m
    one: tl.constexpr = SCALE_N % BLOCK_N == 0
    scales_b = scale_b + wide * scale_b_e
    scales_b += (column if one else at_n) // SCALE_N * scale_b_n
    acc = _product(
        a + at_m * a_m, b + at_n * b_n, scales_a, scales_b,
        a_k, b_k, scale_a_k, scale_b_k, start, end, total,
        BLOCK_M, BLOCK_N, WIDTH, SCALED, one, FAST,
    )  # fmt: skip
    if not SCALED:
        acc = acc * tl.load(scales_a)[:, None] * tl.load(scales_b)[None, :]
    acc = tl.where(start < end, acc, 0.0)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    place = (wide * m + rows)[:, None] * n + columns[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total"])
def _rising_kernel(offsets, out, total, experts, EXPERTS: tl.constexpr):
    number, ends = _ends(offsets, experts, total, EXPERTS)
    tl.store(out + number, ends, mask=number < experts)


@triton.jit(do_not_specialize=["total"])
def _tail_kernel(offsets, out, total, experts, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(offsets + experts - 1)
    if tl.program_id(0) * BLOCK_M + BLOCK_M > end:
        for column in range(0, n, BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            mask = ((rows >= end) & (rows < total))[:, None] & (columns < n)[None, :]
            place = rows.to(tl.int64)[:, None] * n + columns[None, :]
            tl.store(out + place, tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty), mask=mask)


class Tiles(NamedTuple):
    """Rows and columns of a program's result, its warps, the loads in flight, and who loads.

    ``tma`` asks for the tensor memory accelerator (sm_90 and later), where addresses allow it.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False


CANDIDATES = (
    Tiles(128, 128, 8, 3), Tiles(128, 128, 8, 4), Tiles(128, 64, 4, 4), Tiles(64, 128, 4, 4),
    Tiles(64, 64, 4, 4), Tiles(32, 128, 4, 4), Tiles(16, 128, 4, 4),
    Tiles(128, 128, 8, 3, True), Tiles(128, 64, 4, 4, True), Tiles(64, 128, 4, 4, True),
)  # fmt: skip
"""What ``bench gemm --only tiles`` compares."""


def tiles_for(rows: int) -> Tiles:
    """Return the tile for so many rows of an expert on average, the fastest on an H200.

    Both fit into 99 KiB of shared memory, which is what sm_89 and sm_120 have.
    """
    return Tiles(64, 128, 4, 4, tma=True) if rows <= 512 else Tiles(128, 128, 8, 3, tma=True)


def tiles_of_columns(columns: int) -> Tiles:
    """Return the tile for so many columns of an expert on average.

    Few of them are soon multiplied: two programs a multiprocessor, of fewer loads in flight, store
    while others load.  By rows on an H200, before this and reading edges whole, and after, in ms:
    64 experts 8.5 and 7.3, 8 experts 3.5 and 3.3; by blocks 11.4 and 11.1, 6.7 and 7.3.
    """
    return Tiles(128, 128, 8, 2 if columns < 1024 else 3)


def rows_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out: Tensor,
    scale_n: int, scaled: bool, fast: bool, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Write ``a[t] @ b[expert of t]^T`` for each row t.

    Args:
        a: (T, K). b: (E, N, K). Any strides; K contiguous and a multiple of 16 is fast.
        scale_a: (T, 1) or (T, blocks). scale_b: (E, scales of N, 1 or blocks); any strides.
        offsets: (E,) int32, contiguous.
        out: (T, N), contiguous, without elements of its own in common with the others.
        scale_n: rows of an expert of ``b`` that share a scale.
        scaled: a scale a block of 128 columns, instead of one for all of K.
        fast: accumulate in the tensor core.

    Returns:
        ``out``.
    """
    (total, k), (experts, n) = a.shape, b.shape[:2]
    tiles = tiles or tiles_for(total // experts)
    groups = experts + 1
    tiles_m = min(total, (total + groups * (tiles.block_m - 1)) // tiles.block_m)
    grid = (tiles_m * triton.cdiv(n, tiles.block_n),)
    tma = tiles.tma and _described(a) and b.is_contiguous() and _described(b.view(-1, k))
    if tma:
        left = TensorDescriptor.from_tensor(a, [tiles.block_m, WIDTH])
        right = TensorDescriptor.from_tensor(b.view(-1, k), [tiles.block_n, WIDTH])
    else:
        left, right = a, b
    with _on(a):
        _rows_kernel[grid](
            left, right, scale_a, scale_b, offsets, out, total, experts, n, k, tiles_m,
            *a.stride(), *b.stride(), *scale_a.stride(), *scale_b.stride(),
            EXPERTS=triton.next_power_of_2(groups), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            WIDTH=WIDTH, SCALE_N=scale_n, SCALED=scaled, FAST=fast, ORDER=_ORDER,
            TMA=tma, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out


def columns_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, out: Tensor,
    scale_n: int, scaled: bool, fast: bool, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Write ``a[:, columns of e] @ b[:, columns of e]^T`` for each expert e.

    Args:
        a: (M, T). b: (N, T).
        scale_a: (E, M, 1 or blocks). scale_b: (E, scales of N, 1 or blocks); stride 0 along E
            where all experts share them.
        out: (E, M, N), contiguous.
        offsets, scale_n, scaled, fast: as for :func:`rows_product`.
    """
    (m, total), n, experts = a.shape, b.shape[0], offsets.shape[0]
    tiles = tiles or tiles_of_columns(total // experts)
    grid = (experts * triton.cdiv(m, tiles.block_m) * triton.cdiv(n, tiles.block_n),)
    with _on(a):
        _columns_kernel[grid](
            a, b, scale_a, scale_b, offsets, out, total, experts, m, n,
            *a.stride(), *b.stride(), *scale_a.stride(), *scale_b.stride(),
            EXPERTS=triton.next_power_of_2(experts), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            WIDTH=WIDTH, SCALE_N=scale_n, SCALED=scaled, FAST=fast,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out


def rising(offsets: Tensor, total: int) -> Tensor:
    """Return the offsets within [0, total], each at least the one before it."""
    made = torch.empty_like(offsets, memory_format=torch.contiguous_format)
    experts = offsets.shape[0]
    with _on(offsets):
        _rising_kernel[(1,)](
            offsets.contiguous(), made, total, experts, EXPERTS=triton.next_power_of_2(experts)
        )
    return made


def zero_tail(out: Tensor, offsets: Tensor) -> Tensor:
    """Set the rows of ``out`` (T, N), contiguous, from the last offset on to 0."""
    total, n = out.shape
    with _on(out):
        _tail_kernel[(triton.cdiv(total, 16),)](
            offsets, out, total, offsets.shape[0], n, BLOCK_M=16, BLOCK_N=256
        )
    return out


_capability = torch.cuda.get_device_capability


def _described(matrix: Tensor) -> bool:
    """Return whether the tensor memory accelerator can read a matrix of bytes."""
    step, one = matrix.stride()
    aligned = step % 16 == 0 and matrix.data_ptr() % 16 == 0
    return bool(one == 1 and aligned and _capability(matrix.device) >= (9, 0))


def _on(tensor: Tensor) -> Any:
    """Make the tensor's GPU the current one, as Triton launches there."""
    return torch.cuda.device_of(tensor)
