"""The public scaled matrix product: two quantized matrices and their formats in, a tensor out."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ._call import call
from .api import _check_format, _guard_mode, _said
from .formats import FP8, INT4, INT8, MXFP8, Format, Quantized
from .validation import check_tensor

_ops = torch.ops.inductor_ext
_WHOLE = ("tensor", "row")
"""Granularities of FP8 whose scales are those of all of K."""


def scaled_mm(
    a: Quantized,
    b: Quantized,
    format: Format,
    format_b: Format | None = None,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply A by B^T, both quantized along K; docs/gemm.md says which kernel does it.

    Args:
        a: A (*, K), M rows in all, as ``quantize`` returns it.
        b: B (N, K), for instance ``quantize(linear.weight, format)``.  The column orientation of
            a matrix, transposed, is an operand of its own: that of X (M, K) is X^T (K, M).
        format: of ``a``. format_b: of ``b``, the same unless given.
        bias: (N,) of ``dtype``, added before the cast.
        dtype: of the result: bfloat16, float16 or float32.
        fast_accum: let the GPU accumulate in fewer bits where its kernel has a choice (FP8 with
            scales of a tensor or a row).
        out: (*, N) of ``dtype``, to write the result into; it is returned.

    Returns:
        (*, N).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    op, operands, options = _product(a, b, format, format_b, fast_accum)
    if bias is not None:
        check_tensor("bias", bias)
    if out is None:
        result: Tensor = call(op.default, *operands, bias, dtype, *options)
        # In an autograd.Function's forward Dynamo takes no sizes that are computed for nothing.
        return result if a[0].dim() == 2 else result.view(*a[0].shape[:-1], b[0].shape[0])
    check_tensor("out", out)
    _check_out(out, a, b)
    call(op.out, *operands, bias, dtype, *options, out=_rows(out))
    return out


def scaled_mm_accumulate_(
    out: Tensor,
    a: Quantized,
    b: Quantized,
    format: Format,
    format_b: Format | None = None,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """Add A times B^T to ``out``, in fp32: the sum of weight gradients over micro-batches.

    Args:
        out: (*, N) float32; it is returned.
        a, b, format, format_b, fast_accum: as for :func:`scaled_mm`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    check_tensor("out", out)
    op, operands, options = _product(a, b, format, format_b, fast_accum)
    _check_out(out, a, b)
    accumulate = getattr(_ops, op.__name__ + "_accumulate_")
    call(accumulate.default, _rows(out), *operands, *options)
    return out


def _product(
    a: Any, b: Any, f: Any, g: Any, fast_accum: bool
) -> tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]:
    """Return the op that multiplies these formats, its operands and its options."""
    _check_format(f)
    if g is not None:
        _check_format(g, "format_b")
    # Dynamo traces what is kept from call to call otherwise
    op, options = (_op_of if torch.compiler.is_compiling() else _known_op_of)(f, g)
    _check_operands(a, b)
    codes, scales = (_rows(a[0]), b[0]), (_rows(a[1]), _rows(b[1]))
    if op is _ops.scaled_mm:
        scale_b = scales[1] if scales[1].numel() == 1 else scales[1].t()
        return op, (codes[0], codes[1].t(), scales[0], scale_b), (fast_accum,)
    if op is _ops.scaled_mm_nvfp4:
        return op, (*codes, *scales, _amax("a", a), _amax("b", b)), options
    return op, (*codes, *scales), options


def _op_of(f: Any, g: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the op that multiplies two formats, and what it is told of them."""
    g = f if g is None else g
    _check_pair(f, g)
    if isinstance(f, FP8) and f.granularity in _WHOLE:
        return _ops.scaled_mm, ()
    if isinstance(f, INT8):
        groups = tuple(each.group if each.granularity == "group" else 0 for each in (f, g))
        return _ops.scaled_mm_int8, groups
    layouts = f.layout, g.layout
    if isinstance(f, FP8):
        squares = f.granularity == "square", g.granularity == "square"
        return _ops.scaled_mm_fp8_block, (f.block, *squares, *layouts)
    op = _ops.scaled_mm_mxfp8 if isinstance(f, MXFP8) else _ops.scaled_mm_nvfp4
    return op, (f.square, g.square, *layouts)


_known_op_of = functools.lru_cache(maxsize=1024)(_op_of)


def _check_out(out: Tensor, a: Any, b: Any) -> None:
    shape = (*a[0].shape[:-1], b[0].shape[0])
    if out.dim() != len(shape) or tuple(out.shape) != shape:
        raise ValueError(f"`out` must have the shape {shape}, got {tuple(out.shape)}")


def _check_operands(a: Any, b: Any) -> None:
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, tuple) or not 2 <= len(value) <= 4:
            raise TypeError(
                f"`{name}` must be Quantized(codes, scale_inv, amax, zero) or its tensors as a "
                f"tuple, got {_said(value)}"
            )
        # the op looks into those that are tensors
        if not isinstance(value[0], Tensor):
            check_tensor(f"{name}.codes", value[0])
        if not isinstance(value[1], Tensor):
            check_tensor(f"{name}.scale_inv", value[1])
    if a[0].dim() == 0:
        raise ValueError("`a.codes` must have at least 1 dimension, got 0")
    if b[0].dim() != 2:
        raise ValueError(f"`b.codes` must have 2 dimensions, got {b[0].dim()}")


def _check_pair(f: Format, g: Format) -> None:
    """Raise TypeError or ValueError for formats that no product takes."""
    for name, each in (("format", f), ("format_b", g)):
        if isinstance(each, INT4):
            raise TypeError(
                f"`{name}` must not be INT4, which is for weights only: "
                "weight_only_mm(x, w, INT4()) multiplies them with bfloat16 or float16"
            )
    if type(f) is not type(g):
        raise TypeError(
            f"`format_b` must be {type(f).__name__}(...) like `format`, got {type(g).__name__}; "
            "weight_only_mm multiplies a quantized weight with bfloat16 or float16"
        )
    if not (isinstance(f, FP8) and isinstance(g, FP8)):
        return
    if (f.granularity in _WHOLE) != (g.granularity in _WHOLE):
        wanted = '"tensor" or "row"' if f.granularity in _WHOLE else '"block" or "square"'
        raise ValueError(
            f"`format_b` must have the granularity {wanted} for a `format` of "
            f'"{f.granularity}", got "{g.granularity}"'
        )
    if f.granularity not in _WHOLE and f.block != g.block:
        raise ValueError(f"`format_b` must have blocks of {f.block} like `format`, got {g.block}")


def _amax(name: str, quantized: tuple[Any, ...]) -> Tensor:
    amax = quantized[2] if len(quantized) > 2 else None
    check_tensor(f"{name}.amax", amax)
    assert isinstance(amax, Tensor)
    return _rows(amax)


def _rows(x: Tensor) -> Tensor:
    """Return (*, C) as a matrix, a view where strides allow it; one element stays as it is."""
    if x.dim() == 2 or (x.dim() < 2 and x.numel() == 1):
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
