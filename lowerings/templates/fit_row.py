"""Where the templates of rows apply, and how they are cut: settings measured on an H200."""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_ext._compat import V, ops

from ..blocks import reshaped
from ..vocabulary import pointwise, stored
from . import row, tensor
from .fit import (
    as_given,
    codes_have_neighbours,
    covered_rows,
    empty,
    may_use_template,
    place_of,
    stored_size,
)
from .formulas import Rule
from .inside import STATISTICS, Step, handed_over, reads_a_loop, steps_of, substitute
from .producer import Producer, buffers_read, run_template
from .row import Variant, cut, pieces_of

MAX_WIDTH = 16384


def quantize_rows(x: Any, rule: Rule, group: int, layout: str = "plain") -> Any:
    """Return (codes, scales) along K with a row's statistics in the same kernel.

    Args:
        group: how many neighbours share a scale; 0 for the whole row.

    Returns:
        None where groups have no statistics before them, or a row is too long for a program's
        registers, or not made of whole groups; and where loops take in a producer that a row's
        template would have stored first.
    """
    producer = _producer(x)
    if producer is None or codes_have_neighbours():
        return None
    k = int(producer.columns)
    if (group and k % group) or (layout == "gemm" and k % 128):
        return None
    steps = steps_of(producer)
    if not _has_statistics(steps) and (group or reads_a_loop(producer, steps)):
        return None  # tiles do it, or loops do
    place, blocks = place_of(rule, layout), k // group if group else 1
    codes = empty(x, (producer.rows, k), rule.codes)
    main = (stored_size(producer.rows, blocks, place), rule.scales)
    variant = _variant(producer, steps, rule, group, place)
    scales = _run(producer, steps, main, [codes], variant)
    return as_given(codes, scales, x, blocks, place)


def quantize_tensor(x: Any, rule: Rule) -> Any:
    """Return (codes, scale) for the scale that the tensor's amax gives, in one kernel.

    Returns:
        None where others compute with the codes in generated code; and where a row is too long for
        a program's registers, or where loops take in a producer that was to be stored first.
    """
    producer = _producer(x)
    if producer is None or codes_have_neighbours():
        return None
    steps = steps_of(producer)
    if not _has_statistics(steps) and reads_a_loop(producer, steps):
        return None
    codes = empty(x, (producer.rows, int(producer.columns)), rule.codes)
    count = producer.rows + tensor.WAYS * (1 + tensor.LINE)
    bits = pointwise(x, torch.int32, [count], lambda _: ops.constant(-1, torch.int32))
    variant = _variant(producer, steps, rule)
    others = [stored(bits), codes]
    scale = _run(producer, steps, ([1, 1], rule.scales), others, variant, tensor.template)
    return reshaped(codes, x.get_size()), reshaped(scale, [])


def amax_of_rows(x: Any) -> Any:
    """Return the bits of each row's amax, (M, 1) int32, before ``x`` is rounded.

    For codes that others compute with.  The statistics are stored on the way, for who reads ``x``
    again.

    Returns:
        None where there are no statistics, or a row is too long for a program's registers.
    """
    producer = _producer(x)
    if producer is None:
        return None
    producer.load = producer.unrounded
    steps = steps_of(producer, store_all=True)
    if not _has_statistics(steps):
        return None
    return _run(producer, steps, ([producer.rows, 1], torch.int32), [], _variant(producer, steps))


def _producer(x: Any) -> Producer | None:
    """Return the matrix, with columns that are a number; None where no template applies."""
    if not may_use_template(x) or len(x.get_size()) < 2:
        return None
    producer = Producer(x)
    nothing = V.graph.sizevars.statically_known_equals(producer.rows, 0)
    if nothing or producer.uses_positions() or producer.is_huge():
        return None
    columns = V.graph.sizevars.simplify(producer.columns)
    if not getattr(columns, "is_Integer", isinstance(columns, int)):
        return None
    producer.columns = columns
    return producer if 64 <= int(columns) <= MAX_WIDTH else None


def _has_statistics(steps: list[Step]) -> bool:
    return any(step.kind in STATISTICS for step in steps)


def _variant(
    producer: Producer,
    steps: list[Step],
    rule: Rule | None = None,
    group: int = 0,
    place: str = "plain",
) -> Variant:
    kinds = tuple((step.kind, step.stored) for step in steps)
    return Variant(rule, group, kinds, pieces_of(int(producer.columns)), place)


def _run(
    producer: Producer,
    steps: list[Step],
    main: tuple[Any, torch.dtype],
    others: list[Any],
    variant: Variant,
    template: Any = row.template,
) -> Any:
    """Put the template into the graph; return its last result, of the size and dtype ``main``."""
    names = [step.name for step in steps]
    elements = [step.element for step in steps]
    subgraphs = [producer.subgraph(substitute(e, names)) for e in (*elements, producer.load)]
    reads = _all_reads(producer, elements, set(names))
    k = int(producer.columns)
    expected = V.graph.sizevars.optimization_hint(producer.rows)
    rows_each, warps = cut(expected, k, statistics=_has_statistics(steps))
    with handed_over(steps) as filled:
        return run_template(
            template(variant),
            main,
            [*others, *filled],
            subgraphs,
            reads,
            [covered_rows(producer.rows, variant.place)],
            COLUMNS=k, ALIGNED=math.gcd(k, 16), GROUP=variant.group, ROWS_EACH=rows_each,
            num_warps=warps,
        )  # fmt: skip


def _all_reads(producer: Producer, elements: list[Any], inside: set[str]) -> list[Any]:
    found = {b.get_name(): b for b in producer.reads()}
    for element in elements:
        found |= {b.get_name(): b for b in buffers_read(element, producer.rows, producer.columns)}
    return [buffer for name, buffer in sorted(found.items()) if name not in inside]
