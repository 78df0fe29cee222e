"""Delayed scaling as Inductor IR; the arithmetic is ``decompositions/scaling.py``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext._compat import ops

from .integers import positive_part
from .vocabulary import F32, Amax, _max, _ordered, div_rn, f32, known_equal, pointwise

_FLOAT32_MAX = torch.finfo(F32).max


def update_fp8_scale(
    history: Any, scale: Any, dtype: torch.dtype, margin: int = 0, algorithm: str = "max"
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::update_fp8_scale``."""
    device, (length, *columns) = history.get_device(), history.get_size()
    load, load_scale = history.make_loader(), scale.make_loader()
    if known_equal(length, 0):
        nothing = pointwise(history, F32, history.get_size(), lambda index: f32(0.0))
        return nothing, pointwise(scale, F32, scale.get_size(), load_scale)

    def is_first(entry: Any) -> Any:
        return ops.eq(ops.index_expr(entry, torch.int64), ops.constant(0, torch.int64))

    def moved(index: Sequence[Any]) -> Any:
        entry, *column = index
        inner = ops.lt(ops.index_expr(entry + 1, torch.int64), ops.index_expr(length, torch.int64))
        value = ops.masked(inner, lambda: load([entry + 1, *column]), 0.0)
        value = ops.where(inner, value, load([0, *column]))
        return ops.where(is_first(entry), f32(0.0), value)

    def element(index: Sequence[Any], reduction: Sequence[Any]) -> Any:
        value = positive_part(load([*reduction, *index]), device)
        if algorithm == "most_recent":
            value = ops.where(is_first(reduction[0]), value, f32(0.0))
        return _ordered(value, device)

    amax = Amax(history, _max(history, element, columns, [length]), False)
    largest = torch.finfo(dtype).max * 2.0**-margin

    def updated(index: Sequence[Any]) -> Any:
        value = amax.load(index if columns else [])
        quotient = ops.minimum(div_rn(f32(largest), value, device), f32(_FLOAT32_MAX))
        usable = ops.logical_and(ops.gt(value, f32(0.0)), ops.le(value, f32(_FLOAT32_MAX)))
        return ops.where(usable, quotient, load_scale(index))

    new_history = pointwise(history, F32, history.get_size(), moved)
    return new_history, pointwise(scale, F32, scale.get_size(), updated)
