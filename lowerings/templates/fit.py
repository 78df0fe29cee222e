"""Where the tile template applies, and how it is cut: block sizes measured on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inductor_ext import config
from inductor_ext._compat import V, lowerings
from inductor_ext._neighbours import codes_are_fusible, comes_from_memory

from ..blocks import reshaped, round_up, swapped
from .formulas import Rule
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


def may_use_template(x: Any) -> bool:
    """Return whether templates are on and ``x`` is something that a GPU has yet to compute."""
    return config.templates and x.get_device().type == "cuda" and not comes_from_memory(x)


def codes_have_neighbours() -> bool:
    """Return whether the codes of the op that is being lowered go on in generated code.

    Nothing fuses behind a template: a plain lowering has that in its kernel.
    """
    return codes_are_fusible(V.graph.current_node)


def cut_for(x: Any, group: int, along_k: bool, along_m: bool, layout: str) -> Cut | None:
    """Return how the template would quantize ``x``, None where it cannot.

    Whole groups only, and M and K of which four codes make a word and a tile is never ragged
    along K.
    """
    if not may_use_template(x) or codes_have_neighbours() or len(x.get_size()) < 2:
        return None
    multiple = V.graph.sizevars.statically_known_multiple_of
    producer = Producer(x)
    if (
        producer.uses_positions()
        or producer.is_huge()
        or not multiple(producer.rows, group if along_m else 1)
        or not V.graph.sizevars.statically_known_gt(producer.rows, 0)
    ):
        return None
    for cut in _CUTS[group, along_k, along_m]:
        if multiple(producer.columns, max(cut.block_k, 128 if layout == "gemm" else 1)):
            return cut
    return None


def quantize_tiles(
    x: Any, rule: Rule, group: int, cut: Cut, *, along_k: bool, along_m: bool, layout: str
) -> tuple[Any, ...]:
    """Return (codes, scales) along K, then (codes, scales) along M transposed, those asked for."""
    producer = Producer(x)
    place = place_of(rule, layout)
    variant = Variant(rule, along_k, along_m, place)
    code = torch.float8_e5m2 if rule.e5m2 else torch.float8_e4m3fn
    kind = torch.uint8 if rule.kind == "mxfp8" else torch.float32
    rows, columns = producer.rows, producer.columns
    others: dict[str, Any] = {}
    if along_k:
        others["CODES_K"] = empty(x, (rows, columns), code)
        if along_m:
            others["SCALES_K"] = empty(x, stored_size(rows, columns // group, place), kind)
    if along_m:
        others["CODES_M"] = empty(x, (columns, rows), code)
    length, blocks = (columns, rows // group) if along_m else (rows, columns // group)
    last = run_template(
        template(variant),
        (stored_size(length, blocks, place), kind),
        [others[name] for name in variant.names()],
        [producer.subgraph()],
        producer.reads(),
        [covered_rows(rows, place), columns],
        GROUP=group, REGISTERS=cut.registers, THREADS=cut.threads, BLOCK_K=cut.block_k,
        WHOLE=is_whole(rows, cut, place), num_warps=cut.warps,
    )  # fmt: skip
    results: list[Any] = []
    if along_k:
        scales = others["SCALES_K"] if along_m else last
        results += as_given(others["CODES_K"], scales, x, columns // group, place)
    if along_m:
        results += [others["CODES_M"], _matrix(last, place)]
    return tuple(results)


def is_whole(rows: Any, cut: Cut, place: str) -> bool:
    """Return whether no program is known to have rows beyond the last."""
    block = max(cut.registers * cut.threads, 128 if place == "swizzled" else 1)
    return bool(V.graph.sizevars.statically_known_multiple_of(rows, block))


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
