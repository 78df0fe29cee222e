"""The public functions above the ops: format objects in, plain tensors out."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _by_format, _state
from .formats import FP8, NVFP4, BothWays, Format, Quantized
from .validation import check_tensor, is_row_scale


def _guard_mode() -> None:
    """Let Dynamo guard the compiler's mode, so that a flip of the flag is noticed."""
    if not _state.mode:
        raise AssertionError("inductor_ext._state.mode is never empty")


@overload
def quantize(
    x: Tensor,
    format: Format,
    scale: Tensor | None = None,
    *,
    amax: Tensor | None = None,
    rng: Tensor | None = None,
    orientation: Literal["row", "column"] = "row",
    transposed: bool = True,
) -> Quantized: ...
@overload
def quantize(
    x: Tensor,
    format: Format,
    scale: Tensor | None = None,
    *,
    amax: Tensor | None = None,
    rng: Tensor | None = None,
    orientation: Literal["both"],
    transposed: bool = True,
) -> BothWays: ...
def quantize(
    x: Tensor,
    format: Format,
    scale: Tensor | None = None,
    *,
    amax: Tensor | None = None,
    rng: Tensor | None = None,
    orientation: Literal["row", "column", "both"] = "row",
    transposed: bool = True,
) -> Quantized | BothWays:
    """Quantize a tensor.

    Args:
        x: (*, K) bfloat16, float16 or float32, any strides; M is the product of the others.
        format: the target, for instance ``MXFP8()``; see :mod:`inductor_ext.formats`.
        scale: float32 quantization multiplier(s), for FP8: one element for granularity "tensor",
            (*, 1) for "row".  Without it the scale comes from the amax of ``x``.
        amax: float32 global amax, for NVFP4: one element, or one a row of the result.  Without
            it the amax of ``x`` is taken first.
        rng: int64 (2,), the seed and offset of stochastic rounding, for NVFP4.
        orientation: "row" shares scales along K; "column" along M and gives the transposed
            matrix (K, M); "both" gives both, from one read of ``x`` in eager mode.
        transposed: False leaves the codes of the column orientation as (M, K) (FP8 rows and
            blocks, and MXFP8).

    Returns:
        ``Quantized``, or ``BothWays(row, column)`` for orientation "both".

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    check_tensor("x", x)
    _check_format(format)
    if scale is not None:
        _check_scale(x, format, scale, orientation)
    _only_nvfp4(format, amax=amax, rng=rng)
    given = (x, format, scale, amax, rng)
    if orientation == "row":
        return _by_format.row(*given)
    if orientation not in ("column", "both"):
        raise ValueError(f'`orientation` must be "row", "column" or "both", got {orientation!r}')
    if x.dim() == 0:
        raise ValueError(f'`x` must have dimensions for orientation "{orientation}", got 0-d')
    function = _by_format.column if orientation == "column" else _by_format.both
    return function(*given, transposed)


def dequantize(
    quantized: Quantized | tuple[Tensor, ...],
    format: Format,
    dtype: torch.dtype = torch.bfloat16,
    *,
    transposed: bool = True,
) -> Tensor:
    """Return the values of a quantized tensor.

    Args:
        quantized: what :func:`quantize` returned, or its tensors as a tuple in that order.  The
            column orientation is a matrix of its own, (K, M), and so is its result.
        format: the format that it was quantized to.
        dtype: of the result: bfloat16, float16 or float32.
        transposed: False for codes that the column orientation left as (M, K).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    _check_format(format)
    if not isinstance(quantized, tuple) or not 2 <= len(quantized) <= 4:
        raise TypeError(
            "`quantized` must be Quantized(codes, scale_inv, amax, zero) or its tensors as a "
            f"tuple, got {_said(quantized)}"
        )
    for name, value in zip(Quantized._fields, quantized, strict=False):
        if value is not None or name in ("codes", "scale_inv"):
            check_tensor(name, value)
    return _by_format.dequantize(quantized, format, dtype, not transposed)


def _said(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, tuple) else kind


def _check_format(format: Format, name: str = "format") -> None:
    if not isinstance(format, Format) or type(format) is Format:
        raise TypeError(
            f"`{name}` must be FP8(...), MXFP8(...), NVFP4(...), INT8(...) or INT4(...), got "
            f"{type(format).__name__}"
        )


def _only_nvfp4(format: Format, **given: Tensor | None) -> None:
    for name, value in given.items():
        if value is None:
            continue
        if not isinstance(format, NVFP4):
            raise ValueError(f"`{name}` must be None for {type(format).__name__}, got a tensor")
        check_tensor(name, value)


def _check_scale(x: Tensor, format: Format, scale: Tensor, orientation: str) -> None:
    """Check a given scale against the format; its dtype and device are checked by the op."""
    check_tensor("scale", scale)
    if not isinstance(format, FP8) or format.granularity in ("block", "square"):
        raise ValueError(
            '`scale` must be None unless the format is FP8 with granularity "tensor" or "row", '
            f"got a tensor for {format}"
        )
    if format.granularity == "tensor":
        if scale.numel() != 1:
            raise ValueError(
                f'`scale` must have one element for granularity "tensor", got {tuple(scale.shape)}'
            )
    elif orientation != "row":
        raise ValueError(
            f'`scale` must be None for granularity "row" and orientation "{orientation}", '
            "got a tensor"
        )
    elif not is_row_scale(scale, x):
        raise ValueError(
            f'`scale` must have the shape {(*x.shape[:-1], 1)} for granularity "row", '
            f"got {tuple(scale.shape)}"
        )
