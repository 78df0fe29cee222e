"""How close are two sets of embeddings, and do they rank the neighbours alike?"""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Quality:
    """Agreement with the fp32 embeddings of the same ``sentences``.

    ``top1`` and ``top3`` count the sentences whose nearest neighbour, and whose set of three
    nearest neighbours, stay the same.
    """

    sentences: int
    cosine_min: float
    cosine_mean: float
    top1: int
    top3: int

    @property
    def ranking_same(self) -> bool:
        """Whether every sentence keeps its nearest neighbour."""
        return self.top1 == self.sentences


def compare(embeddings: Tensor, reference: Tensor) -> Quality:
    """Compare two (B, C) sets of unit vectors; B >= 2."""
    cosine = (embeddings.double() * reference.double()).sum(-1)
    best, best_ref = nearest(embeddings, 3), nearest(reference, 3)
    rows = list(zip(best.tolist(), best_ref.tolist(), strict=True))
    return Quality(
        sentences=len(rows),
        cosine_min=float(cosine.min()),
        cosine_mean=float(cosine.mean()),
        top1=sum(a[0] == b[0] for a, b in rows),
        top3=sum(set(a) == set(b) for a, b in rows),
    )


def nearest(embeddings: Tensor, k: int) -> Tensor:
    """Return the indices of each row's ``k`` nearest other rows, best first: (B, min(k, B - 1))."""
    similarity = embeddings.double() @ embeddings.double().t()
    similarity.fill_diagonal_(-2.0)  # below every cosine: a sentence is not its own neighbour
    return similarity.topk(min(k, len(embeddings) - 1)).indices
