"""Attention of a few new tokens over a KV cache, in ATen: the definition, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return ``softmax(scale * q @ k^T) @ v`` over the tokens that each query sees, and its lse.

    Query i of n is token ``lengths[b] - n + i`` of its sequence and sees those up to itself; with
    ``window`` only the last ``window`` of them.  Heads Hq / Hkv * h .. share head h of the cache.

    Args:
        q: (B, Hq, n, D) bfloat16, float16 or float32.
        k_cache, v_cache, block_table: see decompositions/kv_cache.py.
        lengths: (B,) int32; tokens behind what the cache holds count as absent, as those of pages
            that are not there do.
        k_scale, v_scale: what codes are multiplied by: one element, or one a token and head.
        scale: of the scores; D^-½ by default.

    Returns:
        (B, Hq, n, D) of the dtype of ``q``, contiguous, and the logarithm of the sum of the
        exponentials, fp32 (B, Hq, n): 0 and -inf for a query that sees no token.
    """
    batch, heads, count, width = q.shape
    kv_heads = k_cache.shape[1]
    k, present = _tokens(k_cache, k_scale, block_table)
    v, _ = _tokens(v_cache, v_scale, block_table)
    at = torch.arange(k.shape[2], device=q.device)  # (T,)
    own = lengths.view(-1, 1, 1) - count + torch.arange(count, device=q.device).view(-1, 1)
    seen = (at <= own) & present.unsqueeze(1)  # (B, n, T)
    if window:
        seen = seen & (at > own - window)
    used = seen.any(1).unsqueeze(1).unsqueeze(-1)  # (B, 1, T, 1)
    k, v = (torch.where(used, t, 0.0) for t in (k, v))  # nothing is computed on garbage
    grouped = q.float().reshape(batch, kv_heads, heads // kv_heads, count, width)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2) * (width**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen.unsqueeze(1).unsqueeze(1), float("-inf"))
    if k.shape[2] == 0:
        return torch.zeros_like(q).contiguous(), q.new_full(
            q.shape[:3], float("-inf"), dtype=torch.float32
        )
    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ v.unsqueeze(2)
    out = torch.where(total == 0.0, 0.0, out / total)
    lse = (largest + total.log()).squeeze(-1)
    return out.reshape(q.shape).to(q.dtype).contiguous(), lse.reshape(q.shape[:3]).contiguous()


def _tokens(
    cache: Tensor, scale: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the values in the order of tokens, fp32 (B, H, T, D), and which exist, (B or 1, T)."""
    values = cache.float()
    if scale is not None:
        values = values * (scale.reshape(()) if scale.numel() == 1 else scale)
    if block_table is None:
        return values, torch.ones(1, cache.shape[2], dtype=torch.bool, device=cache.device)
    exists = (block_table >= 0) & (block_table < cache.shape[0])  # (B, N)
    if cache.shape[0] == 0:
        values = values.new_zeros((1, *cache.shape[1:]))
    chosen = values[torch.where(exists, block_table, 0).long()]  # (B, N, H, page, D)
    values = chosen.transpose(1, 2).flatten(2, 3)
    return values, exists.repeat_interleave(cache.shape[2], 1)
