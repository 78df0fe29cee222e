"""The words that lowerings are written in: loads, exact arithmetic, reductions, results.

An *expression* is a function from an index (a list of symbols) to an Inductor value; it is run
several times under analysis handlers, so it must have no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext import config
from inductor_ext._compat import ir, ops

Expression = Callable[[Sequence[Any]], Any]
F32 = torch.float32


def load_f32(x: Any) -> Expression:
    """Load ``x`` as fp32, rounded to its own dtype first.

    A bf16 or fp16 producer fused into the load arrives unrounded; eager mode has rounded it by
    storing it.  ``config.numerics = "fast"`` skips the rounding.
    """
    load, dtype, device = x.make_loader(), x.get_dtype(), x.get_device()

    def expression(index: Sequence[Any]) -> Any:
        value = load(index)
        return value if dtype == F32 else rounded(value, dtype, device)

    return expression


def rounded(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Round an fp32 value to bf16 or fp16 and back, also where Inductor would elide it."""
    if config.numerics == "fast":
        return ops.to_dtype(value, F32)
    if device.type != "cpu":
        narrow = ops.to_dtype(value, dtype, use_compute_types=False)
        return ops.to_dtype(narrow, F32, src_dtype=dtype)
    # The C++ back end of torch 2.11 undoes a cast there and back, so it is done by arithmetic.
    value = ops.to_dtype(value, F32)
    exact = _round_to_bf16(value) if dtype == torch.bfloat16 else _round_to_fp16(value)
    return ops.where(is_nan(value), value, exact)


def _round_to_bf16(value: Any) -> Any:
    bits = ops.to_dtype_bitcast(value, torch.int32, F32)
    odd = ops.bitwise_and(ops.bitwise_right_shift(bits, i32(16)), i32(1))
    bits = ops.bitwise_and(ops.add(ops.add(bits, i32(0x7FFF)), odd), i32(-0x10000))
    return ops.to_dtype_bitcast(bits, F32, torch.int32)


def _round_to_fp16(value: Any) -> Any:
    bits = ops.to_dtype_bitcast(value, torch.int32, F32)
    sign = ops.bitwise_and(bits, i32(-0x80000000))
    odd = ops.bitwise_and(ops.bitwise_right_shift(bits, i32(13)), i32(1))
    normal = ops.bitwise_and(ops.add(ops.add(bits, i32(0xFFF)), odd), i32(-0x2000))
    normal = ops.to_dtype_bitcast(normal, F32, torch.int32)
    too_large = ops.ge(ops.abs(normal), f32(65536.0))
    normal = ops.where(too_large, ops.mul(value, f32(float("inf"))), normal)
    # Below 2^-14 the grid is 2^-24 wide, which is the grid of fp32 in [0.5, 1).
    small = ops.sub(ops.add(ops.abs(value), f32(0.5)), f32(0.5))
    small = ops.bitwise_or(ops.to_dtype_bitcast(small, torch.int32, F32), sign)
    small = ops.to_dtype_bitcast(small, F32, torch.int32)
    return ops.where(ops.lt(ops.abs(value), f32(2.0**-14)), small, normal)


def f32(value: float) -> Any:
    """Return an fp32 constant."""
    return ops.constant(value, F32)


def i32(value: int) -> Any:
    """Return an int32 constant."""
    return ops.constant(value, torch.int32)


def is_nan(value: Any) -> Any:
    """Return value != value."""
    return ops.ne(value, value)


def div_rn(a: Any, b: Any, device: torch.device) -> Any:
    """Divide with IEEE rounding; Triton's own ``/`` on fp32 is off by up to two ulp."""
    if device.type == "cpu":
        return ops.truediv(a, b)
    return ops.inline_asm_elementwise(
        a, b, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=F32, is_pure=True, pack=1
    )


def abs_ignoring_nan(value: Any) -> Any:
    """Return |value|, or 0 for NaN: what an amax takes."""
    return ops.where(is_nan(value), f32(0.0), ops.abs(value))


def saturate_cast(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Clamp an fp32 value to the largest finite code and round it; NaN becomes code 0x7F."""
    limit = torch.finfo(dtype).max
    clamped = ops.minimum(ops.maximum(value, f32(-limit)), f32(limit))
    if device.type == "cpu":  # the hardware's conversion has one NaN code, C++ keeps the sign
        clamped = ops.where(is_nan(value), f32(float("nan")), clamped)
    return ops.to_dtype(clamped, dtype)


def pointwise(
    like: Any, dtype: torch.dtype, size: Sequence[Any], expression: Expression
) -> Any:
    """Return a tensor of ``size`` on the device of ``like``, element by element."""
    return ir.Pointwise.create(
        device=like.get_device(), dtype=dtype, inner_fn=expression, ranges=list(size)
    )


def stored(value: Any) -> Any:
    """Give a value a buffer, so that its consumers load it instead of computing it again."""
    value.realize()
    return value


def amax_of_rows(x: Any, expression: Expression) -> Any:
    """Return max over the last dimension of an fp32 expression over ``x``, shape (*, 1)."""
    *rows, columns = x.get_size()
    if columns == 0 or any(size == 0 for size in rows):
        return stored(pointwise(x, F32, (*rows, 1), lambda index: f32(0.0)))
    reduced = ir.Reduction.create(
        device=x.get_device(),
        dst_dtype=F32,
        src_dtype=F32,
        inner_fn=lambda index, reduction: expression([*index[:-1], *reduction]),
        ranges=[*rows, 1],
        reduction_ranges=[columns],
        reduction_type="max",
        input_node=x,
    )
    return stored(reduced)


def amax_of_all(x: Any, expression: Expression) -> Any:
    """Return the max of an fp32 expression over all of ``x``, 0-d.

    Rows first, then their maxima: the first pass then fuses with whatever else walks the rows of
    ``x`` (its producer, the quantization), and the second is tiny.
    """
    if any(size == 0 for size in x.get_size()):
        return stored(pointwise(x, F32, (), lambda index: f32(0.0)))
    if not x.get_size():
        return stored(pointwise(x, F32, (), expression))
    rows = amax_of_rows(x, expression)
    load = rows.make_loader()
    reduced = ir.Reduction.create(
        device=x.get_device(),
        dst_dtype=F32,
        src_dtype=F32,
        inner_fn=lambda index, reduction: load(reduction),
        ranges=[],
        reduction_ranges=list(rows.get_size()),
        reduction_type="max",
        input_node=rows,
    )
    return stored(reduced)
