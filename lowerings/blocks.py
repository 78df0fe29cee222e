"""Blocks of a matrix as Inductor IR: their amax, their codes, the layouts of their scales.

Shared by the block formats.  Where blocks fill the matrix exactly, codes are computed over
(block row, row in it, block column, column in it), the loops of the amax: Inductor then makes one
kernel of both.  Ragged blocks take masked loads, and a kernel for the codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext import config
from inductor_ext._compat import FloorDiv, ReductionHint, V, ir, ops

from .vocabulary import (
    F32,
    Amax,
    Expression,
    amax_of_groups,
    load_f32,
    load_unrounded,
    pointwise,
    rounded,
    saturate_cast,
    stored,
)

Place = Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]


def ceil_div(n: Any, by: int) -> Any:
    """Return n / by, rounded up, for a size."""
    return FloorDiv(n + by - 1, by)


def round_up(n: Any, to: int) -> Any:
    """Return the smallest multiple of ``to`` that is at least ``n``."""
    return ceil_div(n, to) * to


def divides(by: int, size: Any) -> bool:
    """Return whether a size is known to be a multiple of ``by``."""
    return by == 1 or bool(V.graph.sizevars.statically_known_multiple_of(size, by))


def reshaped(x: Any, size: Sequence[Any]) -> Any:
    """Return the elements of ``x`` in another shape."""
    return ir.TensorBox(ir.View.create(x.data, list(size)))


def as_matrix(x: Any) -> Any:
    """Return (*, K) as (M, K)."""
    *rows, columns = x.get_size()
    return x if len(rows) == 1 else reshaped(x, (math.prod(rows), columns))


def swapped(x: Any) -> Any:
    """Return the transpose of a matrix, as a view."""
    return ir.TensorBox(ir.PermuteView.create(x.data, [1, 0]))


def transposed_matrix(x: Any) -> Any:
    """Return the transpose of a matrix, written out."""
    load, (rows, columns) = x.make_loader(), x.get_size()
    return pointwise(x, x.get_dtype(), (columns, rows), lambda i: load([i[1], i[0]]))


def scattered(
    like: Any,
    loops: Sequence[Any],
    strides: Sequence[Any],
    expression: Expression,
    size: Sequence[Any],
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a contiguous tensor of ``size``, computed over ``loops``.

    Args:
        strides: from an index of the loops to the place of an element in memory; a permutation.
        dtype: that of ``like`` by default.
    """
    dtype = dtype or like.get_dtype()
    made = stored(pointwise(like, dtype, loops, expression))
    made.data.data.freeze_layout_with_exact_strides(strides)
    layout = ir.FixedLayout(
        like.get_device(), dtype, list(size), ir.FlexibleLayout.contiguous_strides(size)
    )
    return ir.TensorBox(ir.ReinterpretView(data=made.data, layout=layout))


def load_within(load: Expression, index: Sequence[Any], bounds: Sequence[Any], other: Any) -> Any:
    """Load at an index, or give ``other`` where it is beyond a bound (None: it never is)."""
    inside = [
        ops.lt(ops.index_expr(i, torch.int64), ops.index_expr(bound, torch.int64))
        for i, bound in zip(index, bounds, strict=True)
        if bound is not None
    ]
    if not inside:
        return load(index)
    mask = inside[0]
    for one in inside[1:]:
        mask = ops.and_(mask, one)
    return ops.masked(mask, lambda: load(index), other)


class Blocks:
    """A tensor cut into blocks.

    Attributes:
        x: (M, K), or (*, K) where ``matrix`` is false and no block spans rows.
        size: of a result that has one number a block, (nM, nK) or (*, nK).
        exact: whether no block is ragged, as far as is known.
    """

    def __init__(self, x: Any, block_m: int, block_k: int, *, matrix: bool = True) -> None:
        self.block_m, self.block_k, self.shape = block_m, block_k, list(x.get_size())
        self.x = as_matrix(x) if matrix or block_m > 1 else x
        *self.rows, self.columns = self.x.get_size()
        down = self.rows if block_m == 1 else [ceil_div(self.rows[0], block_m)]
        self.size = [*down, ceil_div(self.columns, block_k)]
        self.rows_fit = block_m == 1 or divides(block_m, self.rows[0])
        self.columns_fit = divides(block_k, self.columns)
        self.exact = self.rows_fit and self.columns_fit

    def element(self, block: Sequence[Any], m: Any, k: Any) -> list[Any]:
        """Return the index of an element, given its block and its place there."""
        *rows, column = block
        if self.block_m > 1:
            rows = [rows[0] * self.block_m + m]
        return [*rows, column * self.block_k + k]

    def block(self, index: Sequence[Any]) -> list[Any]:
        """Return the index of the block that holds an element."""
        *rows, column = index
        if self.block_m > 1:
            rows = [self._divided(rows[0], self.block_m)]
        return [*rows, self._divided(column, self.block_k)]

    def _divided(self, index: Any, by: int) -> Any:
        if by == 1 or self.x.get_device().type != "cpu":
            return index if by == 1 else FloorDiv(index, by)
        # The C++ back end splits a loop whose index it sees divided, and drops a ragged rest; of
        # an index times two plus one it does not see it.
        return FloorDiv(2 * index + 1, 2 * by)

    def amax(self, value: Expression) -> Amax:
        """Return max |value| of each block; a ragged block has its real elements only."""
        group = [size for size in (self.block_m, self.block_k) if size > 1]
        bounds = [*(None if self.rows_fit else n for n in self.rows)]
        bounds.append(None if self.columns_fit else self.columns)

        def element(block: Sequence[Any], inside: Sequence[Any]) -> Any:
            m = inside[0] if self.block_m > 1 else 0
            k = inside[-1] if self.block_k > 1 else 0
            return load_within(value, self.element(block, m, k), bounds, 0.0)

        hint = ReductionHint.OUTER if self.block_k == 1 else ReductionHint.INNER
        return amax_of_groups(self.x, element, self.size, group, hint)

    def codes(
        self, value: Expression, factor: Expression, dtype: torch.dtype, *, transpose: bool = False
    ) -> Any:
        """Return FP8 codes of ``value(element) * factor(block)``, like the input or (K, M)."""
        device = self.x.get_device()
        ranges, shape, place = self._loops(transpose)

        def product(index: Sequence[Any]) -> Any:
            element, block = place(index)
            return ops.mul(value(element), factor(block))

        if device.type == "cpu":
            # A node of its own: the C++ back end then takes fp32's vector length for the loop, for
            # which it has a vectorized conversion to FP8.
            product = stored(pointwise(self.x, F32, ranges, product)).make_loader()
        made = pointwise(
            self.x, dtype, ranges, lambda index: saturate_cast(product(index), dtype, device)
        )
        return self._given(made, shape)

    def values(self, value: Expression, factor: Expression, dtype: torch.dtype) -> Any:
        """Return ``value(element) * factor(block)``, rounded to ``dtype`` even if fused away."""
        ranges, shape, place = self._loops(False)
        device = self.x.get_device()

        def result(index: Sequence[Any]) -> Any:
            element, block = place(index)
            product = ops.mul(value(element), factor(block))
            if dtype == F32 or config.numerics == "fast":
                return ops.to_dtype(product, dtype)
            return ops.to_dtype(rounded(product, dtype, device), dtype)

        return self._given(pointwise(self.x, dtype, ranges, result), shape)

    def _given(self, made: Any, shape: list[Any]) -> Any:
        """Return what was computed over blocks in the shape of the input, or its transpose.

        Squares of more than a matrix get a buffer: a view of what has none would be copied out.
        """
        return reshaped(stored(made) if len(shape) > 2 and self.block_m > 1 else made, shape)

    def _loops(self, transpose: bool) -> tuple[list[Any], list[Any], Place]:
        """Return the loops of a result as large as the input, its shape, and what an index means.

        The last gives, for an index of the loops, the indices of the element and of its block.
        """
        *down, across = self.size
        m = [self.block_m] if self.block_m > 1 and self.exact else []
        k = [self.block_k] if self.block_k > 1 and self.exact else []
        rows, columns = [*down, *m], [across, *k]
        if not self.exact:
            rows, columns = self.rows, [self.columns]

        def place(index: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            if transpose:
                index = [*index[len(columns) :], *index[: len(columns)]]
            if not self.exact:
                return list(index), self.block(index)
            block = [*index[: len(down)], index[len(rows)]]
            inside = index[len(down)] if m else 0, index[-1] if k else 0
            return self.element(block, *inside), block

        if transpose:
            return [*columns, *rows], [self.columns, *self.rows], place
        return [*rows, *columns], self.shape, place


def elements(x: Any) -> Expression:
    """Return the loads of a tensor that is read twice, for an amax and for codes, as fp32."""
    if x.get_device().type == "cpu":
        # Amax and codes are loops of their own here: store the producer's result for the second
        # one (its load is then rounded) rather than computing it twice.
        return load_unrounded(stored(x))
    return load_f32(x)
