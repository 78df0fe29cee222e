"""Quantize tiles of a matrix, along K, along M or both, from whatever produces its elements.

One program takes BLOCK_M x BLOCK_K elements.  Along M, a thread should hold several consecutive
rows of its columns: then most of a column's amax is found in registers, and four codes go to the
transposed result as one word.  Triton spreads the rows of a tile over threads first and registers
last, so the rows are numbered the other way round: row ``l`` of the tile is row
``l % THREADS * REGISTERS + l // THREADS`` of the matrix.

Rows beyond the last repeat it.  That leaves the amax of a ragged group what it is of its real
elements, without a mask on what is computed: only stores have one.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from inductor_ext._compat import TritonTemplate

from .formulas import Rule, functions, scale_text

ORDER = """
    tiles_k = tl.cdiv(K, BLOCK_K)
    tile_m = tl.program_id(0) // tiles_k
    tile_k = tl.program_id(0) % tiles_k
"""
ELEMENT = """
    {{modification(subgraph_number=0, output_name="element") | indent_except_first(1)}}
"""
HEAD = """
    BLOCK_M: tl.constexpr = REGISTERS * THREADS
    number = tl.arange(0, BLOCK_M)
    m = tile_m * BLOCK_M + (number % THREADS) * REGISTERS + number // THREADS
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = tl.full((BLOCK_M, 1), True, tl.int1) if WHOLE else (m < M)[:, None]
    idx_m = tl.minimum(m, M - 1).to(INDEX_DTYPE)[:, None]
    idx_k = k[None, :]
{element}
    x = tl.broadcast_to(element, (BLOCK_M, BLOCK_K))
"""
ALONG_K = """
    GROUPS_K: tl.constexpr = BLOCK_K // GROUP
    groups = tl.reshape(x, (BLOCK_M, GROUPS_K, GROUP))
    amax = ixt_amax(groups, 2)
    {scale}
    codes = tl.reshape(groups * multiplier[:, :, None], (BLOCK_M, BLOCK_K)).to({code})
"""
ALONG_M = """
    GROUPS_M: tl.constexpr = BLOCK_M // GROUP
    GROUP_THREADS: tl.constexpr = GROUP // REGISTERS
    by_thread = tl.reshape(x, (REGISTERS, GROUPS_M, GROUP_THREADS, BLOCK_K))
    amax = ixt_amax(tl.max(tl.abs(by_thread), 0), 1)
    {scale}
    scaled = by_thread * multiplier[None, :, None, :]
"""
SQUARES = """
    GROUPS_K: tl.constexpr = BLOCK_K // GROUP
    GROUPS_M: tl.constexpr = BLOCK_M // GROUP
    GROUP_THREADS: tl.constexpr = GROUP // REGISTERS
    squares = tl.reshape(x, (REGISTERS, GROUPS_M, GROUP_THREADS, GROUPS_K, GROUP))
    amax = ixt_amax(tl.max(tl.max(tl.abs(squares), 0), 3), 1)
    {scale}
    scaled = squares * multiplier[None, :, None, :, None]
    codes = tl.reshape(scaled, (BLOCK_M, BLOCK_K)).to({code})
"""
# The scale is the producer's: what is left is to cast.
CAST = """
    scaled = x
    codes = x.to({code})
"""
# Eight codes a thread, as many as it loads elements: a wider store would move the tile around.
STORE_K = """    eight = tl.max_contiguous(k, 8)[None, :]
    tl.store(CODES_K + idx_m * K + eight, codes, inside)
"""
LAST_CODES = """    idx_eight = tl.max_contiguous(k, 8)[None, :]
    {{store_output(("idx_m", "idx_eight"), "codes", "inside", indent_width=4,
                   val_shape=("BLOCK_M", "BLOCK_K"))}}
"""
STORE_M = """
    fours = tl.reshape(scaled, (REGISTERS // 4, 2, 2, THREADS, BLOCK_K))
    even, odd = tl.split(tl.permute(fours, (0, 3, 4, 1, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = ixt_pack4(first, second, third, fourth, {e5m2})
    words = tl.reshape(tl.permute(words, (2, 1, 0)), (BLOCK_K, BLOCK_M // 4))
    column = k.to(INDEX_DTYPE)[:, None]
    m4 = tile_m * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)[None, :]
    if FOURS or M % 4 == 0:
        line = CODES_M.to(tl.pointer_type(tl.int32)) + column * (M // 4)
        tl.store(line + m4, words, m4 < M // 4)
    else:  # rows of the result begin within words
        for byte in tl.static_range(4):
            m1 = m4 * 4 + byte
            code = (words >> byte * 8).to(tl.int8)
            tl.store(CODES_M.to(tl.pointer_type(tl.int8)) + column * M + m1, code, m1 < M)
"""
SCALES_K = """    g = tile_k * GROUPS_K + tl.arange(0, GROUPS_K)
    row, column, rows, columns = m[:, None], g[None, :], M, tl.cdiv(K, GROUP)
    {store}
"""
SCALES_M = """    scale = tl.trans(scale)
    g = tile_m * GROUPS_M + tl.arange(0, GROUPS_M)
    row, column, rows, columns = k[:, None], g[None, :], K, tl.cdiv(M, GROUP)
    {store}
"""
SCALES_OF_SQUARES = """    row = tile_m * GROUPS_M + tl.arange(0, GROUPS_M)[:, None]
    column = tile_k * GROUPS_K + tl.arange(0, GROUPS_K)[None, :]
    rows, columns = tl.cdiv(M, GROUP), tl.cdiv(K, GROUP)
    {store}
"""
SCALES_OF_SQUARES_M = """    scale = tl.trans(scale)
    row = tile_k * GROUPS_K + tl.arange(0, GROUPS_K)[:, None]
    column = tile_m * GROUPS_M + tl.arange(0, GROUPS_M)[None, :]
    rows, columns = tl.cdiv(K, GROUP), tl.cdiv(M, GROUP)
    {store}
"""
# Where the scale of (row, column) of a matrix (rows, columns) goes.
PLACES = {
    "plain": ("row", "column"),
    "column-major": ("column", "row"),
    "swizzled": ("flat // padded", "flat % padded"),
}
# How many scales lie between two of its lines.
LINES = {"plain": "columns", "column-major": "rows", "swizzled": "padded"}
# Rows and columns that are only there for the layout have zeros.
PADDING = """if not WHOLE:
        real = (row < rows) & (column < columns)
        scale = tl.where(real, tl.broadcast_to(scale, real.shape), 0)
    """
SWIZZLE = """padded = tl.cdiv(columns, 4) * 4
    flat = ((row // 128) * (padded // 4) + column // 4) * 512 + (row % 32) * 16
    flat += (row % 128) // 32 * 4 + column % 4
    rows, columns = tl.cdiv(rows, 128) * 128, padded
    """


class Variant(NamedTuple):
    """What a tile kernel is asked for: fixed when its source is made.

    Attributes:
        rule: of kind "static" where the producer has multiplied by the scale.
        along_k, along_m: the orientations, at least one of them; both where static.
        place: of the scales: "plain", "column-major" or "swizzled"; of squares always "plain".
        square: whether a scale is for GROUP x GROUP elements.
        pack: how many FP8 scales a thread makes at once.
    """

    rule: Rule
    along_k: bool
    along_m: bool
    place: str
    square: bool = False
    pack: int = 1

    def names(self) -> list[str]:
        """Return the template's arguments: every result but the last."""
        if self.rule.kind == "static":
            return ["CODES_M"]
        names = []
        if self.along_k:
            names += ["CODES_K"] + ["SCALES_K"] * self.along_m
        return names + ["CODES_M"] * self.along_m


def _parts(variant: Variant) -> str:
    """Return the text from ``x`` to the stored results."""
    to_last = {"store": _store(variant, last=True)}
    if variant.rule.kind == "static":
        return CAST + STORE_M + LAST_CODES
    last_k = _fill(SCALES_OF_SQUARES if variant.square else SCALES_K, to_last)
    if variant.along_m:
        last_k = last_k.replace(to_last["store"], _store(variant, last=False))
    text = SQUARES if variant.square else ALONG_K * variant.along_k
    if variant.along_k:
        text += STORE_K + last_k
    if variant.along_m:
        text += ("" if variant.square else ALONG_M) + STORE_M
        text += _fill(SCALES_OF_SQUARES_M if variant.square else SCALES_M, to_last)
    return text


def _store(variant: Variant, last: bool) -> str:
    first, second = PLACES[variant.place]
    prepare = PADDING + SWIZZLE if variant.place == "swizzled" else ""
    mask = "fits = tl.broadcast_to((row < rows) & (column < columns), scale.shape)\n    "
    value = f"scale = tl.broadcast_to(scale, fits.shape).to({variant.rule.scale_type})\n    "
    if last:
        place = (
            f"idx_0 = {first}\n    idx_1 = {second}\n    "
            '{{store_output(("idx_0", "idx_1"), "scale", "fits", indent_width=4, val_shape=SHAPE)}}'
        )
        sides = ["GROUPS_M" if variant.square else "BLOCK_M", "GROUPS_K"]
        if variant.along_m:
            sides = ["GROUPS_K" if variant.square else "BLOCK_K", "GROUPS_M"]
        place = place.replace("SHAPE", f'("{sides[0]}", "{sides[1]}")')
    else:
        line = LINES[variant.place]
        place = f"tl.store(SCALES_K + ({first}) * {line} + ({second}), scale, fits)"
    return prepare + mask + value + place


@cache
def template(variant: Variant, ahead: Any = None) -> Any:
    """Return the template of a variant.

    Args:
        ahead: an ``ahead.Ahead``, where statistics of rows are to be computed on the way.
    """
    rule = variant.rule
    words = {"scale": scale_text(rule), "code": rule.code_type, "e5m2": str(rule.e5m2)}
    names = ", ".join(f'"{name}"' for name in [*variant.names(), *(ahead.names() if ahead else [])])
    source = "{{def_kernel(" + names + ")}}\n"
    if "CODES_K" in variant.names():
        source += '    M = {{size("CODES_K", 0)}}\n    K = {{size("CODES_K", 1)}}'
    else:
        source += '    M = {{size("CODES_M", 1)}}\n    K = {{size("CODES_M", 0)}}'
    source += ahead.order() if ahead else ORDER
    source += _fill(HEAD, {"element": ahead.element() if ahead else ELEMENT})
    source += _fill(_parts(variant), words)
    ways = "k" * variant.along_k + "m" * variant.along_m + "_squares" * variant.square
    name = f"ixt_tile_{rule.name}_{ways}_{variant.place.replace('-', '_')}_{len(_made)}"
    _made.append(variant)
    source += functions(rule, variant.pack) + (ahead.functions() if ahead else "")
    return TritonTemplate(name=name, grid=_grid, source=source)


_made: list[Variant] = []


def _fill(text: str, words: dict[str, str]) -> str:
    for key, value in words.items():
        text = text.replace("{" + key + "}", value)
    return text


def _grid(rows: Any, columns: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    stripes = -(-rows // (meta["REGISTERS"] * meta["THREADS"]))
    ahead = min(meta["AHEAD"], stripes)  # in stripes too; see ahead.py
    return ((stripes + ahead) * -(-columns // meta["BLOCK_K"]), 1, 1)
