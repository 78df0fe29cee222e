"""Where the tile template applies, and how it is cut: block sizes measured on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inductor_ext._compat import V, ir, lowerings
from inductor_ext._neighbours import comes_from_memory

from .formulas import Rule
from .producer import Producer, run_template
from .tile import Variant, template


class Cut(NamedTuple):
    """A tile's cut: REGISTERS rows a thread, THREADS threads along M, BLOCK_K columns, warps."""

    registers: int
    threads: int
    block_k: int
    warps: int


# docs/benchmarks/tiles-h200.txt
_CUTS = {
    # (group, along K, along M)
    (32, True, True): Cut(4, 16, 64, 4),
    (32, False, True): Cut(8, 16, 64, 4),
    (32, True, False): Cut(8, 4, 128, 2),
    (64, True, True): Cut(4, 16, 64, 4),
    (64, False, True): Cut(8, 16, 64, 4),
    (64, True, False): Cut(8, 4, 128, 2),
    (128, True, True): Cut(4, 32, 128, 8),
    (128, False, True): Cut(8, 16, 64, 4),
    (128, True, False): Cut(8, 4, 128, 2),
}


def applies(x: Any, group: int, along_k: bool, along_m: bool, layout: str) -> bool:
    """Return whether the template can quantize ``x``, something that a GPU has yet to compute.

    Whole groups only, and M and K of which four codes make a word and a tile is never ragged
    along K.  A tensor that is in memory already has no producer to fuse.
    """
    if x.get_device().type != "cuda" or comes_from_memory(x) or len(x.get_size()) < 2:
        return False
    cut = _CUTS[group, along_k, along_m]
    multiple = V.graph.sizevars.statically_known_multiple_of
    producer = Producer(x)
    wide = 128 if layout == "gemm" else cut.block_k
    return (
        multiple(producer.columns, max(wide, group))
        and multiple(producer.rows, group if along_m else 1)
        and V.graph.sizevars.statically_known_gt(producer.rows, 0)
        and V.graph.sizevars.statically_known_gt(2**31, producer.rows * producer.columns)
    )


def quantize_tiles(
    x: Any, rule: Rule, group: int, *, along_k: bool, along_m: bool, layout: str
) -> tuple[Any, ...]:
    """Return (codes, scales) along K, then (codes, scales) along M transposed, those asked for."""
    producer = Producer(x)
    place = "plain"
    if layout == "gemm":
        place = "swizzled" if rule.kind == "mxfp8" else "column-major"
    variant = Variant(rule, along_k, along_m, place)
    cut = _CUTS[group, along_k, along_m]
    code = torch.float8_e5m2 if rule.e5m2 else torch.float8_e4m3fn
    kind = torch.uint8 if rule.kind == "mxfp8" else torch.float32
    rows, columns = producer.rows, producer.columns
    others: dict[str, Any] = {}
    if along_k:
        others["CODES_K"] = _empty(x, (rows, columns), code)
        if along_m:
            others["SCALES_K"] = _empty(x, _stored(rows, columns // group, place), kind)
    if along_m:
        others["CODES_M"] = _empty(x, (columns, rows), code)
    length, blocks = (columns, rows // group) if along_m else (rows, columns // group)
    last = run_template(
        template(variant),
        (_stored(length, blocks, place), kind),
        [others[name] for name in variant.names()],
        [producer.subgraph()],
        producer.reads(),
        [_covered(rows, cut, place), columns],
        GROUP=group, REGISTERS=cut.registers, THREADS=cut.threads, BLOCK_K=cut.block_k,
        num_warps=cut.warps,
    )  # fmt: skip
    results = []
    if along_k:
        scales = others["SCALES_K"] if along_m else last
        plain = [*x.get_size()[:-1], columns // group]
        results += [_shaped(others["CODES_K"], x.get_size()), _as_given(scales, plain, place)]
    if along_m:
        results += [others["CODES_M"], _as_given(last, [columns, rows // group], place)]
    return tuple(results)


def _covered(rows: Any, cut: Cut, place: str) -> Any:
    """Return the rows that tiles must cover: with the padding of swizzled scales."""
    return -(-rows // 128) * 128 if place == "swizzled" else rows


def _stored(length: Any, blocks: Any, place: str) -> list[Any]:
    """Return the size of a scales' buffer."""
    if place == "swizzled":
        return [-(-length // 128) * 128, -(-blocks // 4) * 4]
    return [blocks, length] if place == "column-major" else [length, blocks]


def _as_given(scales: Any, plain: Sequence[Any], place: str) -> Any:
    """Return the buffer's scales as the op gives them: a transposed view, or with 3-D rows."""
    if place == "column-major":
        return ir.TensorBox(ir.PermuteView.create(scales.data, [1, 0]))
    return _shaped(scales, plain) if place == "plain" else scales


def _shaped(matrix: Any, size: Sequence[Any]) -> Any:
    view = lowerings[torch.ops.aten.view.default]
    return matrix if len(size) == 2 else view(matrix, list(size))


def _empty(x: Any, size: Sequence[Any], dtype: torch.dtype) -> Any:
    empty = lowerings[torch.ops.aten.empty_strided.default]
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= extent
    return empty(list(size), strides[::-1], dtype=dtype, device=x.get_device())
