"""What a tile's elements are computed from; with statistics of their rows, what goes ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inductor_ext._compat import V, ops

from ..vocabulary import F32, Expression, pointwise, stored
from .ahead import Ahead
from .formulas import Rule
from .inside import KEEP, STATISTICS, Step, steps_of, substitute
from .producer import EARLY, Producer, buffers_read, reads_of
from .row import Variant, pieces_of

MAX_WIDTH = 16384
ROWS_WIDTH = 8192
"""The longest row whose codes are made beside a tile."""
# Elements between statistics and tiles: enough that nobody waits, few enough for the L2 cache.
DISTANCE = 384 * 8192


class AlongK(NamedTuple):
    """What is to be made of whole rows on the way: the buffers of codes and scales, and how."""

    codes: Any
    scales: Any
    rule: Rule
    group: int
    place: str


class Elements(NamedTuple):
    """Where a tile's elements come from.

    Attributes:
        ahead: what the template does before its tile, if anything.
        filled: further arguments of the template, before the buffers of ``steps``.
        steps: what it computes itself.
        subgraphs, reads, meta: as ``run_template`` takes them.
    """

    ahead: Ahead | None
    filled: list[Any]
    steps: list[Step]
    subgraphs: list[Any]
    reads: list[Any]
    meta: dict[str, int]


def elements_of(
    x: Any,
    producer: Producer,
    block_m: int,
    block_k: int,
    threads: int,
    along_k: AlongK | None = None,
) -> Elements:
    """Return how a tile of (block_m, block_k) gets its elements.

    Args:
        threads: of a program.
        along_k: what the rows give too, behind a norm.
    """
    steps = statistics_of(producer)
    if not steps:
        return Elements(None, [], [], [producer.subgraph()], producer.reads(), {"AHEAD": 0})
    names = [step.name for step in steps]
    kept = [step.element for step in steps if step.kind == KEEP]
    early = _read_in_place(producer, steps)
    loads = [_load(producer, name) for name in early]
    # What rows make codes of is read once, before a store in between.
    once = [*names, *early] if along_k else names
    subgraphs = [producer.subgraph(substitute(step.element, once)) for step in steps]
    if along_k:
        subgraphs.append(producer.subgraph(substitute(producer.load, once)))
        subgraphs += [producer.subgraph(load) for load in loads]
    subgraphs += [producer.subgraph(load, EARLY) for load in loads]
    in_tile = [substitute(load, [*names, *early]) for load in (*kept, producer.load)]
    subgraphs += [producer.subgraph(load) for load in in_tile]
    used = {read.what.name for load in (*kept, producer.load) for read in _reads(producer, load)}
    needed = [i for i, step in enumerate(steps) if step.kind != KEEP and step.name in used]
    found: dict[str, Any] = {}
    for load in (*(step.element for step in steps), producer.load):
        found |= {b.get_name(): b for b in buffers_read(load, producer.rows, producer.columns)}
    reads = [buffer for name, buffer in sorted(found.items()) if name not in names]
    kinds = tuple((step.kind, step.stored) for step in steps)
    k = int(producer.columns)
    rows = Variant(None, 0, kinds, pieces_of(k), "plain")
    filled = []
    if along_k:
        rule, group, place = along_k.rule, along_k.group, along_k.place
        rows = rows._replace(rule=rule, group=group, place=place, reads=len(early))
        filled = [along_k.scales, along_k.codes]
    each = -(-block_m * block_k // k)  # so that a stripe's programs reduce a stripe's rows
    meta = {
        "AHEAD": -(-DISTANCE // (block_m * k)),
        "ROWS_EACH": 1 << (each - 1).bit_length(),
        "WAITERS": max(1, threads // block_m),
        "ALIGNED": math.gcd(k, 16),
    }
    empty = pointwise(
        x, torch.int32, [len(needed), producer.rows], lambda _: ops.constant(-1, torch.int32)
    )
    ahead = Ahead(rows, tuple(needed), len(early))
    return Elements(ahead, [stored(empty), *filled], steps, subgraphs, reads, meta)


def rows_make_codes(producer: Producer, rule: Rule) -> bool:
    """Return whether codes along K are better made of the rows that statistics are taken of.

    At 16384 x 8192 on an H200: RMSNorm -> 1x128 both 215 us, in the tile 255; MXFP8 both behind a
    residual 248 and 280, but without one 197 and 184.  Longer rows take too many registers: at a
    width of 14336, 309 and 236 us, 321 and 273.  docs/benchmarks/ahead-h200.txt.
    """
    steps = statistics_of(producer)
    if not steps or int(producer.columns) > ROWS_WIDTH:
        return False
    return rule.kind == "fp8" or len(_read_in_place(producer, steps)) > 1


def statistics_of(producer: Producer) -> list[Step]:
    """Return what is to be computed of rows before their elements; nothing without statistics."""
    k = V.graph.sizevars.simplify(producer.columns)
    fixed = getattr(k, "is_Integer", isinstance(k, int)) and 64 <= int(k) <= MAX_WIDTH
    steps = steps_of(producer) if fixed else []
    return steps if any(step.kind in STATISTICS for step in steps) else []


def _reads(producer: Producer, load: Expression) -> list[Any]:
    return reads_of(load, producer.rows, producer.columns)


def _read_in_place(producer: Producer, steps: Sequence[Step]) -> list[str]:
    """Return the buffers of numbers that are read at the place of the element, and only there."""
    there: dict[str, bool] = {}
    kept = [step.element for step in steps if step.kind == KEEP]
    for load in (*kept, producer.load):
        for read in _reads(producer, load):
            name = read.what.name
            number = V.graph.get_buffer(name).get_dtype() in (F32, torch.bfloat16, torch.float16)
            in_place = number and producer.is_place(read, of_row=False)
            there[name] = there.get(name, True) and in_place
    made = {step.name for step in steps}
    return sorted(name for name, only in there.items() if only and name not in made)


def _load(producer: Producer, name: str) -> Expression:
    columns = producer.columns

    def load(index: Sequence[Any]) -> Any:
        return ops.to_dtype(ops.load(name, index[0] * columns + index[1]), F32)

    return load
