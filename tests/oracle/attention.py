"""Attention in float64, one query after the other, and what rounding may change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Attended(NamedTuple):
    """Results of (B, H, S, D) attention, all float64.

    ``magnitude``: sum of p * |v|; ``largest``: max of p times the sum of the visible |v|.
    """

    out: Array
    lse: Array
    magnitude: Array
    largest: Array


def sequences(
    queries: int, keys: int, offsets: Sequence[int] | None, offsets_k: Sequence[int] | None
) -> Iterator[tuple[range, range]]:
    """Yield which queries and which keys belong together."""
    if offsets is None:
        yield range(queries), range(keys)
        return
    other = offsets if offsets_k is None else offsets_k
    for n in range(len(offsets) - 1):
        yield range(offsets[n], offsets[n + 1]), range(other[n], other[n + 1])


def attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    left: int = -1,
    right: int = -1,
    offsets: Sequence[int] | None = None,
    offsets_k: Sequence[int] | None = None,
) -> Attended:
    """Return softmax(q k^T scale) v; the last query of a sequence stands at its last key."""
    batch, heads, tokens, dim = q.shape
    group = heads // k.shape[1]
    made = Attended(
        np.zeros((batch, heads, tokens, dim)), np.full((batch, heads, tokens), -np.inf),
        np.zeros((batch, heads, tokens, dim)), np.zeros((batch, heads, tokens, dim)),
    )  # fmt: skip
    for mine, theirs in sequences(tokens, k.shape[2], offsets, offsets_k):
        for i in mine:
            stands = theirs.stop - (mine.stop - i)
            first = theirs.start if left < 0 else max(theirs.start, stands - left)
            end = theirs.stop if right < 0 else min(theirs.stop, stands + right + 1)
            if first >= end:
                continue
            for b in range(batch):
                for h in range(heads):
                    values = v[b, h // group, first:end]
                    scores = (k[b, h // group, first:end] @ q[b, h, i]) * scale
                    top = scores.max()
                    weights = np.exp(scores - top)
                    total = weights.sum()
                    p = weights / total
                    made.out[b, h, i] = p @ values
                    made.lse[b, h, i] = top + np.log(total)
                    made.magnitude[b, h, i] = p @ np.abs(values)
                    made.largest[b, h, i] = p.max() * np.abs(values).sum(0)
    return made
