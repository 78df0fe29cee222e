"""Largest magnitudes as Inductor IR; the arithmetic is ``decompositions/amax.py``'s."""

from __future__ import annotations

from typing import Any

from .vocabulary import F32, amax_of_all, amax_of_rows, pointwise


def amax(x: Any) -> Any:
    """Lower ``inductor_ext::amax``."""
    largest = amax_of_all(x, with_codes=False)
    return pointwise(x, F32, largest.get_size(), largest.load)


def amax_row(x: Any) -> Any:
    """Lower ``inductor_ext::amax_row``."""
    largest = amax_of_rows(x, with_codes=False)
    return pointwise(x, F32, largest.get_size(), largest.load)
