"""PyTorch's attention kernels behind one contract: bottom-right masks, windows, one log-sum-exp.

They are called as ATen ops, so that a choice is an argument and no global state; each gives and
takes ``lse`` as float32 (B, H, S), natural logarithm, -inf for a query that sees nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions.attention import attention as math
from inductor_ext.decompositions.attention import attention_backward as math_backward

from ._routes_attention import Call

_aten = torch.ops.aten
_INFINITY = float("inf")
Args = tuple[Tensor | None, Tensor | None, float, int, int, int]
"""What follows the tensors in the ops' schemas: offsets, offsets_k, scale, left, right,
max_length."""


def forward(
    name: str, call: Call, q: Tensor, k: Tensor, v: Tensor, rest: Args
) -> tuple[Tensor, Tensor]:
    """Call a back end; returns out (B, H, S, D), as the back end lays it out, and lse."""
    if name == "math":
        exact: tuple[Tensor, Tensor] = math(q, k, v, *rest, compute=torch.float32)
        return exact
    scale, causal = rest[2], rest[4] == 0
    q, k, v = _ready(q), _ready(k), _ready(v)
    if call.capability is None:
        k, v = _repeat(q, k, v)
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    if name == "cudnn":
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.reshape(q.shape[:3])
    if name == "efficient":
        k, v = _repeat(q, k, v)
        out, lse, *_ = _aten._efficient_attention_forward(
            *(t.transpose(1, 2) for t in (q, k, v)), None, None, None, None, None, 0.0,
            2 if causal else 0, True, scale=scale,
        )  # fmt: skip
        return out.transpose(1, 2), lse[:, :, : q.shape[2]].contiguous()
    lengths, options = _flash(call, q, k, rest)
    out, lse, *_ = _aten._flash_attention_forward(
        *(_tokens_first(t, call) for t in (q, k, v)), *lengths, 0.0, causal, False, **options
    )
    if call.blind:  # flash says +inf of a query that sees nothing
        lse = lse.masked_fill(lse == _INFINITY, -_INFINITY)
    return _heads_first(out, call), lse.reshape(q.shape[:3])


def backward(
    name: str,
    call: Call,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Args,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, as the back end lays them out."""
    if name == "math":
        return tuple(math_backward(grad, q, k, v, out, lse, *rest, compute=torch.float32))
    scale, causal = rest[2], rest[4] == 0
    heads = k.shape[1]
    grad, q, k, v, out = (_ready(t) for t in (grad, q, k, v, out))
    if call.capability is None:
        k, v = _repeat(q, k, v)
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return _sum_groups(gradients, heads)
    if name == "cudnn":
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, of which is none
        shaped = lse.reshape(lse.shape + (1,) * (_cudnn_lse_dimensions(q.device) - 3))
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, shaped, seed, seed, None, None, None, q.shape[2], k.shape[2],
            0.0, causal, scale=scale,
        )  # fmt: skip
        return tuple(gradients)
    if name == "efficient":
        k, v = _repeat(q, k, v)
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=_INFINITY)
        dq, dk, dv, _ = _aten._efficient_attention_backward(
            *(t.transpose(1, 2) for t in (grad, q, k, v)), None, out.transpose(1, 2), None, None,
            q.shape[2], k.shape[2], padded, 0.0, seed, seed, 2 if causal else 0, False, scale=scale,
        )  # fmt: skip
        return _sum_groups([t.transpose(1, 2) for t in (dq, dk, dv)], heads)
    if call.blind:
        lse = lse.masked_fill(lse == -_INFINITY, _INFINITY)
    lengths, options = _flash(call, q, k, rest)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients = _aten._flash_attention_backward(
        *(_tokens_first(t, call) for t in (grad, q, k, v, out)), lse[0] if call.packed else lse,
        *lengths, 0.0, causal, seed, seed, **options,
    )  # fmt: skip
    return tuple(_heads_first(t, call) for t in gradients)


def _flash(call: Call, q: Tensor, k: Tensor, rest: Args) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return flash's offsets and longest sequences, and its options."""
    offsets, offsets_k, scale, left, right, max_length = rest
    longest = (max_length, max_length) if max_length > 0 else (q.shape[2], k.shape[2])
    lengths = (offsets, offsets if offsets_k is None else offsets_k, *longest)
    return lengths, {"scale": scale, "window_size_left": left, "window_size_right": right}


def _tokens_first(x: Tensor, call: Call) -> Tensor:
    """Return (B, S, H, D), or (S, H, D) of packed sequences."""
    return x[0].transpose(0, 1) if call.packed else x.transpose(1, 2)


def _heads_first(x: Tensor, call: Call) -> Tensor:
    return x.transpose(0, 1)[None] if call.packed else x.transpose(1, 2)


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of keys and values, for a back end without groups of queries."""
    if q.shape[1] == k.shape[1]:
        return k, v
    times = q.shape[1] // k.shape[1]
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _sum_groups(gradients: Any, heads: int) -> tuple[Tensor, ...]:
    """Undo :func:`_repeat` in the gradients: heads that read the same keys are summed, in fp32."""
    dq, *others = gradients
    if others[0].shape[1] == heads:
        return (dq, *others)
    return dq, *(t.unflatten(1, (heads, -1)).sum(2, dtype=torch.float32) for t in others)


def _ready(x: Tensor) -> Tensor:
    """Return the tensor with rows that begin at multiples of 16 bytes, copied if they do not."""
    step = 16 // x.element_size()
    aligned = x.stride(3) == 1 and all(s % step == 0 for s in x.stride()[:3])
    return (
        x if aligned and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )


@functools.cache
def _cudnn_lse_dimensions(device: torch.device) -> int:
    """Return the dimensions of cuDNN's lse: (B, H, S) in some PyTorch, (B, H, S, 1) in others."""
    x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
    made = _aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)
    return int(made[1].dim())
