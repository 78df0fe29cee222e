"""Attention of a few new tokens over a KV cache: schema, fake, routes and contract; opaque.

Definition: ``decompositions/decode_attention.py``; kernel: ``kernels/triton/decode_attention.py``;
which of them runs: ``_routes_decode.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import decode_attention as reference

from .. import config
from ..registry import register
from ..validation import INPUT_DTYPES, check_dtype, check_same_device, check_tensor
from ._cache_args import (
    QUANTIZED,
    capacity,
    check_cache,
    check_largest,
    check_one_scale,
    check_places,
    check_row_scales,
)
from ._library import LIBRARY, define
from ._routes_decode import choose_decode_attention, splits_for
from .kv_cache import sample_cache, sample_heads

Pair = tuple[Tensor, Tensor]


def check_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    window: int,
) -> None:
    """Raise TypeError or ValueError for arguments that ``decode_attention`` does not take."""
    check_cache(k_cache, v_cache)
    check_tensor("q", q)
    check_dtype("q", q.dtype, INPUT_DTYPES)
    check_same_device("q", q, "k_cache", k_cache)
    heads, head = k_cache.shape[1], k_cache.shape[3]
    if q.dim() != 4 or q.shape[3] != head:
        raise ValueError(f"`q` must have the shape (B, Hq, n, {head}), got {tuple(q.shape)}")
    if heads == 0 or q.shape[1] % heads:
        raise ValueError(
            f"`q` must have a multiple of the cache's heads, {heads}, got {q.shape[1]}"
        )
    check_places(k_cache, q.shape[0], lengths, block_table)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is None:
            continue
        if k_cache.dtype not in QUANTIZED:
            raise ValueError(f"`{name}` must be None for a cache that is not quantized")
        check = check_row_scales if value.dim() == 4 else check_one_scale
        check(name, value, k_cache)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"`scale` must be finite, got {scale}")
    if window < 0:
        raise ValueError(f"`window` must be at least 0, got {window}")


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
) -> Pair:
    check_decode_attention(
        q, k_cache, v_cache, lengths, block_table, k_scale, v_scale, scale, window
    )
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _eager(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None = None,
    *rest: Any,
) -> Pair:
    check_largest("lengths", lengths, capacity(k_cache, block_table))
    made: Pair = reference.decode_attention(q, k_cache, v_cache, lengths, block_table, *rest)
    return made


decode_attention = define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths,"
    " Tensor? block_table=None, Tensor? k_scale=None, Tensor? v_scale=None, float? scale=None,"
    " int window=0) -> (Tensor, Tensor)",
    fake=_fake,
    reference=_eager,
    compiled=False,
)


def _route(q: Tensor, k_cache: Tensor) -> tuple[str, str]:
    cuda = q.device.type == "cuda"
    capability = torch.cuda.get_device_capability(q.device) if cuda else (0, 0)
    return choose_decode_attention(q.device.type, capability, q.dtype, k_cache.dtype, q.shape[3])


def _why(q: Tensor, k_cache: Tensor, *rest: Any, **options: Any) -> str:
    return ": ".join(_route(q, k_cache))


@torch.no_grad()  # as a compiled kernel: the op has no gradient rule
def _cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
) -> Pair:
    arguments = q, k_cache, v_cache, lengths, block_table, k_scale, v_scale
    check_decode_attention(*arguments, scale, window)
    route, reason = _route(q, k_cache)
    if route != config.decode_attention == "triton":
        raise ValueError(f'config.decode_attention is "triton", but {reason}')
    if route == "reference":
        return _eager(*arguments, scale, window)
    from inductor_ext.kernels.triton import decode_attention as kernel

    card = torch.cuda.get_device_properties(q.device)
    queries = q.shape[1] // k_cache.shape[1] * q.shape[2]
    tiles = -(-queries // kernel.sizes(q.shape[3], queries)["BLOCK_M"])
    programs = q.shape[0] * k_cache.shape[1] * tiles
    splits = splits_for(programs, capacity(k_cache, block_table), card.multi_processor_count)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    made: Pair = kernel.decode_attention(*arguments, scale, window, splits)
    return made


LIBRARY.impl("decode_attention", _cuda, "CUDA")


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, dtype in enumerate((*INPUT_DTYPES, *QUANTIZED)):
        of = dtype if dtype in INPUT_DTYPES else torch.bfloat16
        rows = dtype in QUANTIZED
        made, lengths, table = sample_cache(dtype, device, paged=bool(number % 2), rows=rows)
        k, v = sample_heads(of, device, 12)
        where = (k, v, torch.full_like(lengths, 12), None, table)
        if rows:
            torch.ops.inductor_ext.append_kv_row_(*made, *where)
        else:
            torch.ops.inductor_ext.append_kv_(*made, *where)
        q = torch.cat(sample_heads(of, device, 3 - number % 3), 1)
        yield (q, *made[:2], lengths, table, *(made[2:] or (None, None)), 0.3, 4 * (number % 2))


register(
    decode_attention,
    reference=reference.decode_attention,
    opaque=True,
    autograd=None,
    why=_why,
    inputs=_inputs,
)
