"""Quantize with one scale for the whole tensor, which its own amax gives, in one kernel.

Programs come in two halves.  Each of the first takes the amax of its rows, each of the second waits
for the amax of all and makes the codes of its rows.  Rows are computed twice, as two kernels would,
but sums that are to be kept are stored by the first half and read by the second.  The second goes
backwards: what the first has read last may still be in the L2 cache.

Between the halves come a few programs more: WAYS that take the maximum of what the first half
found, each of its share, and WAYS that each take the maximum of those, and store it in a line of
its own.  A place in memory is asked for by one program after the other, so none may be asked by
all: with one atomic maximum, or one line that everybody reads, 16384 programs took 15 and 800 us
longer.

An amax is stored as the bits of its number, in a buffer that was filled with -1, and is there when
it is something else.  As in ahead.py this cannot hang: a GPU starts programs in the order of their
numbers, and they wait for smaller ones alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from inductor_ext._compat import TritonTemplate

from .formulas import functions, scale_text
from .inside import KEEP
from .row import (
    Variant,
    codes_of_whole_rows,
    elements_text,
    fill,
    kept_text,
    row_amax_text,
    steps_text,
)

WAYS = 32
LINE = 32
"""Numbers of 32 bits in 128 bytes, what a cache moves at once."""
HEAD = """
    M = {{size("CODES", 0)}}
    K: tl.constexpr = COLUMNS
    programs = tl.cdiv(M, ROWS_EACH)
    number = tl.program_id(0)
    late = number - programs - 2 * <ways>
    m = tl.where(late < 0, number, programs - 1 - late)
    m = m * ROWS_EACH + tl.arange(0, ROWS_EACH)[:, None]
    m_inside = m < M
    idx_m = tl.minimum(m, M - 1).to(INDEX_DTYPE)
    if number < programs:
"""
GIVE = """    bits = tl.max(amax.to(tl.int32, bitcast=True))
    tl.atomic_xchg(BITS + number, bits, sem="<publish>")
    return
"""
# The barrier has the one thread that stores the amax publish what all have stored.
BARRIER = """    tl.debug_barrier()
"""
BETWEEN = """    maxima = BITS + programs
    if late < -<ways>:
        bits = tl.zeros((128,), tl.int32)
        for first in range((number - programs) * 128, programs, <ways> * 128):
            one = tl.minimum(first + tl.arange(0, 128), programs - 1)
            bits = tl.maximum(bits, ixt_bits_when_there(BITS + one))
        tl.atomic_xchg(maxima + number - programs, tl.max(bits), sem="<publish>")
        return
    if late < 0:
        bits = ixt_bits_when_there(maxima + tl.arange(0, <ways>))
        own = maxima + <ways> + (late + <ways>) * <line>
        tl.atomic_xchg(own, tl.max(bits), sem="<publish>")
        return
"""
# One program more than the halves have, which has the scale of a tensor of no rows too.
LAST = """    if late == programs:
        bits = ixt_bits_when_there(maxima + <ways>)
        amax = tl.full((1, 1), bits, tl.int32).to(tl.float32, bitcast=True)
        <scale>
        idx_r = tl.zeros((1, 1), tl.int32)
        idx_c = tl.zeros((1, 1), tl.int32)
        here = tl.full((1, 1), True, tl.int1)
        {{store_output(("idx_r", "idx_c"), "scale", "here", indent_width=8, val_shape=("1", "1"))}}
        return
"""
SCALE = """    bits = ixt_bits_when_there(maxima + <ways> + late % <ways> * <line>)
    amax = tl.full((1, 1), bits, tl.int32).to(tl.float32, bitcast=True)
    <scale>
"""
WAIT = """
@triton.jit
def ixt_bits_when_there(pointers):
    bits = tl.load(pointers, volatile=True)
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; mov.b32 $0, $1; setp.ne.s32 p, $0, -1; <unless> @p bra THERE;"
        " AGAIN: ld.<see>.gpu.global.b32 $0, [$2]; setp.eq.s32 p, $0, -1; @p bra AGAIN; THERE: }",
        "=&r,r,l", [bits, pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
"""
RELAXED = {"publish": "relaxed", "see": "relaxed", "unless": ""}
# What others stored before their numbers is to be seen too.
ORDERED = {"publish": "release", "see": "acquire", "unless": "bra AGAIN;"}


@cache
def template(variant: Variant) -> Any:
    """Return the template of a variant, without groups: one scale for all."""
    assert variant.rule is not None
    names = ", ".join(f'"{name}"' for name in ["BITS", *variant.names()])
    keeps = any(kind == KEEP for kind, _ in variant.steps)
    words = {**(ORDERED if keeps else RELAXED), "ways": WAYS, "line": LINE}
    first = steps_text(variant) + elements_text(variant) + row_amax_text(variant)
    first += kept_text(variant) + BARRIER * keeps + GIVE
    first = "".join(f"    {line}" for line in first.splitlines(keepends=True))
    first = first.replace("indent_except_first(1)", "indent_except_first(2)")
    scale = scale_text(variant.rule)
    source = "{{def_kernel(" + names + ")}}" + HEAD + first + BETWEEN
    source += fill(LAST, scale=scale.replace("\n", "\n    "))
    rows, scale = steps_text(variant, kept=True) + elements_text(variant), fill(SCALE, scale=scale)
    # Rows are on their way while the scale is waited for, unless they were stored on the way to it.
    source += (scale + rows if keeps else rows + scale) + codes_of_whole_rows(variant)
    name = f"ixt_tensor_{variant.rule.name}_{len(_made)}"
    _made.append(variant)
    source += functions(variant.rule) + WAIT
    return TritonTemplate(name=name, grid=_grid, source=fill(source, **words))


_made: list[Variant] = []


def _grid(rows: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    return (2 * -(-rows // meta["ROWS_EACH"]) + 2 * WAYS + 1, 1, 1)
