"""Attention's inputs and error bounds, shared by the tests of the ops and of the kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from oracle import attention as oracle
from torch import Tensor


class Case(NamedTuple):
    """A shape and a mask: query heads, heads, dimension, queries, keys, and what is visible."""

    heads: int = 2
    kv: int = 2
    dim: int = 64
    queries: int = 33
    keys: int = 33
    left: int = -1
    right: int = -1
    offsets: tuple[int, ...] | None = None
    offsets_k: tuple[int, ...] | None = None
    batch: int = 1

    def rest(self, device: str = "cpu", scale: float | None = None) -> tuple[Any, ...]:
        """Return what follows q, k, v and their scales in the ops' arguments."""
        ends = [
            None if o is None else torch.tensor(o, dtype=torch.int32, device=device)
            for o in (self.offsets, self.offsets_k)
        ]
        return (*ends, self.dim**-0.5 if scale is None else scale, self.left, self.right)

    def true(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Any:
        """Return the oracle's results for these values, as float64 tensors."""
        arrays = [t.detach().cpu().double().numpy() for t in (q, k, v)]
        made = oracle.attention(
            *arrays, self.rest(scale=scale)[2], self.left, self.right, self.offsets, self.offsets_k
        )
        return oracle.Attended(*map(torch.from_numpy, made))  # type: ignore[arg-type]

    def tensors(self, seed: int = 0) -> list[Tensor]:
        """Return q, k and v in float32, as a projection lays them out: (B, S, H, D) in memory."""
        generator = torch.Generator().manual_seed(seed)
        sizes = ((self.queries, self.heads), (self.keys, self.kv), (self.keys, self.kv))
        return [
            torch.randn(self.batch, *size, self.dim, generator=generator).transpose(1, 2)
            for size in sizes
        ]


PACKED = (0, 5, 5, 27, 33)
CASES = {
    "plain": Case(batch=2),
    "causal": Case(right=0),
    "groups": Case(heads=4, kv=1, right=0),
    "more keys": Case(queries=7, keys=40, right=0),
    "more queries": Case(queries=40, keys=7, right=0),
    "window": Case(left=6, right=3, heads=4),
    "causal window": Case(left=6, right=0),
    "packed": Case(offsets=PACKED, right=0),
    "packed, other keys": Case(
        keys=40, offsets=PACKED, offsets_k=(0, 9, 12, 12, 40), left=4, right=2
    ),
    "one": Case(queries=1, keys=1),
    "odd dimension": Case(dim=7, left=3),
}
WIDER = {f"dimension {dim}": Case(dim=dim, queries=130, keys=150, right=0, heads=4, kv=2) for dim in
         (64, 96, 128, 192, 256)}  # fmt: skip
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Half an ulp, relative to the number."""


def score_error(q: Tensor, k: Tensor, scale: float, sums: float) -> float:
    """Return by how much the sum of a score may be off: ``sums`` of the sum of magnitudes."""
    longest = (t.double().abs().square().sum(-1).amax().sqrt() if t.numel() else 0 for t in (q, k))
    return float(np.prod([float(n) for n in longest])) * scale * sums


def require_within(
    got: tuple[Tensor, Tensor],
    want: Any,
    probability: float,
    floor: float,
    scores: float,
    exponential: float = 2.0**-17,
) -> None:
    """Assert the error bound of attention with rounded probabilities.

    A score that is off by e changes a weight, before and after the division by their sum, by
    a factor of at most exp(2 e).  A weight is rounded by at most ``probability`` of itself, or,
    where it is small, by ``floor`` of the largest weight; that is in the product with V, not in
    the sum that divides it.  The result is rounded to its dtype.  ``exponential`` is what exp, the
    scaling of its argument (half an ulp of a number below 2^7 is 2^-18) and the sum may be off by.
    """
    out, lse = got[0].double().cpu(), got[1].double().cpu()
    slip = float(np.expm1(2 * (scores + exponential)))
    allowed = (probability + slip) * want.magnitude + floor * want.largest
    allowed += UNIT[got[0].dtype] * (want.out.abs() + allowed) + 1e-30
    error = (out - want.out).abs()
    assert (error <= allowed).all(), f"{float((error - allowed).max()):.3g} above the bound"
    blind = want.lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    error = (lse - want.lse)[~blind].abs() - 2.0**-22 * want.lse[~blind].abs()
    assert (error <= scores + exponential).all()


def random_bytes(batch: int, heads: int, tokens: int, dim: int) -> Tensor:
    """Return random bytes (B, H, S, D), in memory (B, S, H, D)."""
    generator = torch.Generator().manual_seed(tokens)
    made = torch.randint(0, 256, (batch, tokens, heads, dim), generator=generator)
    return made.to(torch.uint8).transpose(1, 2)
