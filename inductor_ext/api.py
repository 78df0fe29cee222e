"""The public functions above the ops: checked arguments, format objects, plain tensors back.

In eager mode the arguments are checked here, before a kernel runs.  While compiling, the fakes run
the same checks: an exception raised in traced code would lose its message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _state
from .formats import FP8, Quantized
from .ops import fp8
from .ops.scaled_mm import check_scaled_mm
from .ops.scaled_mm import scaled_mm as _scaled_mm
from .validation import check_no_grad, check_tensor, is_row_scale


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
    if not isinstance(format, FP8):
        raise TypeError(f"`format` must be FP8(...), got {type(format).__name__}")
    rowwise = format.granularity == "row"
    if scale is None:
        if not torch.compiler.is_compiling():
            fp8.check_current(x, format.dtype, format.eps, rowwise=rowwise)
            check_no_grad("x", x, "quantize")
        op = fp8.quantize_fp8_row if rowwise else fp8.quantize_fp8_tensor
        codes, scale_inv = op(x, format.dtype, format.eps, format.pow2)
        return Quantized(codes, scale_inv)
    check_tensor("x", x)
    check_tensor("scale", scale)
    if not rowwise and scale.numel() != 1:
        raise ValueError(
            f'`scale` must have one element for granularity "tensor", got {tuple(scale.shape)}'
        )
    if rowwise and not is_row_scale(scale, x):
        raise ValueError(
            f'`scale` must have the shape {(*x.shape[:-1], 1)} for granularity "row", '
            f"got {tuple(scale.shape)}"
        )
    if not torch.compiler.is_compiling():
        fp8.check_static(x, scale, format.dtype)
        check_no_grad("x", x, "quantize")
        check_no_grad("scale", scale, "quantize")
    return Quantized(*fp8.quantize_fp8_static(x, scale, format.dtype))


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
    if not torch.compiler.is_compiling():
        fp8.check_dequantize(codes, scale_inv, dtype)
        check_no_grad("codes", codes, "dequantize")
        check_no_grad("scale_inv", scale_inv, "dequantize")
    return fp8.dequantize_fp8(codes, scale_inv, dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``cast((a @ b) * scale_a * scale_b + bias)``; see docs/formats.md, "Scaled GEMM".

    Args:
        a: (M, K) FP8 codes. b: (K, N) FP8 codes; column-major is fast.
        scale_a: float32, one element or (M, 1). scale_b: one element or (1, N).
        bias: (N,) of ``dtype``, or None.
        fast_accum: let the GPU accumulate in fewer bits.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    if not torch.compiler.is_compiling():
        check_scaled_mm(a, b, scale_a, scale_b, bias, dtype)
        tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}
        for name, tensor in tensors.items():
            check_no_grad(name, tensor, "scaled_mm")
    return _scaled_mm(a, b, scale_a, scale_b, bias, dtype, fast_accum)
