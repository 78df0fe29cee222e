"""Correctly rounded division as Inductor IR, for decompositions to be written with."""

from __future__ import annotations

from typing import Any

from .vocabulary import F32, known_equal, pointwise
from .vocabulary import div_rn as divide


def div_rn(a: Any, b: Any) -> Any:
    """Lower ``inductor_ext::div_rn``; ``b`` broadcasts to the shape of ``a``."""
    load_a, load_b = a.make_loader(), b.make_loader()
    sizes = list(b.get_size())
    first = len(a.get_size()) - len(sizes)

    def element(index: Any) -> Any:
        own = [0 if known_equal(n, 1) else i for n, i in zip(sizes, index[first:], strict=True)]
        return divide(load_a(index), load_b(own), a.get_device())

    return pointwise(a, F32, a.get_size(), element)
