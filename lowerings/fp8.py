"""FP8 per tensor and per row as Inductor IR; the arithmetic is ``decompositions/fp8.py``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext import config
from inductor_ext._compat import V, ops
from inductor_ext._neighbours import amax_is_used

from . import templates
from .vocabulary import (
    F32,
    Expression,
    amax_of_all,
    amax_of_rows,
    div_rn,
    f32,
    i32,
    known_equal,
    load_f32,
    load_unrounded,
    pointwise,
    rounded,
    saturate_cast,
    stored,
)

FLOAT32_MAX = torch.finfo(torch.float32).max


def quantize_fp8_static(x: Any, scale: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_static``."""
    value, device = load_f32(x), x.get_device()
    rowwise = _has_row_scale(x, scale)
    load_scale = scale.make_loader()
    amax = (amax_of_rows if rowwise else amax_of_all)(x, with_codes=True)
    together = not rowwise and device.type != "cpu" and amax_is_used(V.graph.current_node)

    def inverse(index: Sequence[Any]) -> Any:
        result = div_rn(f32(1.0), load_scale(index), device)
        if not together:
            return result
        # No amax is negative.  Asking has the kernel of the last maximum make this number too,
        # which would take a kernel of its own.
        return ops.where(ops.ge(amax.load([]), f32(0.0)), result, f32(0.0))

    scale_inv = pointwise(x, F32, scale.get_size(), inverse)
    largest = pointwise(x, F32, scale.get_size(), lambda i: amax.load(i if rowwise else []))
    return _codes(x, value, scale, dtype), scale_inv, largest


def quantize_fp8_tensor(
    x: Any, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_tensor``."""
    rule = rule_of(x, dtype, eps, pow2)._replace(limit=FLOAT32_MAX)
    fused = templates.quantize_tensor(x, rule)
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    return _current(x, dtype, eps, pow2, FLOAT32_MAX, rowwise=False)


def quantize_fp8_row(
    x: Any, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_row``."""
    rule = rule_of(x, dtype, eps, pow2)
    fused = templates.quantize_rows(x, rule, 0)
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    return _current(x, dtype, eps, pow2, rule.limit, rowwise=True)


def dequantize_fp8(codes: Any, scale_inv: Any, dtype: torch.dtype) -> Any:
    """Lower ``inductor_ext::dequantize_fp8``; the result is rounded even if it is fused away."""
    load, scale = codes.make_loader(), _scale_of(codes, scale_inv)
    device = codes.get_device()

    def element(index: Sequence[Any]) -> Any:
        product = ops.mul(ops.to_dtype(load(index), F32), scale(index))
        if dtype == F32 or config.numerics == "fast":
            return ops.to_dtype(product, dtype)
        return ops.to_dtype(rounded(product, dtype, device), dtype)

    return pointwise(codes, dtype, codes.get_size(), element)


def _current(
    x: Any, dtype: torch.dtype, eps: float, pow2: bool, limit: float, *, rowwise: bool
) -> tuple[Any, Any]:
    """Return codes and scale_inv for the scale that the amax of ``x`` gives."""
    device = x.get_device()
    if device.type == "cpu":
        # The amax and the codes are loops of their own here: store the producer's result for
        # the second one (its load is then rounded) rather than computing it twice.
        value = load_unrounded(stored(x))
    else:
        value = load_f32(x)
    if rowwise:
        amax = amax_of_rows(x, with_codes=device.type != "cpu")
    else:
        amax = amax_of_all(x, with_codes=False, rows=templates.amax_of_rows(x))

    def scale_of(index: Sequence[Any]) -> Any:
        return current_scale(amax.load(index), dtype, eps, pow2, limit, device)

    scale = stored(pointwise(x, F32, amax.get_size(), scale_of))
    load_scale = scale.make_loader()
    inverse = pointwise(
        x, F32, amax.get_size(), lambda index: div_rn(f32(1.0), load_scale(index), device)
    )
    return _codes(x, value, scale, dtype), inverse


def rule_of(x: Any, dtype: torch.dtype, eps: float, pow2: bool) -> templates.Rule:
    """Return current scaling of ``x`` as templates take it."""
    limit = torch.finfo(x.get_dtype()).max
    return templates.Rule("fp8", dtype == torch.float8_e5m2, eps=eps, limit=limit, pow2=pow2)


def current_scale(
    amax: Any, dtype: torch.dtype, eps: float, pow2: bool, limit: float, device: torch.device
) -> Any:
    """Return the quantization multiplier for an fp32 amax; see ``decompositions/fp8.py``."""
    if eps > 0.0:
        amax = ops.where(ops.lt(amax, f32(eps)), f32(eps), amax)
    infinity = f32(float("inf"))
    scale = div_rn(f32(torch.finfo(dtype).max), amax, device)
    scale = ops.where(ops.eq(scale, infinity), f32(limit), scale)
    if pow2:
        bits = ops.to_dtype_bitcast(scale, torch.int32, F32)
        scale = ops.to_dtype_bitcast(ops.bitwise_and(bits, i32(-0x00800000)), F32, torch.int32)
    ordinary = ops.logical_and(ops.gt(amax, f32(0.0)), ops.lt(amax, infinity))
    return ops.where(ordinary, scale, f32(1.0))


def _codes(x: Any, value: Expression, scale: Any, dtype: torch.dtype) -> Any:
    multiplier, device = _scale_of(x, scale), x.get_device()

    def product(index: Sequence[Any]) -> Any:
        return ops.mul(value(index), multiplier(index))

    if device.type == "cpu":
        # As a node of its own: the C++ back end then takes fp32's vector length for the loop, for
        # which it has a vectorized conversion to FP8; at bf16's length it converts one by one.
        product = stored(pointwise(x, F32, x.get_size(), product)).make_loader()
    return pointwise(
        x, dtype, x.get_size(), lambda index: saturate_cast(product(index), dtype, device)
    )


def _has_row_scale(x: Any, scale: Any) -> bool:
    """Return whether ``scale`` has more than one element: then it is (*x.shape[:-1], 1).

    The fake has checked the shapes.  They are not compared here: sizes that a guard makes equal
    are different symbols.
    """
    return any(not known_equal(size, 1) for size in scale.get_size())


def _scale_of(x: Any, scale: Any) -> Expression:
    """Return the scale that belongs to an element of ``x``."""
    load = scale.make_loader()
    if _has_row_scale(x, scale):
        return lambda index: load([*index[:-1], 0])
    return lambda index: load([0] * len(scale.get_size()))
