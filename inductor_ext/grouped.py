"""``scaled_grouped_mm``: the products of a mixture of experts, above the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ._call import call
from .api import _guard_mode
from .formats import FP8, Quantized
from .validation import check_tensor

__all__ = ["scaled_grouped_mm"]

WIDTH = 128


def scaled_grouped_mm(
    a: Quantized | tuple[Tensor, ...],
    b: Quantized | tuple[Tensor, ...],
    offsets: Tensor,
    format: FP8,
    format_b: FP8 | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    """Multiply each expert's tokens: ``a[t] @ b[expert of t]^T``, or their share of ``a @ b^T``.

    The tokens are sorted by expert.  One compilation serves all offsets, and no host waits for
    them.  Offsets beyond the tokens are taken as their number, ones below the offset before as
    that one.

    Args:
        a, b: what ``quantize`` returned (or codes and scale_inv as a tuple): tokens (T, K) and
            weights (E, N, K), as ``quantize(weight, format_b)`` gives them; or, for the gradient of
            the weights, (M, T) and (N, T), as ``orientation="column"`` gives them.
        offsets: (E,) int32: where each expert's tokens end.
        format: FP8 of ``a``: granularity "tensor" or "row", or "block" with blocks of 128.
            A scale for each expert of its own is (E, N, 1), or (E, M, 1) for the gradient.
        format_b: FP8 of ``b``, by default ``format``; "block" or "square" with "block".
        dtype: of the result.
        fast_accum: let the GPU accumulate in fewer bits; not for blocks.

    Returns:
        (T, N), 0 for tokens beyond the last offset; or (E, M, N), 0 for experts without tokens.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    format_b = format if format_b is None else format_b
    blocks = _check_formats(format, format_b)
    (codes_a, scale_a), (codes_b, scale_b) = _tensors("a", a), _tensors("b", b)
    check_tensor("offsets", offsets)
    if not blocks:
        op = torch.ops.inductor_ext.scaled_grouped_mm.default
        given = codes_a, codes_b, scale_a, scale_b, offsets, dtype, fast_accum
        result: Tensor = call(op, *given)
        return result
    if fast_accum:
        raise ValueError("`fast_accum` must be False for scales of blocks, got True")
    scale_b = _of_experts(codes_b, scale_b, format_b)
    op = torch.ops.inductor_ext.scaled_grouped_mm_fp8_block.default
    result = call(op, codes_a, codes_b, scale_a, scale_b, offsets, dtype)
    return result


def _check_formats(format: FP8, format_b: FP8) -> bool:
    """Return whether scales belong to blocks."""
    for name, value in (("format", format), ("format_b", format_b)):
        if not isinstance(value, FP8):
            raise TypeError(f"`{name}` must be FP8(...), got {type(value).__name__}")
    blocks = format.granularity == "block"
    if format.granularity == "square":
        raise ValueError('`format` must have granularity "tensor", "row" or "block", got "square"')
    if blocks != (format_b.granularity in ("block", "square")):
        raise ValueError(
            f"`format_b` must be of {'blocks' if blocks else 'rows or a tensor'} as `format` is, "
            f'got granularity "{format_b.granularity}"'
        )
    for name, value in (("format", format), ("format_b", format_b)):
        if blocks and value.block != WIDTH:
            raise ValueError(f"`{name}` must have blocks of {WIDTH}, got {value.block}")
    return blocks


def _tensors(name: str, quantized: Quantized | tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if not isinstance(quantized, tuple) or not 2 <= len(quantized) <= 4:
        raise TypeError(
            f"`{name}` must be Quantized(codes, scale_inv) or these as a tuple, got "
            f"{type(quantized).__name__}"
        )
    codes, scale = quantized[:2]
    check_tensor(f"{name}.codes", codes)
    check_tensor(f"{name}.scale_inv", scale)
    return codes, scale


def _of_experts(codes: Tensor, scale: Tensor, f: FP8) -> Tensor:
    """Bring the scales of weights, quantized as one matrix (E * N, K), to (E, scales of N, ...)."""
    if f.layout == "gemm" and f.granularity == "square":
        scale = scale[..., : -(-codes.shape[-1] // WIDTH)]
    if codes.dim() != 3 or scale.dim() != 2:
        return scale
    experts, n, _ = codes.shape
    if f.granularity == "square" and n % WIDTH:
        raise ValueError(
            f"`b` must have a multiple of {WIDTH} rows an expert for blocks that span the experts, "
            f"got {n}: quantize each expert's matrix by itself and stack the results"
        )
    down = n // WIDTH if f.granularity == "square" else n
    return scale.reshape(experts, down, scale.shape[1])
