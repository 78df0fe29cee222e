"""KV caches for the tests: small ones of every kind, and what must become of each token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import torch
from oracle import fp8, ints
from torch import Tensor
from torch.utils import _pytree as pytree

import inductor_ext as ixt
from inductor_ext.testing.samples import _move

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS: dict[str, ixt.Format | None] = {
    "plain": None,
    "e4m3 row": ixt.FP8(granularity="row"),
    "e5m2 row": ixt.FP8(granularity="row", dtype=E5M2),
    "e4m3 given": ixt.FP8(granularity="tensor"),
    "e5m2 given": ixt.FP8(granularity="tensor", dtype=E5M2),
    "int8 row": ixt.INT8(granularity="row"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Sample:
    """A cache, and one append to it."""

    cache: ixt.KVCache
    k: Tensor
    v: Tensor
    positions: Tensor | None

    def to(self, device: str) -> Sample:
        """Return a copy on a device, with the same strides."""
        positions = None if self.positions is None else self.positions.to(device)
        k, v = moved((self.k, self.v), device)
        return Sample(moved(self.cache, device), k, v, positions)


def moved(value: Any, device: str) -> Any:
    """Copy tensors to a device, strides and all."""
    return pytree.tree_map_only(Tensor, lambda t: _copy(t, device), value)


def _copy(t: Tensor, device: str) -> Tensor:
    return _move(t, torch.device(device)).requires_grad_(t.requires_grad)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def empty(
    kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, page: int, spare: int = 2
) -> ixt.KVCache:
    """Return an empty cache of (B, H, T, D), paged with ``page`` above 0, a few pages to spare.

    Pages of a sequence lie apart and backwards; the second of the first is not there.
    """
    b, h, t, d = shape
    if not page:
        made = ixt.KVCache.contiguous(b, h, t, d, FORMATS[kind], dtype)
    else:
        per = -(-t // page)
        table = torch.arange(b * per - 1, -1, -1, dtype=torch.int32).view(per, b).t() + spare - 1
        if per > 1:
            table[0, 1] = (-1, b * per + spare)[b % 2]  # not there
        made = ixt.KVCache.paged(b * per + spare, h, page, d, table, FORMATS[kind], dtype)
    if kind.endswith("given"):
        made = made._replace(k_scale=torch.tensor(0.037), v_scale=torch.tensor([2.5]))
    return made


def samples() -> Iterator[tuple[str, Sample]]:
    """Yield appends of every format, layout and kind of places, some out of range."""
    shapes = ((2, 3, 9, 32, 4), (3, 1, 6, 7, 1), (1, 2, 5, 96, 2), (2, 2, 4, 16, 0))  # B H T D, S
    forms = itertools.product(FORMATS, (0, 4), shapes)
    for turn, (kind, page, (b, h, t, d, s)) in enumerate(forms):
        dtype = DTYPES[turn % 3]
        cache = empty(kind, (b, h, t, d), dtype, page)
        if turn % 2:  # tokens, then heads, as some servers lay pages out
            k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in cache[:2])
            cache = cache._replace(k=k, v=v)
        spread = torch.exp2(8 * randn(b, s, h, 1))
        k, v = ((n * spread).to(dtype).transpose(1, 2) for n in randn(2, b, s, h, d))
        if turn % 4 == 1:
            k, v = k.contiguous(), torch.cat([v, v], -1)[..., d:]
        if turn % 4 == 2 and s:
            k[..., 0], v[0, 0, 0] = float("nan"), 0.0
        capacity = cache.k.shape[2] * (1 if not page else cache.block_table.shape[1])  # type: ignore[union-attr]
        cache.lengths.copy_(torch.tensor([s - 2, capacity, s + 1][:b]))  # one in front of the start
        positions = None
        if turn % 3 == 1:
            order = [torch.randperm(capacity + 2)[:s] - 2 for _ in range(b)]
            positions = torch.stack(order).to((torch.int32, torch.int64)[turn % 2])
        yield f"{kind}, {page or 'contiguous'}, {dtype}", Sample(cache, k, v, positions)


def codes_of(x: Tensor, kind: str, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return one row's codes, and its scale where the row has its own, by the oracle."""
    values = cases.floats(x)[None]
    if kind == "plain":
        return x, None
    if kind == "int8 row":
        made = ints.int8(values, True)
        return torch.from_numpy(made.codes[0].astype(np.int8)), cases.f32(made.scale.reshape(1))
    target = kind[:4]
    if kind.endswith("given"):
        assert scale is not None
        multiplier = np.float32(1) / np.float32(scale.item())
        true = fp8.quantize_static(values, np.asarray(multiplier), target)
    else:
        true = fp8.quantize_current(
            values, cases.NAMES[x.dtype], target, row=True, eps=0.0, pow2=False
        )
    codes = cases.from_raw(true.codes[0], cases.TARGETS[target])
    return codes, cases.f32(true.scale_inv.reshape(1)) if kind.endswith("row") else None


def appended(kind: str, sample: Sample) -> ixt.KVCache:
    """Return the cache after the append, written token by token."""
    done = sample.to("cpu")
    cache, (batch, heads, tokens, _) = done.cache, done.k.shape
    for b, s, side in itertools.product(range(batch), range(tokens), "kv"):
        codes, scales = getattr(cache, side), getattr(cache, f"{side}_scale")
        at = int(cache.lengths[b]) - tokens + s
        if sample.positions is not None:
            at = int(sample.positions[b, s])
        outer, slot = b, at
        if cache.block_table is not None:
            page = codes.shape[2]
            if not 0 <= at < page * cache.block_table.shape[1]:
                continue
            outer, slot = int(cache.block_table[b, at // page]), at % page
        if not (0 <= outer < codes.shape[0] and 0 <= slot < codes.shape[2]):
            continue
        for h in range(heads):
            row, scale = codes_of(getattr(done, side)[b, h, s], kind, scales)
            bits(codes)[outer, h, slot] = bits(row)
            if scale is not None:
                scales[outer, h, slot] = scale
    return cache


def bits(t: Tensor) -> Tensor:
    """Return 8-bit codes as uint8, other tensors as they are."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def require_same(got: ixt.KVCache, want: ixt.KVCache, label: str) -> None:
    """Assert equal bits, NaN being NaN in a cache of floats."""
    for name, mine, true in zip(ixt.KVCache._fields, got, want, strict=True):
        if true is not None:
            a, b = bits(mine.cpu()), bits(true)
            same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
            assert same.all(), f"{label}: {name} differs at {(~same).nonzero()[0].tolist()}"


def filled(kind: str, dtype: torch.dtype, page: int, shape: Any, lengths: Any) -> ixt.KVCache:
    """Return a cache that holds random tokens up to ``lengths``, and NaN or 127 behind them."""
    cache = empty(kind, shape, dtype, page)
    for t in cache[:2]:
        if t.dtype == torch.int8:
            t.fill_(127)
        else:
            bits(t).fill_(0x7F if t.dtype.itemsize == 1 else float("nan"))
    if kind.endswith("row"):
        cache.k_scale.fill_(float("nan"))  # type: ignore[union-attr]
        cache.v_scale.fill_(float("nan"))  # type: ignore[union-attr]
    b, h, t, d = shape
    cache.lengths.fill_(t)
    where = torch.arange(t).expand(b, t)
    there = where < torch.tensor(lengths)[:, None]
    k, v = ((2 * n).to(dtype) for n in randn(2, b, h, t, d, seed=1))
    ixt.append_kv_(cache, k, v, torch.where(there, where, -1))
    cache.lengths.copy_(torch.tensor(lengths))
    return cache


def attended(
    q: Tensor, cache: ixt.KVCache, scale: float, window: int, weights: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output and lse in float64, one query at a time, and bounds of their errors.

    ``weights`` is the relative error of a rounding of the weights for the second product.  Sums
    are in fp32, cut off and not rounded by tensor cores: 2^-23 of the sum of magnitudes a term.
    With e the error of a score (D terms, and 6 for the product of code and scale, the scale and
    its log2(e)), a weight is off by 2 e relative with its sum (and exp2's own 2^-22), and the
    output by twice that times the sum of p |v|, plus T terms of the sum, and twice the rounding
    of ``weights``; lse by e and a few ulp of fp32.
    """
    batch, heads, count, width = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float64)
    bound, lse_bound = torch.zeros_like(out), torch.zeros_like(lse)
    group = heads // cache.k.shape[1]
    for b, head, i in itertools.product(range(batch), range(heads), range(count)):
        own = int(cache.lengths[b]) - count + i
        first = max(own - window + 1, 0) if window else 0
        rows = [_token(cache, b, head // group, t) for t in range(first, own + 1)]
        rows = [row for row in rows if row is not None]
        if not rows:
            continue
        k, v = (torch.stack(side) for side in zip(*rows, strict=True))
        x = q[b, head, i].double()
        scores = k @ x * scale
        e = ((k * x).abs().sum(-1) * abs(scale)).max() * (width + 6) * 2**-23
        p = scores.softmax(0)
        out[b, head, i], lse[b, head, i] = p @ v, scores.logsumexp(0)
        relative = 2 * (2 * e + 2**-22) + len(rows) * 2**-22 + 2 * weights
        bound[b, head, i] = relative * (p @ v.abs())
        lse_bound[b, head, i] = e + 2**-21 * (1 + lse[b, head, i].abs())
    return out, lse, bound, lse_bound


def _token(cache: ixt.KVCache, b: int, head: int, t: int) -> tuple[Tensor, Tensor] | None:
    """Return key and value of a token in float64, or None where the cache has none."""
    page = cache.k.shape[2]
    if cache.block_table is None:
        if t >= page:
            return None
        at = (b, head, t)
    else:
        if t >= page * cache.block_table.shape[1]:
            return None
        at = (int(cache.block_table[b, t // page]), head, t % page)
        if not 0 <= at[0] < cache.k.shape[0]:
            return None
    found = []
    for side in "kv":
        scale = getattr(cache, f"{side}_scale")
        by = 1.0 if scale is None else scale.double()[at] if scale.dim() == 4 else scale.double()
        found.append(getattr(cache, side)[at].double() * by)
    return found[0], found[1]
