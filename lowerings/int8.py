"""INT8 as Inductor IR; the arithmetic is ``decompositions/int8.py``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext import config
from inductor_ext._compat import ops

from . import templates
from .integers import (
    GroupExpression,
    clamped,
    max_of_groups,
    of_groups,
    rounded_quotient,
    scale_for,
    source_of_codes,
)
from .vocabulary import (
    F32,
    Amax,
    Expression,
    abs_ignoring_nan,
    amax_of_all,
    amax_of_rows,
    known_equal,
    pointwise,
    rounded,
    stored,
)

_MAX = 127
_RULE = templates.Rule("int8", False)


def quantize_int8_tensor(x: Any) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_int8_tensor``."""
    fused = templates.quantize_tensor(x, _RULE)
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    value = source_of_codes(x)
    rows = templates.amax_of_rows(x)
    code, scale = _codes(x, value, amax_of_all(x, with_codes=False, rows=rows))
    return pointwise(x, torch.int8, x.get_size(), lambda index: code(index, [])), scale


def quantize_int8_row(x: Any) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_int8_row``."""
    fused = templates.quantize_rows(x, _RULE, 0)
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    value = source_of_codes(x)
    amax = amax_of_rows(x, with_codes=x.get_device().type != "cpu")
    code, scale = _codes(x, value, amax)
    element = lambda index: code(index, [*index[:-1], 0])  # noqa: E731
    return pointwise(x, torch.int8, x.get_size(), element), scale


def quantize_int8_group(x: Any, group: int) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_int8_group``."""
    fused = templates.quantize_rows(x, _RULE, group)
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    value = source_of_codes(x)
    code, scale = _codes(x, value, max_of_groups(x, group, abs_ignoring_nan))
    return of_groups(x, torch.int8, x.get_size(), group, code), scale


def dequantize_int8(codes: Any, scale: Any, group: int, dtype: torch.dtype) -> Any:
    """Lower ``inductor_ext::dequantize_int8``; rounded even where the result is fused away."""
    load, factor, size = codes.make_loader(), scale.make_loader(), codes.get_size()

    def element(index: Sequence[Any], own: Sequence[Any]) -> Any:
        product = ops.mul(ops.to_dtype(load(index), F32), factor(own))
        return result(product, dtype, codes.get_device())

    if group:
        return of_groups(codes, dtype, size, group, element)
    if all(known_equal(extent, 1) for extent in scale.get_size()):
        first = [0] * len(scale.get_size())
        return pointwise(codes, dtype, size, lambda index: element(index, first))
    return pointwise(codes, dtype, size, lambda index: element(index, [*index[:-1], 0]))


def result(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return an fp32 value as ``dtype``, rounded even if a consumer takes it as fp32."""
    if dtype == F32 or config.numerics == "fast":
        return ops.to_dtype(value, dtype)
    return ops.to_dtype(rounded(value, dtype, device), dtype)


def _codes(x: Any, value: Expression, amax: Amax) -> tuple[GroupExpression, Any]:
    """Return the code of an element, given its scale's index too, and the scales."""
    device = x.get_device()

    def scale_of(index: Sequence[Any]) -> Any:
        return scale_for(amax.load(index), _MAX, device)

    scale = stored(pointwise(x, F32, amax.get_size(), scale_of))
    load_scale = scale.make_loader()

    def code(index: Sequence[Any], own: Sequence[Any]) -> Any:
        quotient = rounded_quotient(value(index), load_scale(own), device)
        return ops.to_dtype(clamped(quotient, -_MAX, _MAX), torch.int8)

    return code, scale
