"""INT8 as Inductor IR; the arithmetic is ``decompositions/int8.py``'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext import config
from inductor_ext._compat import ops

from .integers import (
    clamped,
    group_of,
    max_of_groups,
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


def quantize_int8_tensor(x: Any) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_int8_tensor``."""
    value = source_of_codes(x)
    return _quantize(x, value, amax_of_all(x, with_codes=False), lambda index: [])


def quantize_int8_row(x: Any) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_int8_row``."""
    value = source_of_codes(x)
    amax = amax_of_rows(x, with_codes=x.get_device().type != "cpu")
    return _quantize(x, value, amax, lambda index: [*index[:-1], 0])


def quantize_int8_group(x: Any, group: int) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_int8_group``."""
    value = source_of_codes(x)
    amax = max_of_groups(x, group, abs_ignoring_nan)
    return _quantize(x, value, amax, lambda index: group_of(index, group, x.get_size()[-1]))


def dequantize_int8(codes: Any, scale: Any, group: int, dtype: torch.dtype) -> Any:
    """Lower ``inductor_ext::dequantize_int8``; rounded even where the result is fused away."""
    load, factor = codes.make_loader(), scale.make_loader()
    whole = not group and all(known_equal(size, 1) for size in scale.get_size())

    def element(index: Sequence[Any]) -> Any:
        if whole:
            where = [0] * len(scale.get_size())
        else:
            columns = codes.get_size()[-1]
            where = group_of(index, group, columns) if group else [*index[:-1], 0]
        product = ops.mul(ops.to_dtype(load(index), F32), factor(where))
        return result(product, dtype, codes.get_device())

    return pointwise(codes, dtype, codes.get_size(), element)


def result(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return an fp32 value as ``dtype``, rounded even if a consumer takes it as fp32."""
    if dtype == F32 or config.numerics == "fast":
        return ops.to_dtype(value, dtype)
    return ops.to_dtype(rounded(value, dtype, device), dtype)


def _quantize(
    x: Any, value: Expression, amax: Amax, scale_at: Callable[[Sequence[Any]], list[Any]]
) -> tuple[Any, Any]:
    device = x.get_device()

    def scale_of(index: Sequence[Any]) -> Any:
        return scale_for(amax.load(index), _MAX, device)

    scale = stored(pointwise(x, F32, amax.get_size(), scale_of))
    load_scale = scale.make_loader()

    def code(index: Sequence[Any]) -> Any:
        quotient = rounded_quotient(value(index), load_scale(scale_at(index)), device)
        return ops.to_dtype(clamped(quotient, -_MAX, _MAX), torch.int8)

    return pointwise(x, torch.int8, x.get_size(), code), scale
