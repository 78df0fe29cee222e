"""Scaled dot-product attention, forward and backward: the exact definitions.

Key ``j`` is visible to query ``i`` when ``i + d - left <= j <= i + d + right``, where ``d`` is the
number of keys less the number of queries: the last query sees the last key (bottom-right, as in
FlashAttention since 2.1).  A bound of -1 is no bound, and causal is ``right = 0``.  A query that
sees nothing has the result 0 and the log-sum-exp -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import saturate_cast

BLOCK = 128
"""Tokens of a head that share a scale where there is a scale for each block."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    offsets_k: Tensor | None,
    scale: float,
    left: int = -1,
    right: int = -1,
    max_length: int = -1,
    *,
    compute: torch.dtype = torch.float64,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``softmax(q @ k^T * scale) @ v`` and the log-sum-exp of each row of scores.

    Args:
        q: (B, Hq, Sq, D). k, v: (B, Hkv, Sk, D), Hq a multiple of Hkv; query head h reads
            head h // (Hq / Hkv).
        offsets: int32 (n + 1,) or None: where each of n sequences begins in S, and where the last
            one ends; B is 1 then, and tokens see those of their own sequence only.
        offsets_k: the same for the keys; None where they are the queries'.
        left, right: how far a query sees; -1 for no bound.
        max_length: no effect here.
        compute: what everything is computed in; the results are rounded once.
        dtype: of the result; None for that of ``q``.

    Returns:
        (B, Hq, Sq, D), in memory (B, Sq, Hq, D); and float32 (B, Hq, Sq), natural logarithm.
    """
    scores = _scores(q.to(compute), k.to(compute), offsets, offsets_k, scale, left, right)
    lse = torch.logsumexp(scores, -1)
    out = (_probabilities(scores, lse) @ v.to(compute).unsqueeze(2)).reshape(q.shape)
    return _as_rows(out.to(dtype or q.dtype)), lse.reshape(q.shape[:3]).float()


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor | None,
    offsets_k: Tensor | None,
    scale: float,
    left: int = -1,
    right: int = -1,
    max_length: int = -1,
    *,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``, each rounded once.

    With the probabilities P = exp(scores - lse): dV = Pᵀ dO, dS = P * (dO Vᵀ - rowsum(dO * O)),
    dQ = scale * dS K, dK = scale * dSᵀ Q; those of a key's head are summed over its queries' heads.
    """
    q64, k64, v64 = (t.to(compute) for t in (q, k, v))
    shape = _by_group(q, k)
    p = _probabilities(
        _scores(q64, k64, offsets, offsets_k, scale, left, right),
        lse.to(compute).reshape(shape[:-1]),
    )
    by_group = grad.to(compute).reshape(shape)
    delta = (by_group * out.to(compute).reshape(shape)).sum(-1, keepdim=True)
    ds = p * (by_group @ v64.unsqueeze(2).mT - delta) * scale
    dq = (ds @ k64.unsqueeze(2)).reshape(q.shape)
    dk = (ds.mT @ q64.reshape(shape)).sum(2)
    dv = (p.mT @ by_group).sum(2)
    return _as_rows(dq.to(q.dtype)), _as_rows(dk.to(q.dtype)), _as_rows(dv.to(q.dtype))


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    offsets: Tensor | None,
    offsets_k: Tensor | None,
    scale: float,
    left: int = -1,
    right: int = -1,
    max_length: int = -1,
    dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return :func:`attention` of the values of FP8 codes; no probability is rounded.

    A kernel rounds the probabilities to e4m3 before their product with V, and accumulates in fewer
    bits; docs/attention.md says within which bound of this definition it stays.

    Args:
        q, k, v: e4m3 codes, shaped as in :func:`attention`.
        q_scale, k_scale, v_scale: float32 multipliers: one element, (B, H), or (B, H, n) with one
            for each 128 tokens of a head.
        dtype: of the result; float8_e4m3fn with ``out_scale``.
        out_scale: one float32: the result, rounded to float32, is quantized with it.
    """
    pairs = (q, q_scale), (k, k_scale), (v, v_scale)
    q, k, v = (dequantize(codes, multiplier, torch.float64) for codes, multiplier in pairs)
    wide = dtype if out_scale is None else torch.float32
    out, lse = attention(q, k, v, offsets, offsets_k, scale, left, right, dtype=wide)
    if out_scale is None:
        return out, lse
    return _as_rows(saturate_cast(out * out_scale.reshape(()), dtype)), lse


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``codes * scale`` in ``dtype``, the product taken in fp32 or in float64."""
    wide = dtype if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * each_row(scale, codes.shape[2]).to(wide)).to(dtype)


def each_row(scale: Tensor, rows: int) -> Tensor:
    """Return the scales so that they multiply (B, H, S, D)."""
    if scale.dim() == 3 and scale.shape[2] != 1:
        return scale.repeat_interleave(BLOCK, 2)[:, :, :rows, None]
    return scale[(...,) + (None,) * (4 - scale.dim())] if scale.dim() > 1 else scale.reshape(())


def _as_rows(out: Tensor) -> Tensor:
    """Return (B, H, S, D) laid out as (B, S, H, D), so that merging the heads is a view."""
    rows = out.transpose(1, 2)
    return torch.empty(rows.shape, dtype=out.dtype, device=out.device).copy_(rows).transpose(1, 2)


def _by_group(q: Tensor, k: Tensor) -> tuple[int, int, int, int, int]:
    """Return the shape (B, Hkv, Hq / Hkv, S, D) of the queries."""
    return q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2], q.shape[3]


def _scores(
    q: Tensor,
    k: Tensor,
    offsets: Tensor | None,
    offsets_k: Tensor | None,
    scale: float,
    left: int,
    right: int,
) -> Tensor:
    """Return the scores, (B, Hkv, Hq / Hkv, Sq, Sk), -inf where a key is not visible."""
    scores = (q.reshape(_by_group(q, k)) @ k.unsqueeze(2).mT) * scale
    seen = visible(q, k, offsets, offsets_k, left, right)
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def visible(
    q: Tensor,
    k: Tensor,
    offsets: Tensor | None,
    offsets_k: Tensor | None,
    left: int,
    right: int,
) -> Tensor | None:
    """Return which keys (columns) each query (row) sees, (Sq, Sk); None where that is all."""
    if offsets is None and left < 0 and right < 0:
        return None
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)[None, :]
    seen = torch.ones((), dtype=torch.bool, device=q.device)
    if offsets is None:
        ahead = j - i - (k.shape[2] - q.shape[2])
    else:
        offsets, offsets_k = offsets.long(), (offsets if offsets_k is None else offsets_k).long()
        # the sequence of each token, n for those behind the last
        mine = torch.searchsorted(offsets[1:], i.flatten(), right=True)[:, None]
        theirs = torch.searchsorted(offsets_k[1:], j.flatten(), right=True)[None, :]
        seen = (mine == theirs) & (mine < offsets.shape[0] - 1)
        ends, ends_k = (torch.cat([o[1:], o[-1:]]) for o in (offsets, offsets_k))
        ahead = (j - ends_k[theirs]) - (i - ends[mine])
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    return seen.expand(q.shape[2], k.shape[2])


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), and 0 in rows that see nothing."""
    lse = lse.unsqueeze(-1)
    return torch.exp(scores - lse).masked_fill(lse == float("-inf"), 0.0)
