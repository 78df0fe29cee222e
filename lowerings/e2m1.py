"""e2m1 codes as Inductor IR: to nearest, stochastically, and back; all int32 and fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext._compat import ops

from .philox import Words, block_words
from .vocabulary import F32, f32, i32, is_nan

_MAGIC = 4194304.0 + 32619.0
"""Rounds to the grid of e2m1 and leaves its code; see kernels/common/nvfp4.h."""


def bits_of(value: Any) -> Any:
    return ops.to_dtype_bitcast(value, torch.int32, F32)


def code_of(scaled: Any, magnitude: Callable[[Any], Any]) -> Any:
    """Return the code of a scaled element, int32; ``magnitude`` is given |scaled|, at most 6."""
    sign = ops.bitwise_and(ops.bitwise_right_shift(bits_of(scaled), i32(28)), i32(8))
    code = magnitude(ops.minimum(ops.abs(scaled), f32(6.0)))
    return ops.where(is_nan(scaled), i32(7), ops.bitwise_or(code, sign))


def _power(a: Any) -> Any:
    """Return the largest power of two that is not above a number, at least 1."""
    bits = ops.bitwise_and(bits_of(a), i32(0x7F800000))
    return ops.maximum(ops.to_dtype_bitcast(bits, F32, torch.int32), f32(1.0))


def to_nearest(a: Any) -> Any:
    bits = bits_of(ops.add(a, ops.mul(_power(a), f32(_MAGIC))))
    return ops.bitwise_and(ops.add(bits, ops.bitwise_right_shift(bits, i32(22))), i32(15))


def _downwards(t: Any) -> Any:
    """Return the code of the largest grid value that is not above a number below 8."""
    big = ops.sub(ops.bitwise_right_shift(bits_of(t), i32(22)), i32(252))
    small = ops.where(ops.ge(t, f32(0.5)), i32(1), i32(0))
    return ops.where(ops.ge(t, f32(1.0)), big, small)


def stochastic(
    scaled: Sequence[Any],
    pair: Any,
    block: Any,
    stream: int,
    rng: Any,
    device: torch.device,
) -> list[Any]:
    """Return the codes of a pair of elements, rounded with the bits of its block."""
    words = Words(device)
    drawn = block_words(words, block, stream, rng)
    place = ops.index_expr(pair, torch.int32)
    word = drawn[3]
    for number in (2, 1, 0):
        word = ops.where(ops.lt(place, i32(2 * number + 2)), drawn[number], word)
    shift = ops.mul(ops.bitwise_and(place, i32(1)), i32(16))
    codes = []
    for odd, value in enumerate(scaled):
        half_u = ops.mul(words.byte(word, ops.add(shift, i32(8 * odd))), f32(2.0**-9))

        def rounded_up(a: Any, half_u: Any = half_u) -> Any:
            return _downwards(ops.add(a, ops.mul(half_u, _power(a))))  # the product is exact

        codes.append(code_of(value, rounded_up))
    return codes


def value_of(code: Any) -> Any:
    """Return the fp32 value of a code in [0, 16), int32."""
    magnitude = ops.bitwise_and(code, i32(7))
    small = ops.mul(ops.to_dtype(magnitude, F32), f32(0.5))
    bits = ops.add(ops.bitwise_left_shift(magnitude, i32(22)), i32(126 << 23))
    large = ops.to_dtype_bitcast(bits, F32, torch.int32)
    value = ops.where(ops.lt(magnitude, i32(2)), small, large)
    sign = ops.bitwise_left_shift(ops.bitwise_and(code, i32(8)), i32(28))
    return ops.to_dtype_bitcast(ops.bitwise_or(bits_of(value), sign), F32, torch.int32)
