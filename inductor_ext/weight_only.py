"""Activations times quantized weights: the public function above the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._call import call
from .api import _check_format, _guard_mode, _said
from .formats import FP8, INT4, INT8, MXFP8, NVFP4, Format, Quantized
from .validation import check_tensor

_ops = torch.ops.inductor_ext


def weight_only_mm(
    x: Tensor, w: Quantized | tuple[Any, ...], format: Format, *, bias: Tensor | None = None
) -> Tensor:
    """Return ``x @ W.t() + bias`` for a quantized weight; see docs/weight_only.md.

    Args:
        x: (*, K) bfloat16, float16 or float32.
        w: what ``quantize(weight, format)`` returned for a weight (N, K), or its tensors as a
            tuple in that order.
        format: the format of ``w``.
        bias: (N,) in the dtype of ``x``, or None.

    Returns:
        (*, N) in the dtype of ``x``, summed in fp32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    _check_format(format)
    if not isinstance(w, tuple) or not 2 <= len(w) <= 4:
        raise TypeError(
            "`w` must be Quantized(codes, scale_inv, amax, zero) or its tensors as a tuple, got "
            + _said(w)
        )
    tensors = {"x": x, **dict(zip(Quantized._fields, w, strict=False))}
    for name, value in {**tensors, "bias": bias}.items():
        if value is not None or name in ("x", "codes", "scale_inv"):
            check_tensor(name, value)
    op, weight = _op_and_weight(w, format)
    result: Tensor = call(op, x, *weight, bias)
    return result


def _op_and_weight(w: tuple[Any, ...], f: Format) -> tuple[Any, tuple[Any, ...]]:
    codes, scale, amax, zero = (*w, None, None)[:4]
    if isinstance(f, FP8) and f.granularity in ("tensor", "row"):
        return _ops.weight_only_mm_fp8.default, (codes, scale)
    if isinstance(f, INT8):
        group = f.group if f.granularity == "group" else 0
        return _ops.weight_only_mm_int8.default, (codes, scale, group)
    if isinstance(f, INT4):
        return _ops.weight_only_mm_int4.default, (codes, scale, zero, f.group)
    if isinstance(f, NVFP4):
        block = (16 if f.square else 1, 16)
        return _ops.weight_only_mm_nvfp4.default, (codes, scale, amax, *block, f.layout)
    if isinstance(f, MXFP8):
        block = (32 if f.square else 1, 32)
        return _ops.weight_only_mm_mxfp8.default, (codes, scale, *block, f.layout)
    assert isinstance(f, FP8)
    block = (f.block if f.granularity == "square" else 1, f.block)
    return _ops.weight_only_mm_fp8_block.default, (codes, scale, *block, f.layout)
