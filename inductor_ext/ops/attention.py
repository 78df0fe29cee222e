"""Attention in bfloat16, float16 and float32: schema, fakes, gradient and contract; opaque.

Definition: ``decompositions/attention.py``; back ends: ``_sdpa.py``; which of them runs:
``_routes_attention.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import attention as reference

from ..registry import Autograd, register
from ..validation import INPUT_DTYPES, check_dtype, check_like, check_same_device, check_tensor
from . import _sdpa
from ._library import LIBRARY, define
from ._routes_attention import Call, choose_attention

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    offsets_k: Tensor | None,
    scale: float,
    left: int,
    right: int,
    max_length: int,
    *,
    dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES,
) -> None:
    """Raise TypeError or ValueError for arguments that attention does not take."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        check_dtype(name, tensor.dtype, dtypes if name == "q" else (q.dtype,))
        check_same_device(name, tensor, "q", q)
        if tensor.dim() != 4:
            raise ValueError(f"`{name}` must have 4 dimensions, (B, H, S, D), got {tensor.dim()}")
    heads = k.shape[1]
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        wanted = (q.shape[0], "H", "S", q.shape[3])
        raise ValueError(f"`k` must have the shape ({', '.join(map(str, wanted))}), got "
                         f"{tuple(k.shape)}")  # fmt: skip
    if v.shape != k.shape:
        raise ValueError(f"`v` must have the shape of `k`, {tuple(k.shape)}, got {tuple(v.shape)}")
    if heads == 0 or q.shape[1] % heads:
        raise ValueError(
            f"`q` must have a multiple of the {heads} heads of `k`, got {q.shape[1]}: each head of "
            "`k` serves as many of `q`"
        )
    if q.shape[3] == 0:
        raise ValueError("`q` must have at least one element a head, got 0")
    _check_offsets(q, k, offsets, offsets_k)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"`scale` must be a positive number, got {scale!r}")
    for name, value in (("left", left), ("right", right), ("max_length", max_length)):
        if value < -1:
            raise ValueError(f"`{name}` must be at least 0, or -1 for no bound, got {value}")


def _check_offsets(q: Tensor, k: Tensor, offsets: Tensor | None, offsets_k: Tensor | None) -> None:
    if offsets is None:
        if offsets_k is not None:
            raise ValueError("`offsets_k` must be None without `offsets`, got a tensor")
        return
    for name, value in (("offsets", offsets), ("offsets_k", offsets_k)):
        if value is None:
            continue
        check_tensor(name, value)
        check_dtype(name, value.dtype, (torch.int32,))
        check_same_device(name, value, "q", q)
        if value.dim() != 1 or value.shape[0] < 2:
            raise ValueError(
                f"`{name}` must have the shape (n + 1,) for n >= 1 sequences, got "
                f"{tuple(value.shape)}"
            )
    if q.shape[0] != 1:
        raise ValueError(f"`q` must have a batch of 1 with `offsets`, got {q.shape[0]}")
    if offsets_k is None and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"`k` must have the {q.shape[2]} tokens of `q` without `offsets_k`, got {k.shape[2]}"
        )
    if offsets_k is not None and offsets_k.shape != offsets.shape:
        raise ValueError(
            f"`offsets_k` must have the shape of `offsets`, {tuple(offsets.shape)}, got "
            f"{tuple(offsets_k.shape)}"
        )


def call_of(q: Tensor, k: Tensor, rest: _sdpa.Args) -> Call:
    """Return what the choice of a back end depends on; see ``_routes_attention``."""
    offsets, offsets_k, _, left, right, _ = rest
    nvidia = q.is_cuda and torch.version.hip is None
    shorter = k.shape[2] < q.shape[2] and right >= 0
    return Call(
        capability=torch.cuda.get_device_capability(q.device) if nvidia else None,
        dtype=q.dtype, dim=q.shape[3], queries=q.shape[2], keys=k.shape[2], left=left, right=right,
        packed=offsets is not None, blind=shorter or offsets_k is not None,
        empty=0 in q.shape or k.shape[2] == 0,
    )  # fmt: skip


def empty_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor (B, H, S, D) that lies in memory as (B, S, H, D)."""
    batch, heads, tokens, dim = like.shape
    return like.new_empty((batch, tokens, heads, dim), dtype=dtype).transpose(1, 2)


def empty_result(q: Tensor, dtype: torch.dtype) -> Pair:
    """Return an empty result and log-sum-exp."""
    return empty_rows(q, dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def as_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as :func:`empty_rows` lays it out, copied where it is not."""
    _, heads, tokens, dim = (max(size, 1) for size in x.shape)
    wanted = (heads * tokens * dim, dim, heads * dim, 1)
    return x if x.stride() == wanted and x.dtype == dtype else empty_rows(x, dtype).copy_(x)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Pair:
    check_attention(q, k, v, *_all(rest))
    return empty_result(q, q.dtype)


def _check_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> None:
    check_attention(q, k, v, *_all(rest))
    check_like("grad", grad, "q", q)
    check_like("out", out, "q", q)
    check_tensor("lse", lse)
    check_dtype("lse", lse.dtype, (torch.float32,))
    check_same_device("lse", lse, "q", q)
    if lse.shape != q.shape[:3]:
        raise ValueError(f"`lse` must have the shape {tuple(q.shape[:3])}, got {tuple(lse.shape)}")


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Triple:
    _check_backward(grad, q, k, v, out, lse, *rest)
    return empty_rows(q, q.dtype), empty_rows(k, q.dtype), empty_rows(v, q.dtype)


def _all(rest: tuple[Any, ...]) -> Any:
    """Return offsets, offsets_k, scale, left, right and max_length, defaults filled in."""
    return (*rest, *(-1,) * (6 - len(rest)))


def attention_by(q: Tensor, k: Tensor, v: Tensor, rest: _sdpa.Args) -> Pair:
    """Run the back end that the routes choose; the result has the fake's layout."""
    call = call_of(q, k, rest)
    out, lse = _sdpa.forward(choose_attention(call)[0], call, q, k, v, rest)
    return as_rows(out, q.dtype), lse.contiguous()


def _run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Pair:
    return attention_by(q, k, v, _all(rest))


def _run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Triple:
    given = _all(rest)
    call = call_of(q, k, given)
    name, _ = choose_attention(call)
    made = _sdpa.backward(name, call, grad, q, k, v, out, lse, given)
    dq, dk, dv = (as_rows(gradient, q.dtype) for gradient in made)
    return dq, dk, dv


@torch.no_grad()  # as a compiled kernel
def _cuda(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Pair:
    check_attention(q, k, v, *_all(rest))
    return _run(q, k, v, *rest)


@torch.no_grad()
def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Triple:
    _check_backward(grad, q, k, v, out, lse, *rest)
    return _run_backward(grad, q, k, v, out, lse, *rest)


_REST = (
    "Tensor? offsets, Tensor? offsets_k, float scale, int left=-1, int right=-1, int max_length=-1"
)
attention = define(
    f"attention(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor, Tensor)",
    fake=_fake,
    reference=_run,
    compiled=False,
)
attention_backward = define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_REST}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    reference=_run_backward,
    compiled=False,
)
LIBRARY.impl("attention", _cuda, "CUDA")
LIBRARY.impl("attention_backward", _cuda_backward, "CUDA")


def _context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, offsets, offsets_k, *ctx.numbers = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, offsets, offsets_k)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    gradients = attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, *(None,) * (2 + len(ctx.numbers)))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield arguments: plain, causal with groups, a window, packed sequences."""
    generator = torch.Generator(device=device).manual_seed(0)

    def heads(count: int, tokens: int, batch: int = 2) -> Tensor:
        made = torch.randn(batch, tokens, count, 16, generator=generator, device=device)
        return made.to(dtype).transpose(1, 2)

    offsets = torch.tensor([0, 5, 5, 21], dtype=torch.int32, device=device)
    yield heads(3, 24), heads(3, 24), heads(3, 24), None, None, 0.25
    yield heads(4, 7), heads(2, 7), heads(2, 7), None, None, 0.3, -1, 0
    yield heads(4, 5), heads(1, 24), heads(1, 24), None, None, 0.25, 6, 0
    yield heads(2, 21, 1), heads(1, 21, 1), heads(1, 21, 1), offsets, None, 0.25, -1, 0, 16


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in INPUT_DTYPES:
        yield from samples(device, dtype)


def _inputs_backward(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for dtype in INPUT_DTYPES:
        for q, k, v, *rest in samples(device, dtype):
            yield (q, q, k, v, *reference.attention(q, k, v, *rest), *rest)


def _why(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str:
    return ": ".join(choose_attention(call_of(q, k, _all(rest))))


register(
    attention,
    reference=reference.attention,
    opaque=True,
    autograd=Autograd(_gradients, _context),
    why=_why,
    inputs=_inputs,
    recomputable=False,
)
register(
    attention_backward,
    reference=reference.attention_backward,
    opaque=True,
    autograd=None,
    why=lambda grad, q, k, v, out, lse, *rest: _why(q, k, v, *rest),
    inputs=_inputs_backward,
    recomputable=False,
)
