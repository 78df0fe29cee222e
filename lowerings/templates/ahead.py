"""Statistics of rows ahead of the tiles that need them, in one kernel.

Tiles of a normalized matrix need a statistic of whole rows.  A pass for the statistics and a pass
for the tiles read the matrix twice from memory.  Here each program first reduces a few rows of a
stripe that lies AHEAD stripes further down, and then does a tile of its own stripe: its rows were
read shortly before, and come from the L2 cache.  The tile's elements are loaded first of all, so
that both loads are under way together.  Where it was measured to be faster, codes along K are made
of the rows, and tiles make those along M alone.

A statistic is stored as the bits of its number, in a buffer that was filled with -1, and a tile
reads it until it is something else; there is nothing else that the programs tell each other.  This
cannot hang, however few programs run at a time: a program waits for statistics of programs with
smaller numbers only, a GPU starts programs in the order of their numbers, and a program stores its
statistics before it waits.
"""

from __future__ import annotations

from typing import NamedTuple

from .inside import KEEP
from .row import STORE_NAMED, elements_text, fill, kept_text, quantized_text, steps_text
from .row import Variant as RowVariant

ORDER = """
    tiles_k = tl.cdiv(K, BLOCK_K)
    stripe = tl.program_id(0) // tiles_k
    tile_m = stripe - tl.minimum(AHEAD, tl.cdiv(M, REGISTERS * THREADS))
    tile_k = tl.program_id(0) % tiles_k
    number = tl.arange(0, REGISTERS * THREADS)
    early = (tile_m * REGISTERS * THREADS + (number % THREADS) * REGISTERS + number // THREADS)
    idx_early_m = tl.minimum(tl.maximum(early, 0), M - 1).to(INDEX_DTYPE)[:, None]
    idx_early_k = (tile_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
"""
READ = """    {{modification(subgraph_number=<number>, output_name="step<step>")
      | indent_except_first(1)}}
"""
ROWS = """    first = tile_k * ROWS_EACH
    if (first < REGISTERS * THREADS) & (stripe * REGISTERS * THREADS < <covered>):
        m = stripe * REGISTERS * THREADS + first + tl.arange(0, ROWS_EACH)[:, None]
        m_inside = m < M
        idx_m = tl.minimum(m, M - 1).to(INDEX_DTYPE)
"""
STORE = """    bits = tl.broadcast_to(step<step>, (ROWS_EACH, 1)).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -1, 0x7FC00000, bits)  # one NaN for another
    tl.atomic_xchg(STATISTICS + <place> * M + idx_m, bits, m_inside, sem="relaxed")
"""
# As many codes a thread as it loads elements: a wider store would move several rows around.
CODES_AT = "tl.max_contiguous(k<p>, (1, 16 if ROWS_EACH == 1 else 8))"
LEAVE = """    if tile_m < 0:
        return
"""
STEP = """    {{modification(subgraph_number=<number>, output_name="step<step>"<known>)
      | indent_except_first(1)}}
"""
ELEMENT = """    {{modification(subgraph_number=<number>, output_name="element"<known>)
      | indent_except_first(1)}}"""
# Each thread waits for the rows that it holds, by itself.  A load of fewer elements than threads
# would be spread as the tile is, many rows a thread: TIMES repeats rows until there are as many.
# A volatile load goes past L1, which may hold a line from before.
WHEN_THERE = """
@triton.jit
def ixt_when_there(pointers, TIMES: tl.constexpr):
    ROWS: tl.constexpr = pointers.shape[0]
    if TIMES > 1:
        pointers = tl.reshape(
            tl.broadcast_to(pointers.to(tl.int64)[None, :], (TIMES, ROWS)), (TIMES * ROWS,)
        ).to(tl.pointer_type(tl.int32))
    bits = tl.load(pointers, volatile=True)
    bits = tl.inline_asm_elementwise(
        "{ .reg .pred p; mov.b32 $0, $1; setp.ne.s32 p, $0, -1; @p bra THERE;"
        " AGAIN: ld.relaxed.gpu.global.b32 $0, [$2]; setp.eq.s32 p, $0, -1; @p bra AGAIN; THERE: }",
        "=&r,r,l", [bits, pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    if TIMES > 1:
        bits = tl.max(tl.reshape(bits, (TIMES, ROWS)), 0)
    return bits.to(tl.float32, bitcast=True)
"""


class Ahead(NamedTuple):
    """What goes in front of a tile's text.

    Attributes:
        rows: the steps before the elements, as the row template computes them; with a rule, the
            rows' codes and scales too.
        needed: the numbers of those steps that tiles read, in the order of STATISTICS.
        reads: how many buffers a tile reads element by element.
    """

    rows: RowVariant
    needed: tuple[int, ...]
    reads: int

    @property
    def kinds(self) -> list[str]:
        """The kinds of the steps."""
        return [kind for kind, _ in self.rows.steps]

    def names(self) -> list[str]:
        """Return the template's further arguments."""
        return ["STATISTICS", *["SCALES"] * (self.rows.rule is not None), *self.rows.names()]

    def order(self) -> str:
        """Return the text that says which tile a program does, and does the statistics."""
        text, count, quantized = ORDER, len(self.kinds), self.rows.rule is not None
        for read in range(self.reads):
            number = count + quantized * (1 + self.reads) + read
            text += fill(READ, number=number, step=count + read)
        inside = steps_text(self.rows)
        for place, step in enumerate(self.needed):
            inside += fill(STORE, step=step, place=place)
        if quantized:
            inside += elements_text(self.rows) + quantized_text(self.rows, STORE_NAMED, CODES_AT)
        inside += kept_text(self.rows)
        inside = "".join(f"    {line}" for line in inside.splitlines(keepends=True))
        # Swizzled scales have zeros for rows that are only there for the layout.
        covered = "tl.cdiv(M, 128) * 128" if self.rows.place == "swizzled" else "M"
        text += fill(ROWS, covered=covered)
        return text + inside.replace("indent_except_first(1)", "indent_except_first(2)")

    def functions(self) -> str:
        """Return the functions that the texts call."""
        return WHEN_THERE

    def element(self) -> str:
        """Return the text that computes ``element``, from what was read and the statistics."""
        count, quantized = len(self.kinds), self.rows.rule is not None
        known = {f"step{count + read}": f"step{count + read}" for read in range(self.reads)}
        for place, step in enumerate(self.needed):
            pointers = f"STATISTICS + {place} * M + tl.minimum(m, M - 1)"
            known[f"step{step}"] = f"ixt_when_there({pointers}, WAITERS)[:, None]"
        text, number = LEAVE, count + quantized * (1 + self.reads) + self.reads
        for step, kind in enumerate(self.kinds):
            if kind == KEEP:
                text += fill(STEP, number=number, step=step, known=_arguments(known))
                known[f"step{step}"] = f"step{step}"
                number += 1
        return text + fill(ELEMENT, number=number, known=_arguments(known))


def _arguments(known: dict[str, str]) -> str:
    return "".join(f', {name}="{value}"' for name, value in known.items())
