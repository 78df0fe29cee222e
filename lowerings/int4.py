"""INT4 as Inductor IR; the arithmetic is ``decompositions/int4.py``'s.

Amax and codes both walk over pairs of elements, so that one kernel can do both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext._compat import FloorDiv, ModularIndexing, ops

from .int8 import result
from .integers import (
    GroupExpression,
    clamped,
    max_of_groups,
    of_groups,
    positive_part,
    rounded_quotient,
    scale_for,
    source_of_codes,
)
from .vocabulary import F32, abs_ignoring_nan, f32, i32, pointwise, stored


def quantize_int4_symmetric(x: Any, group: int) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_int4_symmetric``."""
    device, value = x.get_device(), source_of_codes(x)
    amax = max_of_groups(x, group, abs_ignoring_nan, pairs=True)
    scale = stored(
        pointwise(x, F32, amax.get_size(), lambda index: scale_for(amax.load(index), 7, device))
    )
    load_scale = scale.make_loader()

    def code(index: Sequence[Any], own: Sequence[Any]) -> Any:
        return clamped(rounded_quotient(value(index), load_scale(own), device), -8, 7)

    return _packed(x, group, code), scale


def quantize_int4_asymmetric(x: Any, group: int) -> tuple[Any, Any, Any]:
    """Lower ``inductor_ext::quantize_int4_asymmetric``."""
    device, value = x.get_device(), source_of_codes(x)
    high = max_of_groups(x, group, positive_part, pairs=True)
    below = max_of_groups(x, group, _negative_part, pairs=True)  # -min
    sizes = high.get_size()

    def scale_of(index: Sequence[Any]) -> Any:
        return scale_for(ops.add(high.load(index), below.load(index)), 15, device)

    scale = stored(pointwise(x, F32, sizes, scale_of))
    load_scale = scale.make_loader()

    def zero_at(index: Sequence[Any]) -> Any:
        quotient = rounded_quotient(below.load(index), load_scale(index), device)
        return clamped(quotient, 0, 15)

    def code(index: Sequence[Any], own: Sequence[Any]) -> Any:
        quotient = rounded_quotient(value(index), load_scale(own), device)
        return clamped(ops.add(quotient, zero_at(own)), 0, 15)

    def stored_zero(index: Sequence[Any]) -> Any:
        return ops.to_dtype(zero_at(index), torch.uint8)

    return _packed(x, group, code), scale, pointwise(x, torch.uint8, sizes, stored_zero)


def dequantize_int4(codes: Any, scale: Any, zero: Any, group: int, dtype: torch.dtype) -> Any:
    """Lower ``inductor_ext::dequantize_int4``; rounded even where the result is fused away."""
    load, factor = codes.make_loader(), scale.make_loader()
    device, (*rows, width) = codes.get_device(), codes.get_size()

    def element(index: Sequence[Any], own: Sequence[Any]) -> Any:
        *row, column = index
        byte = ops.to_dtype(load([*row, FloorDiv(column, 2)]), torch.int32)
        shift = ops.index_expr(4 * ModularIndexing(column, 1, 2), torch.int32)
        nibble = ops.bitwise_and(ops.bitwise_right_shift(byte, shift), i32(15))
        if zero is None:  # two's complement: flip the sign bit, then take its weight away
            number = ops.sub(ops.bitwise_xor(nibble, i32(8)), i32(8))
        else:
            number = ops.sub(nibble, ops.to_dtype(zero.make_loader()(own), torch.int32))
        return result(ops.mul(ops.to_dtype(number, F32), factor(own)), dtype, device)

    return of_groups(codes, dtype, [*rows, 2 * width], group, element)


def _negative_part(value: Any, device: torch.device) -> Any:
    return positive_part(ops.sub(f32(0.0), value), device)


def _packed(x: Any, group: int, code: GroupExpression) -> Any:
    """Return two codes a byte."""
    *rows, columns = x.get_size()

    def byte(index: Sequence[Any], own: Sequence[Any]) -> Any:
        *row, pair = index
        low = ops.to_dtype(code([*row, 2 * pair], own), torch.int32)
        high = ops.to_dtype(code([*row, 2 * pair + 1], own), torch.int32)
        low = ops.bitwise_and(low, i32(15))
        high = ops.bitwise_and(ops.bitwise_left_shift(high, i32(4)), i32(240))
        return ops.to_dtype(ops.bitwise_or(low, high), torch.uint8)

    return of_groups(x, torch.uint8, [*rows, FloorDiv(columns, 2)], group // 2, byte)
