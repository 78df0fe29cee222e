"""Words that the integer formats share: scales, rounded quotients, groups of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext._compat import FloorDiv, V, ir, ops

from .vocabulary import (
    F32,
    Amax,
    Expression,
    _max,
    _needs_rounding,
    _ordered,
    div_rn,
    f32,
    is_nan,
    known_equal,
    load_f32,
    load_unrounded,
    pointwise,
    stored,
)

_FLOAT32_MAX = torch.finfo(F32).max
_SMALLEST_SCALE = 2.0**-126

GroupExpression = Callable[[Sequence[Any], Sequence[Any]], Any]
Magnitude = Callable[[Any, torch.device], Any]
"""From an element to a number of at least 0 that is not NaN."""


def source_of_codes(x: Any) -> Expression:
    """Load ``x`` for codes whose scale is known when they are made."""
    if x.get_device().type != "cpu":
        return load_f32(x)
    # The amax and the codes are loops of their own here: store the producer's result for
    # the second one (its load is then rounded) rather than computing it twice.
    return load_unrounded(stored(x))


def scale_for(largest: Any, steps: int, device: torch.device) -> Any:
    """Return the scale that spreads [0, largest] over ``steps`` codes."""
    finite = ops.minimum(largest, f32(_FLOAT32_MAX))
    return ops.maximum(div_rn(finite, f32(steps), device), f32(_SMALLEST_SCALE))


def rounded_quotient(value: Any, scale: Any, device: torch.device) -> Any:
    """Return value / scale rounded half to even, 0 for NaN; the scale is finite and positive."""
    quotient = ops.round(div_rn(value, scale, device))
    return ops.where(is_nan(value), f32(0.0), quotient)


def clamped(value: Any, low: int, high: int) -> Any:
    """Clamp a value that is not NaN."""
    return ops.minimum(ops.maximum(value, f32(low)), f32(high))


def positive_part(value: Any, device: torch.device) -> Any:
    """Return max(value, 0), and 0 for NaN."""
    return ops.where(ops.gt(value, f32(0.0)), value, f32(0.0))


def of_groups(
    x: Any, dtype: torch.dtype, size: Sequence[Any], group: int, element: GroupExpression
) -> Any:
    """Return a tensor of ``size``, element by element.

    Args:
        group: how many neighbours of a row share a scale.
        element: from an element's index and its group's index to the element's value.
    """
    *rows, columns = size
    if not divides(group, columns):
        return pointwise(x, dtype, size, lambda index: element(index, _group_of(index, group, x)))

    # A loop over groups, and a loop over a group's elements: what the amax of the groups walks
    # over too, so that Triton makes one kernel of both; and no division for the C++ back end.
    def inner(index: Sequence[Any]) -> Any:
        *own, place = index
        return element([*own[:-1], own[-1] * group + place], own)

    made = pointwise(x, dtype, [*rows, FloorDiv(columns, group), group], inner)
    return ir.TensorBox(ir.View.create(made.data, list(size)))


def _group_of(index: Sequence[Any], group: int, x: Any) -> list[Any]:
    *row, column = index
    if x.get_device().type != "cpu":
        return [*row, FloorDiv(column, group)]
    # The same number. The C++ back end splits a loop with ``column // group`` in it into whole
    # groups and drops what is left over (torch 2.11's cpp.py, try_loop_split).
    return [*row, FloorDiv(2 * column + 1, 2 * group)]


def divides(group: int, columns: Any) -> bool:
    """Return whether ``columns`` is known to be a multiple of ``group`` while compiling."""
    return bool(V.graph.sizevars.statically_known_multiple_of(columns, group))


def max_of_groups(x: Any, group: int, magnitude: Magnitude, *, pairs: bool = False) -> Amax:
    """Return the largest magnitude of each ``group`` elements of a row, (*, ceil(K / group)).

    Args:
        pairs: walk over pairs of elements (K is a multiple of ``group`` then), as a loop that
            packs two codes a byte does; the two can then be one kernel.
    """
    *rows, columns = x.get_size()
    device, width = x.get_device(), 2 if pairs else 1
    # On the CPU the codes come from a loop of their own, which rounds for itself.
    with_codes = device.type != "cpu"
    value = load_f32(x) if with_codes else load_unrounded(x)
    needs_rounding = not with_codes and _needs_rounding(x)
    ragged = not pairs and not divides(group, columns)
    groups = FloorDiv(columns + (group - 1 if ragged else 0), group)
    if any(known_equal(size, 0) for size in x.get_size()):
        zeros = stored(pointwise(x, F32, (*rows, groups), lambda index: f32(0.0)))
        return Amax(x, zeros, needs_rounding)

    def at(row: Sequence[Any], column: Any) -> Any:
        if not ragged:
            return magnitude(value([*row, column]), device)
        inside = ops.lt(ops.index_expr(column, torch.int64), ops.index_expr(columns, torch.int64))
        return ops.masked(inside, lambda: magnitude(value([*row, column]), device), 0.0)

    def element(index: Sequence[Any], reduction: Sequence[Any]) -> Any:
        first = index[-1] * group + reduction[0] * width
        largest = at(index[:-1], first)
        if pairs:
            largest = ops.maximum(largest, at(index[:-1], first + 1))
        return _ordered(largest, device)

    return Amax(x, _max(x, element, [*rows, groups], [group // width]), needs_rounding)
