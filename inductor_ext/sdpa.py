"""Scaled dot-product attention: the public function above the ops."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from inductor_ext.decompositions.attention import BLOCK

from ._call import call, call_with_gradient
from .api import _guard_mode, quantize
from .formats import FP8, Format, Quantized
from .ops.attention_fp8 import dequantize_heads
from .validation import check_tensor

__all__ = ["attention"]

_ops = torch.ops.inductor_ext
Operand: TypeAlias = Tensor | Quantized


@overload
def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
    offsets_k: Tensor | None = None,
    max_length: int | None = None,
    format: Format | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_scale: None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
    offsets_k: Tensor | None = None,
    max_length: int | None = None,
    format: Format | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_scale: None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
    offsets_k: Tensor | None = None,
    max_length: int | None = None,
    format: Format,
    dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor,
    return_lse: Literal[False] = False,
) -> Quantized: ...
@overload
def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
    offsets_k: Tensor | None = None,
    max_length: int | None = None,
    format: Format,
    dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor,
    return_lse: Literal[True],
) -> tuple[Quantized, Tensor]: ...
def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    offsets: Tensor | None = None,
    offsets_k: Tensor | None = None,
    max_length: int | None = None,
    format: Format | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Return ``softmax(q @ k^T * scale) @ v``; see docs/attention.md.

    Args:
        q: (B, Hq, Sq, D) bfloat16, float16 or float32. k, v: (B, Hkv, Sk, D), Hq a multiple of
            Hkv.  With ``format`` they may be quantized already: three ``Quantized`` of e4m3 codes
            of these shapes, and scales of one element, (B, H), or (B, H, ceil(S / 128)).
        scale: positive; D^-0.5 if None.
        causal: a query sees the keys up to its own; the last query sees the last key, as in
            FlashAttention (bottom-right), also where Sq and Sk differ.
        window: (left, right): a query sees ``left`` keys before its own and ``right`` after; -1 is
            no bound.
        offsets: int32 (n + 1,), from 0 to S: n sequences lie one after the other in S, and tokens
            see those of their own sequence.  B is 1.  Read on the device alone.
        offsets_k: the same for the keys; None where they are the queries'.
        max_length: the tokens of the longest sequence at most, where that is known: fewer
            programs are started.  Tokens behind it are not computed.
        format: FP8 of e4m3 to quantize q, k and v to: granularity "tensor", "row" (a scale a
            head, the row of a (B * H, S * D) matrix) or "square" (a scale for each 128 tokens of a
            head).  None computes in the dtype of ``q``.
        dtype: of the result for ``Quantized`` operands; otherwise it is that of ``q``.
        out_scale: with ``format``: one float32, as for ``quantize``: the result is quantized with
            it for the next product, in the kernel where that can.  No gradient then.
        return_lse: also return the log-sum-exp of the scaled scores, float32 (B, Hq, Sq).

    Returns:
        (B, Hq, Sq, D), in memory (B, Sq, Hq, D): merging the heads is a view.  With ``out_scale``
        a ``Quantized`` of e4m3 codes of that shape and layout.  A query that sees no key has zeros,
        and the log-sum-exp -inf.  Differentiable (the log-sum-exp is not); with ``format``, the
        gradients are those of the quantized values, passed straight through.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    operands = {"q": q, "k": k, "v": v}
    quantized = isinstance(q, Quantized)
    for name, value in operands.items():
        if isinstance(value, Quantized) != quantized:
            raise TypeError(
                f"`{name}` must be {'Quantized' if quantized else 'a Tensor'} as `q` is, got "
                f"{type(value).__name__}"
            )
        if not quantized:
            check_tensor(name, value)
    codes: Any = q[0] if quantized else q
    rest = (offsets, offsets_k, *_numbers(codes, scale, causal, window, max_length))
    if out_scale is not None:
        check_tensor("out_scale", out_scale)
        if format is None:
            raise ValueError("`out_scale` must be None without `format`, got a tensor")
    if format is not None:
        made = _fp8(operands, _checked(format), rest, dtype, out_scale)
    elif quantized:
        raise ValueError("`format` must be FP8(...) for quantized operands, got None")
    else:
        made = call_with_gradient(_ops.attention.default, q, k, v, *rest)
    out: Any = made[0]
    if out_scale is not None:
        out = Quantized(out, out_scale.reshape(()).reciprocal())
    return (out, made[1]) if return_lse else out


def _numbers(
    q: Tensor, scale: Any, causal: Any, window: Any, max_length: Any
) -> tuple[float, int, int, int]:
    """Return scale, left, right and max_length as the ops take them."""
    if not isinstance(causal, bool):
        raise TypeError(f"`causal` must be a bool, got {causal!r}")
    left, right = -1, -1
    if window is not None:
        if not (isinstance(window, (tuple, list)) and len(window) == 2):
            raise TypeError(f"`window` must be (left, right) or None, got {window!r}")
        left, right = window
    if causal:
        right = 0
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    return float(scale), left, right, -1 if max_length is None else max_length


def _checked(format: Format) -> FP8:
    if not isinstance(format, FP8) or format.dtype != torch.float8_e4m3fn:
        raise TypeError(f"`format` must be FP8(dtype=torch.float8_e4m3fn) or None, got {format!r}")
    if format.granularity == "block" or (format.granularity == "square" and format.block != BLOCK):
        raise ValueError(
            f'`format` must have granularity "tensor", "row" or "square" with block {BLOCK}, got '
            f"{format!r}"
        )
    return format


def _fp8(
    operands: dict[str, Any],
    format: FP8,
    rest: tuple[Any, ...],
    dtype: torch.dtype,
    out_scale: Tensor | None,
) -> Any:
    q, k, v = operands.values()
    if isinstance(q, Quantized):
        codes, scales = zip(*(x[:2] for x in (q, k, v)), strict=True)
        return call(_ops.attention_fp8.default, *codes, *scales, *rest, *_result(dtype, out_scale))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if out_scale is not None:
            raise ValueError("`out_scale` must be None where gradients are asked for, got a tensor")
        return _Quantized.apply(q, k, v, format, *rest)
    return _quantize_and_attend(q, k, v, format, rest, out_scale)[0]


def _result(dtype: torch.dtype, out_scale: Tensor | None) -> tuple[torch.dtype, Tensor | None]:
    return (dtype if out_scale is None else torch.float8_e4m3fn), out_scale


def _quantize_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    format: FP8,
    rest: tuple[Any, ...],
    out_scale: Tensor | None = None,
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return what the op returns, and the codes and scales that it was given."""
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (_quantize(x, format) for x in (q, k, v))
    saved = q8, k8, v8, q_scale, k_scale, v_scale
    result = _result(q.dtype, out_scale)
    return call_with_gradient(_ops.attention_fp8.default, *saved, *rest, *result), saved


def _quantize(x: Tensor, format: FP8) -> tuple[Tensor, Tensor]:
    """Return codes like ``x`` and scales as the op takes them."""
    if x.dim() != 4:
        raise ValueError(f"`q`, `k` and `v` must have 4 dimensions, (B, H, S, D), got {x.dim()}")
    if format.granularity == "tensor" or x.numel() == 0:
        whole = FP8(granularity="tensor", eps=format.eps, pow2=format.pow2)
        by_token = x.transpose(1, 2)
        if by_token.is_contiguous():  # as projections leave it: read as it lies, and left so
            codes, scale = quantize(by_token, whole)[:2]
            return codes.transpose(1, 2), scale.reshape(1)
        codes, scale = quantize(x, whole)[:2]
        return codes, scale.reshape(1)
    if format.granularity == "row":
        heads_of = _ops.quantize_fp8_heads.default
        made: tuple[Tensor, Tensor] = call(heads_of, x, format.dtype, format.eps, format.pow2)
        return made
    by_row = FP8(granularity="row", eps=format.eps, pow2=format.pow2)
    batch, heads, tokens, dim = x.shape
    blocks = -(-tokens // BLOCK)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * BLOCK - tokens))
    codes, scale = quantize(padded.reshape(batch * heads * blocks, BLOCK * dim), by_row)[:2]
    codes = codes.view(batch, heads, blocks * BLOCK, dim)[:, :, :tokens]
    return codes, scale.view(batch, heads, blocks)


class _Quantized(torch.autograd.Function):
    """Attention of what q, k and v are quantized to; the backward reads the codes, in 16 bits."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, format: FP8, *rest: Any) -> Any:
        (out, lse), saved = _quantize_and_attend(q, k, v, format, rest)
        ctx.mark_non_differentiable(lse)
        offsets, offsets_k, *ctx.numbers = rest
        ctx.save_for_backward(out, lse, offsets, offsets_k, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        out, lse, offsets, offsets_k, *saved = ctx.saved_tensors
        values = [
            dequantize_heads(c, s, out.dtype) for c, s in zip(saved[:3], saved[3:], strict=True)
        ]
        gradients = _ops.attention_backward.default(
            grad, *values, out, lse, offsets, offsets_k, *ctx.numbers
        )
        return (*gradients, *(None,) * (3 + len(ctx.numbers)))
