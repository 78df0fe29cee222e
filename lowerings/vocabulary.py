"""The words that lowerings are written in: loads, exact arithmetic, reductions, results.

An *expression* is a function from an index (a list of symbols) to an Inductor value; it is run
several times under analysis handlers, so it must have no side effects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext import config
from inductor_ext._compat import ReductionHint, V, ir, ops
from inductor_ext._neighbours import comes_from_memory
from inductor_ext._schedule import MAX_ROW

Expression = Callable[[Sequence[Any]], Any]
F32 = torch.float32


def load_f32(x: Any) -> Expression:
    """Load ``x`` as fp32, rounded to its own dtype first.

    A bf16 or fp16 producer fused into the load arrives unrounded; eager mode has rounded it by
    storing it.  ``config.numerics = "fast"`` skips the rounding.
    """
    load = load_unrounded(x)
    if not _needs_rounding(x):
        return load
    dtype, device = x.get_dtype(), x.get_device()
    return lambda index: rounded(load(index), dtype, device)


def load_unrounded(x: Any) -> Expression:
    """Load ``x`` as fp32, as its producer left it."""
    load = x.make_loader()
    return lambda index: ops.to_dtype(load(index), F32)


def _needs_rounding(x: Any) -> bool:
    return x.get_dtype() != F32 and config.numerics == "exact" and not comes_from_memory(x)


def rounded(
    value: Any, dtype: torch.dtype, device: torch.device, *, before_addition: bool = False
) -> Any:
    """Round an fp32 value to bf16 or fp16 and back, also where a compiler would elide it.

    Args:
        value: the fp32 value.
        dtype: bfloat16 or float16.
        device: where it is computed.
        before_addition: whether ``value`` may be a product that is added to something next.
    """
    if device.type == "cuda" and before_addition and torch.version.hip is None:
        # Of casts around an fp32 product LLVM makes a bf16 product, which has the same bits, and
        # of that and an addition one bf16 fma, which has one rounding less.
        return ops.inline_asm_elementwise(
            value, asm=_ROUND_PTX[dtype], constraints="=f,f", dtype=F32, is_pure=True, pack=1
        )
    if device.type != "cpu":
        narrow = ops.to_dtype(value, dtype, use_compute_types=False)
        return ops.to_dtype(narrow, F32, src_dtype=dtype)
    # The C++ back end of torch 2.11 undoes a cast there and back, so it is done by arithmetic.
    exact = _round_to_bf16(value) if dtype == torch.bfloat16 else _round_to_fp16(value)
    return ops.where(is_nan(value), value, exact)


_ROUND_PTX = {
    torch.bfloat16: "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; mov.b32 $0, {0, h}; }",
    torch.float16: "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.f32.f16 $0, h; }",
}


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


def abs_ignoring_nan(value: Any, device: torch.device) -> Any:
    """Return |value|, or 0 for NaN: what an amax takes."""
    magnitude = ops.abs(value)
    if device.type == "cpu":
        return ops.where(is_nan(value), f32(0.0), magnitude)
    # PTX max returns the operand that is a number: one instruction instead of three.
    return ops.inline_asm_elementwise(
        magnitude, asm="max.f32 $0, $1, 0f00000000;", constraints="=f,f", dtype=F32,
        is_pure=True, pack=1,
    )  # fmt: skip


def saturate_cast(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Clamp an fp32 value to the largest finite code and round it; NaN becomes code 0x7F."""
    if device.type == "cuda":  # cvt.rn.satfinite clamps, and has one code for every NaN
        return ops.to_dtype(value, dtype)
    limit = torch.finfo(dtype).max
    clamped = ops.minimum(ops.maximum(value, f32(-limit)), f32(limit))
    return ops.to_dtype(ops.where(is_nan(value), f32(float("nan")), clamped), dtype)


def pointwise(like: Any, dtype: torch.dtype, size: Sequence[Any], expression: Expression) -> Any:
    """Return a tensor of ``size`` on the device of ``like``, element by element."""
    return ir.Pointwise.create(
        device=like.get_device(), dtype=dtype, inner_fn=expression, ranges=list(size)
    )


def known_equal(size: Any, value: int) -> bool:
    """Return whether a size is known to be ``value`` while compiling (symbols may not be)."""
    return bool(V.graph.sizevars.statically_known_equals(size, value))


def stored(value: Any) -> Any:
    """Give a value a buffer, so that its consumers load it instead of computing it again."""
    value.realize()
    return value


def amax_of_rows(x: Any, *, with_codes: bool) -> Amax:
    """Return max |x| over the last dimension, NaN skipped, shape (*, 1).

    Args:
        with_codes: whether the codes come from the same pass over ``x``; see :class:`Amax`.
    """
    *rows, columns = x.get_size()
    value, device = load_f32(x) if with_codes else load_unrounded(x), x.get_device()
    needs_rounding = not with_codes and _needs_rounding(x)
    if any(known_equal(size, 0) for size in x.get_size()):
        zeros = stored(pointwise(x, F32, (*rows, 1), lambda index: f32(0.0)))
        return Amax(x, zeros, needs_rounding)

    def element(index: Sequence[Any], reduction: Sequence[Any]) -> Any:
        return _ordered(abs_ignoring_nan(value([*index[:-1], *reduction]), device), device)

    return Amax(x, _max(x, element, [*rows, 1], [columns]), needs_rounding)


def amax_of_all(x: Any, *, with_codes: bool, rows: Any = None) -> Amax:
    """Return max |x| over everything, NaN skipped, 0-d.

    Args:
        with_codes: whether the codes come from the same pass over ``x``; see :class:`Amax`.
        rows: the bits of each row's amax before rounding, where a template has taken them.

    Rows first, then their maxima: the first pass then fuses with whatever else walks the rows of
    ``x`` (its producer, the quantization), and the second is tiny.
    """
    if rows is not None:
        load, lengths = rows.make_loader(), list(rows.get_size())
        reduced = _max(rows, lambda index, reduction: load(reduction), [], lengths)
        return Amax(x, reduced, _needs_rounding(x))
    size = list(x.get_size())
    if any(known_equal(extent, 0) for extent in size):
        return Amax(x, stored(pointwise(x, F32, (), lambda index: f32(0.0))), False)
    # Inductor cannot fuse a row's loop with a flat one unless it knows that a row is one.
    if size and V.graph.sizevars.statically_known_gt(size[-1], 1):
        rows = amax_of_rows(x, with_codes=with_codes)
        load, lengths = rows.buffer.make_loader(), list(rows.buffer.get_size())
        reduced = _max(rows.buffer, lambda index, reduction: load(reduction), [], lengths)
        return Amax(x, reduced, rows.needs_rounding)
    value, device = load_unrounded(x), x.get_device()

    def element(index: Sequence[Any], reduction: Sequence[Any]) -> Any:
        return _ordered(abs_ignoring_nan(value(reduction), device), device)

    return Amax(x, _max(x, element, [], size), _needs_rounding(x))


def amax_of_groups(
    x: Any,
    value: Callable[[Sequence[Any], Sequence[Any]], Any],
    ranges: Sequence[Any],
    group: Sequence[Any],
    hint: Any = None,
) -> Amax:
    """Return max |value(index, element)| over the elements of a group, NaN skipped.

    Args:
        value: the fp32 element of a group; 0 where a ragged group has none.
        ranges: size of the result.  group: size of a group, any number of dimensions.
        hint: Inductor's ReductionHint for the way in which small groups lie in memory; None
            for large ones, which Inductor may split.
    """
    device = x.get_device()
    if any(known_equal(size, 0) for size in (*ranges, *group)):
        return Amax(x, stored(pointwise(x, F32, ranges, lambda index: f32(0.0))), False)

    def element(index: Sequence[Any], reduction: Sequence[Any]) -> Any:
        return _ordered(abs_ignoring_nan(value(index, reduction), device), device)

    if all(known_equal(size, 1) for size in group):  # Inductor's rule: no reduction
        zeros = [0] * len(group)
        same = pointwise(x, _amax_dtype(device), ranges, lambda index: element(index, zeros))
        return Amax(x, stored(same), False)
    arguments = {
        "device": device,
        "src_dtype": _amax_dtype(device),
        "inner_fn": element,
        "ranges": list(ranges),
        "reduction_ranges": list(group),
        "reduction_type": "max",
    }
    dtype = _amax_dtype(device)
    if hint is None:
        reduced = ir.Reduction.create(dst_dtype=dtype, input_node=x, **arguments)
    else:
        loop = ir.Reduction(dtype=dtype, reduction_hint=hint, **arguments)
        reduced = ir.TensorBox.create(loop)
    return Amax(x, stored(reduced), False)


class Amax:
    """The result of an amax: a buffer, and how to read it as fp32.

    On a GPU the maximum is taken over the bits of the magnitudes as integers, which order like
    the numbers: one instruction an element, where Inductor's NaN-propagating maximum takes three.

    Rounding to the dtype of ``x`` is monotonic, so the maximum may be taken first and rounded
    then.  A pass that takes the amax alone does so; one that makes the codes too has the rounded
    elements at hand, and using them is faster (SiLU -> row on an H200: 169 us against 181).
    """

    def __init__(self, x: Any, buffer: Any, needs_rounding: bool) -> None:
        self.buffer, self.dtype, self.device = buffer, x.get_dtype(), x.get_device()
        self.needs_rounding = needs_rounding

    def load(self, index: Sequence[Any]) -> Any:
        """Return the fp32 amax at an index."""
        value = self.buffer.make_loader()(index)
        # The maximum of nothing is 0 (sizes that are only known at run time may be 0).
        if self.buffer.get_dtype() == torch.int32:
            value = ops.to_dtype_bitcast(ops.maximum(value, i32(0)), F32, torch.int32)
        else:
            value = ops.maximum(value, f32(0.0))
        return rounded(value, self.dtype, self.device) if self.needs_rounding else value

    def get_size(self) -> list[Any]:
        """Return its size: [] or [*, 1]."""
        return list(self.buffer.get_size())


def _amax_dtype(device: torch.device) -> torch.dtype:
    return F32 if device.type == "cpu" else torch.int32


def _ordered(magnitude: Any, device: torch.device) -> Any:
    dtype = _amax_dtype(device)
    return magnitude if dtype == F32 else ops.to_dtype_bitcast(magnitude, dtype, F32)


def _max(
    x: Any,
    element: Callable[[Sequence[Any], Sequence[Any]], Any],
    ranges: list[Any],
    reduction_ranges: list[Any],
) -> Any:
    """Reduce by maximum: in one kernel where one thread block can hold what is reduced."""
    dtype = _amax_dtype(x.get_device())
    arguments = {
        "device": x.get_device(),
        "src_dtype": dtype,
        "inner_fn": element,
        "ranges": ranges,
        "reduction_ranges": reduction_ranges,
        "reduction_type": "max",
    }
    if all(known_equal(size, 1) for size in reduction_ranges):  # Inductor's rule: no reduction
        zeros = [0] * len(reduction_ranges)
        return stored(pointwise(x, dtype, ranges, lambda index: element(index, zeros)))
    known = V.graph.sizevars.statically_known_leq
    if not known(math.prod(reduction_ranges), MAX_ROW) or not _contiguous_rows(x):
        return stored(ir.Reduction.create(dst_dtype=dtype, input_node=x, **arguments))
    hint = ReductionHint.INNER
    return stored(ir.TensorBox.create(ir.Reduction(dtype=dtype, reduction_hint=hint, **arguments)))


def _contiguous_rows(x: Any) -> bool:
    stride = x.maybe_get_stride()
    return not stride or known_equal(stride[-1], 1)
