"""Attention of a few new tokens over a KV cache, the tokens of a sequence split among programs.

Each program goes over one range of a sequence's tokens for all queries that share a head of the
cache, and keeps their softmax's maximum and sum; a second kernel puts the ranges together, in one
tile and so always in one order.  Nothing waits for another program.  Codes are floats only in
registers: they are exact in bf16, and scales multiply scores and weights in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
NONE, ONE, ROWS = 0, 1, 2
"""Scales: none, one for all, one a token and head."""


@triton.jit
def _as_floats(codes, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if codes.dtype == tl.int8:
        codes = codes.to(tl.float32)  # as the hardware does, which has no shorter way
    return codes.to(dtype)


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]
    x, scales, head, outer, slot, stride_o, stride_h, stride_t, there, KIND: tl.constexpr
):  # fmt: skip
    """Return (M, N) times the scale of each of its N tokens."""
    if KIND == 1:
        x = x * tl.load(scales)
    elif KIND == 2:
        at = scales + head * stride_h + outer * stride_o + slot * stride_t
        x = x * tl.load(at, mask=there, other=0.0)[None, :]
    return x


@triton.jit(do_not_specialize=["window", "splits", "count", "tiles", "capacity", "rows"])
def attend(  # type: ignore[no-untyped-def]
    q, k, v, k_scale, v_scale, table, lengths, out, lse,
    scale, window, count, group, tiles, kv_heads, splits, rows, capacity, page, pages,
    q_b, q_h, q_n, k_o, k_h, k_t, v_o, v_h, v_t, ks_o, ks_h, ks_t, vs_o, vs_h, vs_t, table_b,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, WINDOW: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    WEIGHTS: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the result of one range of tokens (WHOLE: of all), and its log2 of the sum."""
    split = tl.program_id(1)
    tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
    b = (tl.program_id(0) // tiles // kv_heads).to(tl.int64)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # queries x heads that share one of the cache
    is_query = m < group * count
    query, query_head = m % count, head * group + m // count
    d = tl.arange(0, BLOCK_D)
    in_head = d < D
    q_at = q + b * q_b + query_head[:, None] * q_h + query[:, None] * q_n + d[None, :]
    queries = tl.load(q_at, mask=is_query[:, None] & in_head[None, :], other=0.0)

    length = tl.load(lengths + b)
    own = length - count + query
    first = 0
    if WINDOW:
        first = tl.maximum(length - count - window + 1, 0)
    last = tl.minimum(length, capacity)
    range_size = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), BLOCK_N) * BLOCK_N
    begin = first + split * range_size
    end = tl.minimum(begin + range_size, last)

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        there = t < end
        if PAGED:
            outer = tl.load(table + b * table_b + t // page, mask=there, other=-1).to(tl.int64)
            there = there & (outer >= 0) & (outer < pages)
            slot = (t % page).to(tl.int64)
        else:
            outer = b + tl.zeros((BLOCK_N,), tl.int64)
            slot = t.to(tl.int64)
        k_at = k + head * k_h + (outer * k_o + slot * k_t)[None, :] + d[:, None]
        keys = tl.load(k_at, mask=there[None, :] & in_head[:, None], other=0.0)
        keys = _as_floats(keys, queries.dtype)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        scores = _scaled(scores, k_scale, head, outer, slot, ks_o, ks_h, ks_t, there, K_SCALE)
        seen = there[None, :] & (t[None, :] <= own[:, None])
        if WINDOW:
            seen = seen & (t[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))

        larger = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
        best = larger
        v_at = v + head * v_h + (outer * v_o + slot * v_t)[:, None] + d[None, :]
        values = tl.load(v_at, mask=there[:, None] & in_head[None, :], other=0.0)
        values = _as_floats(values, WEIGHTS)
        weights = _scaled(weights, v_scale, head, outer, slot, vs_o, vs_h, vs_t, there, V_SCALE)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(WEIGHTS), values, input_precision=PRECISION)

    acc = tl.where(total[:, None] == 0.0, 0.0, acc / total[:, None])
    log_sum = best + tl.log2(total)  # -inf where nothing was seen
    row = (b * kv_heads * group + query_head) * count + query
    if WHOLE:
        log_sum = log_sum * LN_2
    else:
        row += split.to(tl.int64) * rows
    out_at = out + row[:, None] * D + d[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_query[:, None] & in_head[None, :])
    tl.store(lse + row, log_sum, mask=is_query)


@triton.jit(do_not_specialize=["splits"])
def combine(  # type: ignore[no-untyped-def]
    parts, part_lse, out, lse, rows, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Put the ranges of one query and head together."""
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    in_head = d < D
    logs = tl.load(part_lse + s.to(tl.int64) * rows + row, mask=s < splits, other=float("-inf"))
    best = tl.max(logs, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(logs - base)
    total = tl.sum(weights, 0)
    at = parts + (s.to(tl.int64) * rows + row)[:, None] * D + d[None, :]
    tile = tl.load(at, mask=(s < splits)[:, None] & in_head[None, :], other=0.0)
    made = tl.sum(tile * weights[:, None], 0)
    made = tl.where(total == 0.0, 0.0, made / total)
    tl.store(out + row * D + d, made.to(out.dtype.element_ty), mask=in_head)
    tl.store(lse + row, (best + tl.log2(total)) * LN_2)


def scale_kind(scale: Tensor | None) -> int:
    """Return NONE, ONE or ROWS."""
    return NONE if scale is None else ONE if scale.numel() == 1 else ROWS


def sizes(width: int, queries: int) -> dict[str, int]:
    """Return the blocks for a head size and the number of queries that share a head.

    To be measured.
    """
    block_d = triton.next_power_of_2(max(width, 16))
    block_m = min(max(triton.next_power_of_2(queries), 16), 64)
    return {"BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": 64 if block_d <= 128 else 32}


def weights_dtype(q: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """Return the dtype of the second product: fp16 has not the range for weights times scales."""
    return torch.bfloat16 if q == torch.float16 and cache.itemsize == 1 else q


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    window: int,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels on checked arguments; see decompositions/decode_attention.py."""
    batch, heads, count, width = q.shape
    kv_heads = k_cache.shape[1]
    if q.stride(3) != 1:
        q = q.contiguous()
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    rows = batch * heads * count
    if rows == 0:
        return out, lse
    whole = splits == 1
    parts = out if whole else q.new_empty((splits, rows, width), dtype=torch.float32)
    part_lse = lse if whole else lse.new_empty((splits, rows))
    group = heads // kv_heads
    blocks = sizes(width, group * count)
    tiles = triton.cdiv(group * count, blocks["BLOCK_M"])
    page = k_cache.shape[2]
    capacity = page * (1 if block_table is None else block_table.shape[1])
    of_k, of_v = (_strides(s) for s in (k_scale, v_scale))
    table_stride = 0 if block_table is None else block_table.stride(0)
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
        table_stride = block_table.stride(0)
    weights = weights_dtype(q.dtype, k_cache.dtype)
    with torch.cuda.device_of(q):
        attend[(batch * kv_heads * tiles, splits)](
            q, k_cache, v_cache, k_scale, v_scale, block_table, lengths.contiguous(), parts,
            part_lse, scale * LOG2_E, window, count, group, tiles, kv_heads, splits, rows,
            capacity, max(page, 1), k_cache.shape[0], *q.stride()[:3], *k_cache.stride()[:3],
            *v_cache.stride()[:3], *of_k, *of_v, table_stride, D=width, **blocks,
            PAGED=block_table is not None, WINDOW=window > 0,
            K_SCALE=scale_kind(k_scale), V_SCALE=scale_kind(v_scale),
            WEIGHTS=_TYPES[weights], PRECISION="ieee", WHOLE=whole, num_warps=4, num_stages=2,
        )  # fmt: skip
        if not whole:
            combine[(rows,)](
                parts, part_lse, out, lse, rows, splits, D=width, BLOCK_D=blocks["BLOCK_D"],
                BLOCK_S=triton.next_power_of_2(splits), num_warps=4,
            )  # fmt: skip
    return out, lse


_TYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32,
}  # fmt: skip


def _strides(scale: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scale_kind(scale) != ROWS else scale.stride()[:3]  # type: ignore[union-attr]
