"""Triton templates whose input is the producer's own code; docs/templates.md tells of them."""

from __future__ import annotations

from typing import Any

from .fit import cut_for, quantize_tiles
from .fit_row import amax_of_rows, quantize_rows
from .formulas import Rule

__all__ = ["Rule", "amax_of_rows", "quantize", "quantize_rows"]


def quantize(
    x: Any, rule: Rule, group: int, layout: str, *, along_k: bool = False, along_m: bool = False
) -> Any:
    """Quantize vectors of ``group`` elements in one kernel with what produces ``x``.

    Args:
        x: the tensor, as Inductor IR.
        rule: from a group's amax to its scale and codes.
        layout: of the scales, "plain" or "gemm".
        along_k, along_m: the orientations, one or both; along M the result is transposed.

    Returns:
        (codes, scales) along K, then (codes, scales) along M, those asked for; None where no
        template applies.
    """
    rows = quantize_rows(x, rule, group, layout) if along_k and not along_m else None
    if rows is not None:
        return rows
    if not (along_k or along_m):
        return None
    cut = cut_for(x, group, along_k, along_m, layout)
    if cut is None:
        return None
    return quantize_tiles(x, rule, group, cut, along_k=along_k, along_m=along_m, layout=layout)
