"""Quantize whole rows along K, with the statistics of a norm taken from the same registers.

One program takes ROWS_EACH rows.  Triton's widths are powers of two: a row comes in pieces, 14336
as 8192 + 4096 + 2048, so that no thread works on what is not there.  What a row's statistics need
is computed element by element, reduced, and put into the code of the elements to quantize; the
loads are the same in all of it, so the row is read once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from inductor_ext._compat import TritonTemplate

from .formulas import Rule, codes_text, functions, scale_text
from .inside import KEEP, MEAN, MOMENT, ROW
from .tile import LINES, PLACES, SWIZZLE

HEAD = """
    M = {{size(<first>, 0)}}
    K: tl.constexpr = COLUMNS
    m = tl.program_id(0) * ROWS_EACH + tl.arange(0, ROWS_EACH)[:, None]
    m_inside = m < M
    idx_m = tl.minimum(m, M - 1).to(INDEX_DTYPE)
"""
PIECE = """    k<p> = (<offset> + tl.arange(0, <width>))[None, :]
    inside<p> = m_inside
"""
# Columns beyond the row read its start again: loads as wide as the others, and none from memory.
RAGGED_PIECE = """    column = <offset> + tl.arange(0, <width>)
    within<p> = (column < K)[None, :]
    inside<p> = within<p> & m_inside
    column = tl.where(column < K, column, column - K)
    k<p> = tl.max_contiguous(tl.multiple_of(column, ALIGNED), ALIGNED)[None, :]
"""
ELEMENT = """    idx_k = k<p>
    {{modification(subgraph_number=<n>, output_name="element"<known>)
      | indent_except_first(1)}}
    element<p> = tl.broadcast_to(element, (ROWS_EACH, <width>))
"""
READ = """    step<n>_<p> = element<p>
"""
KEEP_ELEMENT = """    step<n>_<p> = element<p>
    tl.store(KEPT_<n> + idx_m * K + k<p>, element<p>.to(KEPT_<n>.dtype.element_ty), inside<p>)
"""
KEPT_ELEMENT = """    step<n>_<p> = tl.load(KEPT_<n> + idx_m * K + k<p>).to(tl.float32)
"""
KEEP_ROW = """    tl.store(KEPT_<n> + idx_m, step<n>.to(KEPT_<n>.dtype.element_ty), m_inside)
"""
ROW_VALUE = """    idx_k = tl.zeros((1, 1), tl.int32)
    {{modification(subgraph_number=<n>, output_name="element"<known>)
      | indent_except_first(1)}}
    step<n> = tl.broadcast_to(element, (ROWS_EACH, 1))
"""
GROUPED = """    groups = tl.reshape(<element>, (ROWS_EACH, <width> // GROUP, GROUP))
    amax = ixt_amax(groups, 2)
"""
CODES = """    codes = tl.reshape(<codes>, (ROWS_EACH, <width>)).to(<type>)
    tl.store(CODES + idx_m * K + <columns>, codes, inside<p>)
"""
SCALES = """    row, rows, columns = m, M, <columns>
    column = (<first_group> + tl.arange(0, <groups>))[None, :]
    <place>
    fits<p> = tl.broadcast_to((row < rows) & (column < columns), scale.shape)
    scale<p> = tl.broadcast_to(tl.where(m_inside, scale, 0), fits<p>.shape).to(<type>)
    <store>
"""
STORE_LAST = """idx_first<p> = <first>
    idx_second<p> = <second>
    {{store_output(("idx_first<p>", "idx_second<p>"), "scale<p>", "fits<p>", indent_width=4,
                   val_shape=("ROWS_EACH", "<groups>"))}}"""
STORE_NAMED = "tl.store(SCALES + (<first>) * <line> + (<second>), scale<p>, fits<p>)"
AMAX = """    bits = amax.to(tl.int32, bitcast=True)
    idx_k = tl.zeros((1, 1), tl.int32)
    {{store_output(("idx_m", "idx_k"), "bits", "m_inside", indent_width=4,
                   val_shape=("ROWS_EACH", "1"))}}
"""
FEW = 1 << 20
"""So many elements are too few to fill an H200."""
PROCESSORS = 132


class Piece(NamedTuple):
    """A part of a row: ``width`` columns from ``offset``, some beyond the row if ``ragged``."""

    offset: int
    width: int
    ragged: bool


class Variant(NamedTuple):
    """What a row kernel is asked for: fixed when its source is made.

    Attributes:
        rule: None to give no codes, but the bits of each row's amax.
        group: how many neighbours share a scale; 0 for the whole row.
        steps: what is computed first, in the order of ``step0``, ``step1`` ...: its kind, and
            whether it is stored too.
        place: of the scales: "plain", "column-major" or "swizzled".
        reads: how many buffers are read before the steps, each in the element's place.
    """

    rule: Rule | None
    group: int
    steps: tuple[tuple[str, bool], ...]
    pieces: tuple[Piece, ...]
    place: str
    reads: int = 0

    def names(self) -> list[str]:
        """Return the template's arguments: every result but the last."""
        kept = [f"KEPT_{number}" for number, (_, stored) in enumerate(self.steps) if stored]
        return ["CODES"] * (self.rule is not None) + kept


def pieces_of(columns: int) -> tuple[Piece, ...]:
    """Return the parts of a row, none shorter than an eighth of it or 512."""
    least = max(512, _power_of_two(columns) // 8)
    found: list[Piece] = []
    at = 0
    while at < columns:
        left = columns - at
        width = 1 << (left.bit_length() - 1)
        if width < left and width <= least:
            width *= 2
        if found:
            width = max(width, least)
        found.append(Piece(at, width, width > left))
        at += width
    return tuple(found)


def cut(rows: int, columns: int, *, statistics: bool) -> tuple[int, int]:
    """Return the rows of a program and its warps, as measured on an H200.

    64 to 127 elements a thread, half of it where there is no statistic to wait for.  And 16
    neighbours a thread in every piece, as many codes as one store takes: with fewer in one piece
    Triton moves the others through shared memory.

    A matrix that leaves processors idle is cut finer: 4 to 16 elements a thread.
    """
    together = max(1, 1024 // _power_of_two(columns))
    if rows * columns <= FEW:
        if rows > PROCESSORS and together > 1:
            return together, 4
        return 1, _warps(columns // (512 if statistics else 128), 8)
    least = min(piece.width for piece in pieces_of(columns))
    warps = _warps(columns // (2048 if statistics else 1024), 1 << 5)
    return together, min(max(1, least // 512), warps)


def _warps(number: int, most: int) -> int:
    """Return the largest power of two that is at most ``number``, between 1 and ``most``."""
    return min(most, 1 << max(0, number.bit_length() - 1))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


@cache
def template(variant: Variant) -> Any:
    """Return the template of a variant."""
    names = ", ".join(f'"{name}"' for name in variant.names())
    first = "None" if variant.rule is None else '"CODES"'
    source = "{{def_kernel(" + names + ")}}" + HEAD.replace("<first>", first)
    source += steps_text(variant) + elements_text(variant)
    if variant.rule is None:
        source += row_amax_text(variant) + AMAX
    else:
        source += quantized_text(variant, STORE_LAST)
    source += kept_text(variant)  # last: a store in between would have the row loaded again
    name = f"ixt_row_{variant.rule.name if variant.rule else 'amax'}_{len(_made)}"
    _made.append(variant)
    return TritonTemplate(name=name, grid=_grid, source=source + functions(variant.rule))


_made: list[Variant] = []


def steps_text(variant: Variant, *, kept: bool = False) -> str:
    """Return the text that computes the steps of rows ``m``, from ``idx_m`` and ``m_inside``.

    Args:
        kept: whether what is kept of elements has been stored already, and is to be read.
    """
    text = ""
    for p, piece in enumerate(variant.pieces):
        text += fill(RAGGED_PIECE if piece.ragged else PIECE, p=p, **piece._asdict())
    for read in range(len(variant.steps), len(variant.steps) + variant.reads):
        for p, piece in enumerate(variant.pieces):
            text += fill(ELEMENT, n=read + 1, p=p, known="", width=piece.width)
            text += fill(READ, n=read, p=p)
    return text + "".join(_step(variant, number, kept) for number in range(len(variant.steps)))


def elements_text(variant: Variant) -> str:
    """Return the text that computes the elements to quantize, the subgraph after the steps'."""
    count = range(len(variant.pieces))
    return "".join(_element(variant, len(variant.steps), p) for p in count)


def quantized_text(variant: Variant, store: str, columns: str = "k<p>") -> str:
    """Return the text from the elements to stored codes and scales.

    Args:
        store: the line that stores the scales of a piece.
        columns: those of a piece's codes.
    """
    assert variant.rule is not None
    scale = f"    {scale_text(variant.rule)}\n"
    if not variant.group:
        text = row_amax_text(variant) + scale + codes_of_whole_rows(variant, columns)
        return text + _scales(variant, 0, 0, 1, store)
    text = ""
    for p, piece in enumerate(variant.pieces):
        text += fill(GROUPED, element=_inside(variant, p), width=piece.width) + scale
        text += _codes(variant, p, "groups", "[:, :, None]", columns)
        first, groups = piece.offset // variant.group, piece.width // variant.group
        text += _scales(variant, p, first, groups, store)
    return text


def codes_of_whole_rows(variant: Variant, columns: str = "k<p>") -> str:
    """Return the text that stores the codes of all elements by one scale."""
    count = range(len(variant.pieces))
    return "".join(_codes(variant, p, f"element{p}", "", columns) for p in count)


def row_amax_text(variant: Variant) -> str:
    """Return the text that computes each row's ``amax``."""
    parts = [_inside(variant, p) for p in range(len(variant.pieces))]
    if len(parts) > 1:
        parts = _folded(variant, [f"tl.abs({part})" for part in parts], "tl.max")
    text = f"    amax = {parts[0]}\n"
    for part in parts[1:]:
        text += f"    amax = tl.maximum(amax, {part})\n"
    return text + "    amax = ixt_amax(amax, 1)[:, None]\n"


def kept_text(variant: Variant) -> str:
    """Return the text that stores what is kept of rows."""
    return "".join(
        fill(KEEP_ROW, n=number)
        for number, (kind, stored) in enumerate(variant.steps)
        if stored and kind != KEEP
    )


def _step(variant: Variant, number: int, kept: bool) -> str:
    """Return the text that computes a step; what is kept of elements it stores too."""
    kind, _ = variant.steps[number]
    count = range(len(variant.pieces))
    if kind == ROW:
        text = fill(ROW_VALUE, n=number, known=_known(variant, number, 0))
    elif kind == KEEP and kept:
        return "".join(fill(KEPT_ELEMENT, n=number, p=p) for p in count)
    elif kind == KEEP:
        return "".join(
            _element(variant, number, p) + fill(KEEP_ELEMENT, n=number, p=p) for p in count
        )
    else:
        text = "".join(_element(variant, number, p) for p in count)
        total = _total(variant, [_inside(variant, p) for p in count])
        if kind == MOMENT:
            text += f"    center = {total} / K\n"
            for p in count:
                text += f"    element{p} = element{p} - center\n"
                text += f"    apart{p} = {_inside(variant, p)}\n"
            total = _total(variant, [f"apart{p} * apart{p}" for p in count])
        text += f"    step{number} = {total}{' / K' if kind == MEAN else ''}\n"
    return text


def _total(variant: Variant, parts: list[str]) -> str:
    """Return the sum of a row: pieces first folded onto each other, so that threads meet once."""
    if len(parts) == 1:
        return f"tl.sum({parts[0]}, 1)[:, None]"
    return f"tl.sum({' + '.join(_folded(variant, parts, 'tl.sum'))}, 1)[:, None]"


def _folded(variant: Variant, parts: list[str], reduce: str) -> list[str]:
    """Return the parts reduced to the width of the least."""
    least = min(piece.width for piece in variant.pieces)
    shapes = [f"(ROWS_EACH, {piece.width // least}, {least})" for piece in variant.pieces]
    return [
        f"{reduce}(tl.reshape({part}, {shape}), 1)"
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _codes(variant: Variant, p: int, values: str, each: str, columns: str) -> str:
    assert variant.rule is not None
    codes, type_ = codes_text(variant.rule, values, each), variant.rule.code_type
    width = variant.pieces[p].width
    return fill(CODES, codes=codes, type=type_, columns=columns, p=p, width=width)


def _scales(variant: Variant, p: int, first_group: int, groups: int, store: str) -> str:
    assert variant.rule is not None
    first, second = PLACES[variant.place]
    return fill(
        SCALES.replace("<store>", store),
        columns="tl.cdiv(K, GROUP)" if variant.group else "1",
        first_group=first_group,
        groups=groups,
        place=SWIZZLE if variant.place == "swizzled" else "",
        type=variant.rule.scale_type,
        p=p,
        first=first,
        second=second,
        line=LINES[variant.place],
    )


def _element(variant: Variant, number: int, p: int) -> str:
    known, width = _known(variant, number, p), variant.pieces[p].width
    return fill(ELEMENT, n=number, p=p, known=known, width=width)


def _inside(variant: Variant, p: int) -> str:
    """Return the elements of a piece, 0 beyond the row."""
    ragged = variant.pieces[p].ragged
    return f"tl.where(within{p}, element{p}, 0.0)" if ragged else f"element{p}"


def _known(variant: Variant, number: int, p: int) -> str:
    """Return what a subgraph may use of the steps before it, for the elements of a piece."""
    kinds = [kind for kind, _ in variant.steps]
    known = {n: f"step{n}_{p}" if kinds[n] == KEEP else f"step{n}" for n in range(number)}
    known |= {n: f"step{n}_{p}" for n in range(len(kinds), len(kinds) + variant.reads)}
    return "".join(f', step{n}="{value}"' for n, value in known.items())


def fill(text: str, **words: Any) -> str:
    """Return a template's text with each ``<word>`` replaced."""
    for word, value in words.items():
        text = text.replace(f"<{word}>", str(value))
    return text


def _grid(rows: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    return (-(-rows // meta["ROWS_EACH"]), 1, 1)
