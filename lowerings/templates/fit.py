"""Where the tile template applies, and how it is cut: block sizes measured on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inductor_ext import config
from inductor_ext._compat import V, lowerings, ops
from inductor_ext._neighbours import (
    amax_is_used,
    codes_are_fusible,
    comes_from_memory,
    reads_alone,
)

from ..blocks import ceil_div, divides, reshaped, round_up, swapped
from .fit_ahead import AlongK, elements_of, rows_make_codes, statistics_of
from .formulas import Rule
from .inside import handed_over
from .producer import Producer, run_template
from .tile import Variant, template


class Cut(NamedTuple):
    """A tile's cut: REGISTERS rows a thread, THREADS threads along M, BLOCK_K columns, warps."""

    registers: int
    threads: int
    block_k: int
    warps: int


# (group, along K, along M): the first whose columns divide K; docs/benchmarks/tiles-h200.txt
_CUTS = {
    (32, True, True): (Cut(8, 8, 128, 4), Cut(8, 16, 64, 4)),
    (32, False, True): (Cut(8, 16, 64, 4),),
    (32, True, False): (Cut(8, 8, 128, 4),),
    (64, True, True): (Cut(4, 16, 64, 4),),
    (64, False, True): (Cut(8, 16, 64, 4),),
    (64, True, False): (Cut(8, 8, 128, 4),),
    (128, True, True): (Cut(4, 32, 128, 8),),
    (128, False, True): (Cut(8, 16, 64, 4),),
    (128, True, False): (Cut(8, 8, 128, 4),),
}
_SQUARE = Cut(8, 16, 128, 8)
_STATIC = (Cut(4, 16, 128, 8), Cut(8, 16, 64, 4))
# Behind a norm, docs/benchmarks/ahead-h200.txt.  A weight of as many columns as threads would have
# its load decide how the tile is spread, for which Triton then moves everything.
_NORM = (Cut(8, 16, 64, 4),)
# Up to so many tiles leave processors of an H200 idle, and are cut finer.
PROCESSORS = 132
# Up to so many elements loops are faster than tiles of 128 rows, and than those behind a norm for a
# given scale.  SiLU*mul -> 1x128 both at 384 x 128 on an H200: 9.9 us, plain Inductor 4.1.
# RMSNorm -> static both at 128 x 192: 3.3 and 1.9, but 3.4 and by loops 7.5 at 3328 x 64.
TOO_SMALL = 1 << 17
# With amax behind a norm, whose rows are to be reduced some 3 million elements ahead.  128x128 at
# 14592 x 128: 23.2 and 9.2; MXFP8 both at 128 x 2240: 6.4 and 5.4, at 1536 x 3008 10.2 and 21.8.
TOO_SMALL_BEHIND_A_NORM = 1 << 21
# How many of its FP8 scales a thread makes at once, up to 8, with one branch for rare amax.
# SiLU*mul -> 1x128 both on an H200: 1 278.8 us, 2 263.5, 4 260.4, 8 263.6.
SCALES_AT_ONCE = 4


def finer(cut: Cut, group: int, along_m: bool) -> Cut:
    """Return a cut for a matrix of few tiles: fewer rows a tile, 16 elements a thread.

    SiLU*mul -> MXFP8 both: 730 instructions a thread where the usual cut takes 1881, for four
    times as many programs; to be measured.
    """
    rows = min(max(group, 32) if along_m else 16, cut.registers * cut.threads)
    warps = min(16, rows * cut.block_k // (32 * 16))
    return cut._replace(threads=rows // cut.registers, warps=warps)


def may_use_template(x: Any) -> bool:
    """Return whether templates are on and ``x`` is something that a GPU has yet to compute."""
    return config.templates and x.get_device().type == "cuda" and not comes_from_memory(x)


def codes_have_neighbours() -> bool:
    """Return whether the codes of the op that is being lowered go on in generated code.

    Nothing fuses behind a template: a plain lowering has that in its kernel.
    """
    return codes_are_fusible(V.graph.current_node)


def cut_for(
    x: Any,
    rule: Rule,
    group: int,
    along_k: bool,
    along_m: bool,
    layout: str,
    square: bool = False,
) -> Cut | None:
    """Return how the template would quantize ``x``, None where it cannot.

    Any M, and K of which a tile is never ragged.  Squares only behind a norm, the only place where
    the template was measured.
    """
    if not may_use_template(x) or codes_have_neighbours() or len(x.get_size()) < 2:
        return None
    producer = Producer(x)
    norm = bool(statistics_of(producer))
    if _is_small(producer, TOO_SMALL_BEHIND_A_NORM if norm else TOO_SMALL if group == 128 else 0):
        return None
    if square:
        if not norm or group != _SQUARE.block_k:
            return None
        # Scales have no padding then; see the layout's.
        padded = 4 * group if layout == "gemm" else 1
        if not divides(padded if along_m else 1, producer.rows):
            return None
        return _cut((_SQUARE,), producer, group, True, padded if along_k else 1)
    if norm and not along_m:
        return None  # rows have it
    whole = 128 if layout == "gemm" else group if along_k else 1
    cuts = _CUTS[group, along_k, along_m]
    if norm and (group <= _NORM[0].block_k or rows_make_codes(producer, rule) or not along_k):
        cuts = _NORM
    return _cut(cuts, producer, group, along_m, whole)


def _cut(
    cuts: Sequence[Cut], producer: Producer, group: int, along_m: bool, of_columns: int = 1
) -> Cut | None:
    """Return the first cut whose columns, and ``of_columns``, divide the matrix; finer if small."""
    if (
        producer.uses_positions()
        or producer.is_huge()
        or not V.graph.sizevars.statically_known_gt(producer.rows, 0)
    ):
        return None
    for cut in cuts:
        if divides(max(cut.block_k, of_columns), producer.columns):
            tile = cut.registers * cut.threads * cut.block_k
            few = _known_leq(producer.rows * producer.columns, PROCESSORS * tile)
            return finer(cut, group, along_m) if few else cut
    return None


def _is_small(producer: Producer, most: int) -> bool:
    """Return whether the matrix has at most so many elements, for which loops are to be taken."""
    return not config.always_lower and _known_leq(producer.rows * producer.columns, most)


def _known_leq(size: Any, most: int) -> bool:
    return bool(V.graph.sizevars.statically_known_leq(size, most))


def quantize_tiles(
    x: Any, rule: Rule, group: int, cut: Cut, *, along_k: bool, along_m: bool, layout: str,
    square: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Return (codes, scales) along K, then (codes, scales) along M transposed, those asked for."""
    producer = Producer(x)
    place = "plain" if square else place_of(rule, layout)
    rows, columns = producer.rows, producer.columns
    down, across = ceil_div(rows, group), columns // group
    size_k = stored_size(down if square else rows, across, place)
    size_m = stored_size(across if square else columns, down, place)
    others: dict[str, Any] = {}
    if along_k:
        others["CODES_K"] = empty(x, (rows, columns), rule.codes)
        if along_m:
            others["SCALES_K"] = empty(x, size_k, rule.scales)
    if along_m:
        others["CODES_M"] = empty(x, (columns, rows), rule.codes)
    # A thread has eight columns, so that many scales along M, and along K one for each of its rows.
    by_rows = along_k and along_m and not square and rows_make_codes(producer, rule)
    thread_rows = cut.registers * cut.threads * cut.block_k // (cut.warps * 32 * 8)
    pack = 1 if square or rule.kind != "fp8" else max(1, min(SCALES_AT_ONCE, thread_rows))
    variant = Variant(rule, along_k and not by_rows, along_m, place, square, pack)
    rows = AlongK(others["CODES_K"], others["SCALES_K"], rule, group, place) if by_rows else None
    main = (size_m if along_m else size_k, rule.scales)
    last = _run(x, producer, variant, main, others, cut, group, rows)
    results: list[Any] = []
    if along_k:
        scales = others["SCALES_K"] if along_m else last
        if square:
            results += [_shaped(others["CODES_K"], x.get_size()), scales]
        else:
            results += as_given(others["CODES_K"], scales, x, across, place)
    if along_m:
        results += [others["CODES_M"], _matrix(last, place)]
    return tuple(results)


def static_both(x: Any, scale: Any, dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Return the codes for a given scale, and their transpose; None where the template cannot.

    It takes no amax: where that is asked for, the plain lowering has it from the same pass.  Nor is
    it for a producer whose inputs others read, since loops do both in one kernel (dSwiGLU's two
    results).  SiLU*mul at 16384 x 8192: 202 us, by loops 215.
    """
    if not may_use_template(x) or codes_have_neighbours() or len(x.get_size()) < 2:
        return None
    if amax_is_used(V.graph.current_node):
        return None
    producer = Producer(x)
    norm = bool(statistics_of(producer))
    if not norm and not reads_alone(V.graph.current_node):
        return None
    if _is_small(producer, TOO_SMALL if norm else 0):
        return None
    cut = _cut(_NORM if norm else _STATIC, producer, 1, True)
    if cut is None:
        return None
    value, load_scale, ones = producer.load, scale.make_loader(), len(scale.get_size())
    producer.load = lambda index: ops.mul(value(index), load_scale([0] * ones))
    rule = Rule("static", dtype == torch.float8_e5m2)
    others = {"CODES_M": empty(x, (producer.columns, producer.rows), dtype)}
    main = ((producer.rows, producer.columns), dtype)
    codes = _run(x, producer, Variant(rule, True, True, "plain"), main, others, cut, 1)
    return _shaped(codes, x.get_size()), others["CODES_M"]


def _run(
    x: Any,
    producer: Producer,
    variant: Variant,
    main: tuple[Sequence[Any], torch.dtype],
    others: dict[str, Any],
    cut: Cut,
    group: int,
    along_k: AlongK | None = None,
) -> Any:
    """Put the template into the graph; return its last result, of the size and dtype ``main``."""
    block_m, threads = cut.registers * cut.threads, 32 * cut.warps
    elements = elements_of(x, producer, block_m, cut.block_k, threads, along_k)
    with handed_over(elements.steps) as filled:
        return run_template(
            template(variant, elements.ahead),
            main,
            [*(others[name] for name in variant.names()), *elements.filled, *filled],
            elements.subgraphs,
            elements.reads,
            [covered_rows(producer.rows, variant.place), producer.columns],
            GROUP=group, REGISTERS=cut.registers, THREADS=cut.threads, BLOCK_K=cut.block_k,
            WHOLE=is_whole(producer.rows, cut, variant.place), FOURS=divides(4, producer.rows),
            num_warps=cut.warps, **elements.meta,
        )  # fmt: skip


def is_whole(rows: Any, cut: Cut, place: str) -> bool:
    """Return whether no program is known to have rows beyond the last."""
    block = max(cut.registers * cut.threads, 128 if place == "swizzled" else 1)
    return divides(block, rows)


def place_of(rule: Rule, layout: str) -> str:
    """Return where scales go: one of the places of ``tile.PLACES``."""
    if layout == "plain":
        return "plain"
    return "swizzled" if rule.kind == "mxfp8" else "column-major"


def covered_rows(rows: Any, place: str) -> Any:
    """Return the rows that programs must cover: with the padding of swizzled scales."""
    return round_up(rows, 128) if place == "swizzled" else rows


def stored_size(length: Any, blocks: Any, place: str) -> list[Any]:
    """Return the size of a scales' buffer."""
    if place == "swizzled":
        return [round_up(length, 128), round_up(blocks, 4)]
    return [blocks, length] if place == "column-major" else [length, blocks]


def as_given(codes: Any, scales: Any, x: Any, blocks: Any, place: str) -> tuple[Any, Any]:
    """Return codes and scales along K, made as matrices, as the op gives them."""
    *leading, columns = x.get_size()
    scales = _shaped(scales, [*leading, blocks]) if place == "plain" else _matrix(scales, place)
    return _shaped(codes, [*leading, columns]), scales


def _matrix(scales: Any, place: str) -> Any:
    return swapped(scales) if place == "column-major" else scales


def _shaped(matrix: Any, size: Sequence[Any]) -> Any:
    return matrix if len(size) == 2 else reshaped(matrix, size)


def empty(x: Any, size: Sequence[Any], dtype: torch.dtype) -> Any:
    """Return a contiguous buffer of ``size`` on the device of ``x``, for a template to fill."""
    make = lowerings[torch.ops.aten.empty_strided.default]
    return make(list(size), None, dtype=dtype, device=x.get_device())
