"""The public functions above the ops: checked arguments, format objects, plain tensors back."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _state
from .formats import FP8, Quantized
from .ops.fp8 import (
    dequantize_fp8,
    quantize_fp8_row,
    quantize_fp8_static,
    quantize_fp8_tensor,
)
from .ops.scaled_mm import scaled_mm as _scaled_mm
from .validation import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dtype,
    check_no_grad,
    check_scale,
    check_tensor,
)


def _guard_mode() -> None:
    """Let Dynamo guard the compiler's mode, so that a flip of the flag is noticed."""
    if not _state.mode:
        raise AssertionError("inductor_ext._state.mode is never empty")


def quantize(x: Tensor, format: FP8, scale: Tensor | None = None) -> Quantized:
    """Quantize a tensor.

    Args:
        x: (*, K) bfloat16, float16 or float32, any strides.
        format: the target, for instance ``FP8(granularity="row")``.
        scale: float32 quantization multiplier(s): one element for granularity "tensor", (*, 1)
            for "row".  Without it the scale comes from the amax of ``x`` ("current scaling").

    Returns:
        ``Quantized(codes, scale_inv, amax)``; ``amax`` only where ``scale`` was given.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    check_tensor("x", x)
    if not isinstance(format, FP8):
        raise TypeError(f"`format` must be FP8(...), got {type(format).__name__}")
    check_dtype("x", x.dtype, INPUT_DTYPES)
    check_no_grad("x", x, "quantize")
    rowwise = format.granularity == "row"
    if rowwise and x.dim() == 0:
        raise ValueError("`x` must have at least one dimension to be quantized by rows, got 0-d")
    if scale is None:
        op = quantize_fp8_row if rowwise else quantize_fp8_tensor
        codes, scale_inv = op(x, format.dtype, format.eps, format.pow2)
        return Quantized(codes, scale_inv)
    check_tensor("scale", scale)
    if check_scale("scale", scale, "x", x) != rowwise and not (scale.numel() == 1 and not rowwise):
        raise ValueError(
            f'`scale` must have the shape {(*x.shape[:-1], 1)} for granularity "row", '
            f"got {tuple(scale.shape)}"
        )
    return Quantized(*quantize_fp8_static(x, scale, format.dtype))


def dequantize(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return ``cast(float(codes) * scale_inv)``.

    Args:
        codes: (*, K) float8_e4m3fn or float8_e5m2.
        scale_inv: float32, one element or (*, 1).
        dtype: of the result: bfloat16, float16 or float32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    check_tensor("codes", codes)
    check_tensor("scale_inv", scale_inv)
    check_dtype("codes", codes.dtype, FP8_DTYPES)
    check_dtype("dtype", dtype, INPUT_DTYPES)
    check_no_grad("scale_inv", scale_inv, "dequantize")
    check_scale("scale_inv", scale_inv, "codes", codes)
    return dequantize_fp8(codes, scale_inv, dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``cast((a @ b) * scale_a * scale_b + bias)``; see docs/ops.md for its exactness.

    Args:
        a: (M, K) FP8 codes. b: (K, N) FP8 codes; column-major is fast.
        scale_a: float32, one element or (M, 1). scale_b: one element or (1, N).
        bias: (N,) of ``dtype``, or None.
        fast_accum: let the GPU accumulate in fewer bits.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    for name, tensor in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b)):
        check_tensor(name, tensor)
        check_no_grad(name, tensor, "scaled_mm")
    return _scaled_mm(a, b, scale_a, scale_b, bias, dtype, fast_accum)
