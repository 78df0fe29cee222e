"""Quantize whole rows along K, with the statistics of a norm taken from the same registers.

One program takes ROWS_EACH rows.  What a row's statistics need is computed element by element,
reduced, and put into the code of the elements to quantize; the loads are the same in all of it, so
the row is read once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from inductor_ext._compat import TritonTemplate

from .formulas import FORMULAS, Rule, scale_text
from .inside import KEEP, MEAN, MOMENT, SUM
from .tile import PLACES, SWIZZLE

HEAD = """
    M = {{size("CODES", 0)}}
    K: tl.constexpr = COLUMNS
    m = tl.program_id(0) * ROWS_EACH + tl.arange(0, ROWS_EACH)
    k = tl.arange(0, WIDTH)
    inside = (m < M)[:, None] & (k < K)[None, :]
    idx_m = tl.minimum(m, M - 1).to(INDEX_DTYPE)[:, None]
    idx_k = k[None, :]
"""
MASKED_K = "    idx_k = tl.minimum(k, K - 1)[None, :]\n"
ELEMENT = """
    {{modification(subgraph_number=NUMBER, output_name="element", KNOWN)
      | indent_except_first(1)}}
    element = tl.broadcast_to(element, (ROWS_EACH, WIDTH))
"""
STEPS = {
    SUM: "    stepNUMBER = tl.sum(tl.where(inside, element, 0.0), 1)[:, None]\n",
    MEAN: "    stepNUMBER = tl.sum(tl.where(inside, element, 0.0), 1)[:, None] / K\n",
    MOMENT: (
        "    center = tl.sum(tl.where(inside, element, 0.0), 1)[:, None] / K\n"
        "    apart = tl.where(inside, element - center, 0.0)\n"
        "    stepNUMBER = tl.sum(apart * apart, 1)[:, None]\n"
    ),
    KEEP: (
        "    stepNUMBER = element\n"
        "    tl.store(KEPT_NUMBER + idx_m * K + idx_k,"
        " element.to(KEPT_NUMBER.dtype.element_ty), inside)\n"
    ),
}
QUANTIZE = """
    GROUPS: tl.constexpr = WIDTH // GROUP
    groups = tl.reshape(tl.where(inside, element, 0.0), (ROWS_EACH, GROUPS, GROUP))
    amax = ixt_amax(groups, 2)
    {scale}
    codes = tl.reshape(groups * multiplier[:, :, None], (ROWS_EACH, WIDTH)).to({code})
    tl.store(CODES + idx_m * K + k[None, :], codes, inside)
    g = tl.arange(0, GROUPS)
    row, column, rows, columns = m[:, None], g[None, :], M, tl.cdiv(K, GROUP)
    {place}
    fits = tl.broadcast_to((row < rows) & (column < columns), scale.shape)
    scale = tl.broadcast_to(scale, fits.shape).to({type})
    idx_0 = {first}
    idx_1 = {second}
    {{store_output(("idx_0", "idx_1"), "scale", "fits", indent_width=4,
                   val_shape=("ROWS_EACH", "GROUPS"))}}
"""


class Variant(NamedTuple):
    """What a row kernel is asked for: fixed when its source is made.

    Attributes:
        steps: the kinds of what is computed first, in the order of ``step0``, ``step1`` ...
        whole: whether a row fills the program's width.
        place: of the scales: "plain", "column-major" or "swizzled".
    """

    rule: Rule
    steps: tuple[str, ...]
    whole: bool
    place: str


@cache
def template(variant: Variant) -> Any:
    """Return the template of a variant."""
    kept = [f'"KEPT_{i}"' for i, kind in enumerate(variant.steps) if kind == KEEP]
    source = "{{def_kernel(" + ", ".join(['"CODES"', *kept]) + ")}}" + HEAD
    if not variant.whole:
        source += MASKED_K
    for number, kind in enumerate(variant.steps):
        source += _element(number) + STEPS[kind].replace("NUMBER", str(number))
    source += _element(len(variant.steps))
    first, second = PLACES[variant.place]
    words = {
        "scale": scale_text(variant.rule),
        "code": variant.rule.code_type,
        "place": SWIZZLE if variant.place == "swizzled" else "",
        "type": variant.rule.scale_type,
        "first": first,
        "second": second,
    }
    quantize = QUANTIZE
    for key, value in words.items():
        quantize = quantize.replace("{" + key + "}", value)
    name = f"ixt_row_{variant.rule.name}_{len(_made)}"
    _made.append(variant)
    return TritonTemplate(name=name, grid=_grid, source=source + quantize + FORMULAS)


_made: list[Variant] = []


def _element(number: int) -> str:
    known = ", ".join(f'step{i}="step{i}"' for i in range(number))
    return ELEMENT.replace("NUMBER", str(number)).replace("KNOWN", known)


def _grid(rows: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    return (-(-rows // meta["ROWS_EACH"]), 1, 1)
