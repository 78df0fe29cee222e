"""Triton templates whose input is the producer's own code; docs/templates.md tells of them."""

from __future__ import annotations

from typing import Any

from .fit import cut_for, quantize_tiles, static_both
from .fit_row import amax_of_rows, quantize_rows, quantize_tensor
from .formulas import Rule

__all__ = [
    "Rule",
    "amax_of_rows",
    "quantize",
    "quantize_rows",
    "quantize_tensor",
    "static_both",
]


def quantize(
    x: Any,
    rule: Rule,
    group: int,
    layout: str,
    *,
    along_k: bool = False,
    along_m: bool = False,
    square: bool = False,
) -> Any:
    """Quantize vectors or squares of ``group`` elements in one kernel with what produces ``x``.

    Args:
        x: the tensor, as Inductor IR.
        rule: from a group's amax to its scale and codes.
        layout: of the scales, "plain" or "gemm".
        along_k, along_m: the orientations, one or both; along M the result is transposed.
        square: whether a scale is for ``group`` x ``group`` elements.

    Returns:
        (codes, scales) along K, then (codes, scales) along M, those asked for; None where no
        template applies.
    """
    if not (along_k or along_m):
        return None
    if along_k and not along_m and not square:
        rows = quantize_rows(x, rule, group, layout)
        if rows is not None:
            return rows
    cut = cut_for(x, rule, group, along_k, along_m, layout, square)
    if cut is None:
        return None
    return quantize_tiles(
        x, rule, group, cut, along_k=along_k, along_m=along_m, layout=layout, square=square
    )
