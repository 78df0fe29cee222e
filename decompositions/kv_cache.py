"""Append to a KV cache: the arithmetic and the addressing of every implementation, in ATen.

A contiguous cache is (B, H, T, D): T tokens a sequence.  A paged one is (P, H, page, D) with a
block table (B, N): token t of sequence b is in page ``block_table[b, t // page]``, slot
``t % page``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import quantize_fp8_row, saturate_cast
from .int8 import quantize_int8_row


def append_kv_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write ``k`` and ``v``, (B, H, S, D), as they are, or as FP8 with a given scale.

    Token s of sequence b goes to ``positions[b, s]``, by default ``lengths[b] - S + s``, since
    ``lengths`` count the new tokens.  What has no place there is dropped.  FP8 codes are
    ``sat(x * (1 / scale))``; ``k_scale`` and ``v_scale``, one element each, multiply codes on
    reading; None for 1.
    """
    where = places(k_cache, k, lengths, positions, block_table)
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if cache.dtype.itemsize == 1:
            multiplier = 1.0 if scale is None else torch.ones_like(scale) / scale
            new = saturate_cast(new.float() * multiplier, cache.dtype)
        _write(cache, new, where)


def append_kv_row_(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    """Write ``k`` and ``v`` as FP8 or INT8, quantized by token and head, and their scales.

    Quantization: ``quantize_fp8_row`` and ``quantize_int8_row``.  Places: :func:`append_kv_`.
    """
    where = places(k_cache, k, lengths, positions, block_table)
    for cache, scales, new in ((k_cache, k_scale, k), (v_cache, v_scale, v)):
        int8 = cache.dtype == torch.int8
        codes, scale = quantize_int8_row(new) if int8 else quantize_fp8_row(new, cache.dtype)
        _write(cache, codes, where)
        _write(scales, scale, where)


def places(
    cache: Tensor,
    new: Tensor,
    lengths: Tensor,
    positions: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, each (B, S): index of the sequence or page, slot in it, and whether there is one."""
    batch, tokens = new.shape[0], new.shape[2]
    if positions is None:
        positions = lengths.unsqueeze(1) - tokens + torch.arange(tokens, device=new.device)
    at = positions.long()
    if block_table is None:
        sequences = torch.arange(batch, device=new.device).unsqueeze(1)
        return sequences.expand(at.shape), at, (at >= 0) & (at < cache.shape[2])
    page = cache.shape[2]
    inside = (at >= 0) & (at < block_table.shape[1] * page)
    if block_table.shape[1] == 0 or page == 0:
        return torch.zeros_like(at), at, inside
    pages = block_table.long().gather(1, torch.where(inside, at, 0) // page)
    return pages, at % page, inside & (pages >= 0) & (pages < cache.shape[0])


def _write(cache: Tensor, new: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> None:
    outer, slot, inside = where
    b, s = inside.nonzero(as_tuple=True)
    if new.dtype.itemsize == 1:  # PyTorch moves no float8 by index
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    cache[outer[b, s], :, slot[b, s]] = new[b, :, s]
