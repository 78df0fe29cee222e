"""Quantize tiles of a matrix, along K, along M or both, from whatever produces its elements.

One program takes BLOCK_M x BLOCK_K elements.  Along M, a thread should hold several consecutive
rows of its columns: then most of a column's amax is found in registers, and four codes go to the
transposed result as one word.  Triton spreads the rows of a tile over threads first and registers
last, so the rows are numbered the other way round: row ``l`` of the tile is row
``l % THREADS * REGISTERS + l // THREADS`` of the matrix.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from inductor_ext._compat import TritonTemplate

from .formulas import FORMULAS, Rule, scale_text

HEAD = """
    tiles_k = tl.cdiv(K, BLOCK_K)
    tile_m = tl.program_id(0) // tiles_k
    tile_k = tl.program_id(0) % tiles_k
    BLOCK_M: tl.constexpr = REGISTERS * THREADS
    number = tl.arange(0, BLOCK_M)
    m = tile_m * BLOCK_M + (number % THREADS) * REGISTERS + number // THREADS
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = tl.full((BLOCK_M, 1), True, tl.int1) if WHOLE else (m < M)[:, None]
    idx_m = tl.minimum(m, M - 1).to(INDEX_DTYPE)[:, None]
    idx_k = k[None, :]
    {{modification(subgraph_number=0, output_name="element") | indent_except_first(1)}}
    x = tl.where(inside, tl.broadcast_to(element, (BLOCK_M, BLOCK_K)), 0.0)
"""
ALONG_K = """
    GROUPS_K: tl.constexpr = BLOCK_K // GROUP
    groups = tl.reshape(x, (BLOCK_M, GROUPS_K, GROUP))
    amax = ixt_amax(groups, 2)
    {scale}
    codes = tl.reshape(groups * multiplier[:, :, None], (BLOCK_M, BLOCK_K)).to({code})
    # Eight codes a thread, as many as it loads elements: a wider store would move the tile around.
    eight = tl.max_contiguous(k, 8)[None, :]
    tl.store(CODES_K + idx_m * K + eight, codes, inside)
    g = tile_k * GROUPS_K + tl.arange(0, GROUPS_K)
    row, column, rows, columns = m[:, None], g[None, :], M, tl.cdiv(K, GROUP)
    {store}
"""
ALONG_M = """
    GROUPS_M: tl.constexpr = BLOCK_M // GROUP
    GROUP_THREADS: tl.constexpr = GROUP // REGISTERS
    by_thread = tl.reshape(x, (REGISTERS, GROUPS_M, GROUP_THREADS, BLOCK_K))
    amax = ixt_amax(tl.max(tl.abs(by_thread), 0), 1)
    {scale}
    scaled = by_thread * multiplier[None, :, None, :]
    fours = tl.reshape(scaled, (REGISTERS // 4, 2, 2, THREADS, BLOCK_K))
    even, odd = tl.split(tl.permute(fours, (0, 3, 4, 1, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = ixt_pack4(first, second, third, fourth, {e5m2})
    words = tl.reshape(tl.permute(words, (2, 1, 0)), (BLOCK_K, BLOCK_M // 4))
    m4 = tile_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    target = CODES_M.to(tl.pointer_type(tl.int32))
    tl.store(target + k.to(INDEX_DTYPE)[:, None] * (M // 4) + m4[None, :], words,
             (m4 < M // 4)[None, :])
    scale = tl.trans(scale)
    g = tile_m * GROUPS_M + tl.arange(0, GROUPS_M)
    row, column, rows, columns = k[:, None], g[None, :], K, tl.cdiv(M, GROUP)
    {store}
"""
# Where the scale of (row, column) of a matrix (rows, columns) goes.
PLACES = {
    "plain": ("row", "column"),
    "column-major": ("column", "row"),
    "swizzled": ("flat // padded", "flat % padded"),
}
SWIZZLE = """padded = tl.cdiv(columns, 4) * 4
    flat = ((row // 128) * (padded // 4) + column // 4) * 512 + (row % 32) * 16
    flat += (row % 128) // 32 * 4 + column % 4
    rows, columns = tl.cdiv(rows, 128) * 128, padded
    """


class Variant(NamedTuple):
    """What a tile kernel is asked for: fixed when its source is made.

    Attributes:
        along_k, along_m: the orientations, at least one of them.
        place: of the scales: "plain", "column-major" or "swizzled".
    """

    rule: Rule
    along_k: bool
    along_m: bool
    place: str

    def names(self) -> list[str]:
        """Return the template's arguments: every result but the last scales."""
        names = []
        if self.along_k:
            names += ["CODES_K"] + ["SCALES_K"] * self.along_m
        return names + ["CODES_M"] * self.along_m


def _store(variant: Variant, last: bool) -> str:
    first, second = PLACES[variant.place]
    prepare = SWIZZLE if variant.place == "swizzled" else ""
    mask = "fits = tl.broadcast_to((row < rows) & (column < columns), scale.shape)\n    "
    value = f"scale = tl.broadcast_to(scale, fits.shape).to({variant.rule.scale_type})\n    "
    if last:
        place = (
            f"idx_0 = {first}\n    idx_1 = {second}\n    "
            '{{store_output(("idx_0", "idx_1"), "scale", "fits", indent_width=4, val_shape=SHAPE)}}'
        )
        shape = '("BLOCK_K", "GROUPS_M")' if variant.along_m else '("BLOCK_M", "GROUPS_K")'
        place = place.replace("SHAPE", shape)
    else:
        width = {"plain": "columns", "column-major": "rows", "swizzled": "padded"}[variant.place]
        place = f"tl.store(SCALES_K + ({first}) * {width} + ({second}), scale, fits)"
    return prepare + mask + value + place


@cache
def template(variant: Variant) -> Any:
    """Return the template of a variant."""
    rule = variant.rule
    words = {"scale": scale_text(rule), "code": rule.code_type, "e5m2": str(rule.e5m2)}
    names = ", ".join(f'"{name}"' for name in variant.names())
    source = "{{def_kernel(" + names + ")}}\n"
    if variant.along_k:
        source += '    M = {{size("CODES_K", 0)}}\n    K = {{size("CODES_K", 1)}}'
    else:
        source += '    M = {{size("CODES_M", 1)}}\n    K = {{size("CODES_M", 0)}}'
    source += HEAD
    if variant.along_k:
        source += _fill(ALONG_K, words | {"store": _store(variant, last=not variant.along_m)})
    if variant.along_m:
        source += _fill(ALONG_M, words | {"store": _store(variant, last=True)})
    ways = "k" * variant.along_k + "m" * variant.along_m
    name = f"ixt_tile_{rule.name}_{ways}_{variant.place.replace('-', '_')}_{len(_made)}"
    _made.append(variant)
    return TritonTemplate(name=name, grid=_grid, source=source + FORMULAS)


_made: list[Variant] = []


def _fill(text: str, words: dict[str, str]) -> str:
    for key, value in words.items():
        text = text.replace("{" + key + "}", value)
    return text


def _grid(rows: Any, columns: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    block_m = meta["REGISTERS"] * meta["THREADS"]
    return (-(-rows // block_m) * -(-columns // meta["BLOCK_K"]), 1, 1)
