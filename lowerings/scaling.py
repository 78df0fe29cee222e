"""Delayed scaling as Inductor IR; the arithmetic is ``decompositions/scaling.py``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext._compat import ModularIndexing, ops

from .integers import positive_part
from .vocabulary import F32, Amax, _max, _ordered, div_rn, f32, pointwise

_FLOAT32_MAX = torch.finfo(F32).max


def update_fp8_scale(
    history: Any, scale: Any, dtype: torch.dtype, margin: int = 0, algorithm: str = "max"
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::update_fp8_scale``."""
    device, (length, *columns) = history.get_device(), history.get_size()
    load, load_scale = history.make_loader(), scale.make_loader()

    def moved(index: Sequence[Any]) -> Any:
        entry, *column = index
        value = load([ModularIndexing(entry + 1, 1, length), *column])
        first = ops.eq(ops.index_expr(entry, torch.int64), ops.constant(0, torch.int64))
        return ops.where(first, f32(0.0), value)

    def element(index: Sequence[Any], reduction: Sequence[Any]) -> Any:
        return _ordered(positive_part(load([*reduction, *index]), device), device)

    if algorithm == "max":
        amax = Amax(history, _max(history, element, columns, [length]), False).load
    else:
        amax = lambda index: load([0, *index])  # noqa: E731
    largest = torch.finfo(dtype).max * 2.0**-margin

    def updated(index: Sequence[Any]) -> Any:
        value = amax(index if columns else [])
        quotient = ops.minimum(div_rn(f32(largest), value, device), f32(_FLOAT32_MAX))
        usable = ops.logical_and(ops.gt(value, f32(0.0)), ops.le(value, f32(_FLOAT32_MAX)))
        return ops.where(usable, quotient, load_scale(index))

    new_history = pointwise(history, F32, history.get_size(), moved)
    return new_history, pointwise(scale, F32, scale.get_size(), updated)
