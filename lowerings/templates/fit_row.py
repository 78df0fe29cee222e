"""Where the row template applies, and how it is cut: settings measured on an H200."""

from __future__ import annotations

from typing import Any

import torch

from inductor_ext._compat import V

from .fit import as_given, covered_rows, empty, may_use_template, place_of, stored_size
from .formulas import Rule
from .inside import KEEP, hand_over, steps_of, substitute
from .producer import Producer, buffers_read, run_template
from .row import Variant, template

MAX_WIDTH = 16384


def quantize_rows(x: Any, rule: Rule, group: int, layout: str) -> tuple[Any, Any] | None:
    """Return (codes, scales) along K with a row's statistics in the same kernel.

    None where there are no statistics, or a row is too long for a program's registers, or not
    made of whole groups, or somebody else needs a statistic too.
    """
    if not may_use_template(x) or len(x.get_size()) < 2:
        return None
    producer = Producer(x)
    if producer.uses_positions():
        return None
    columns = V.graph.sizevars.simplify(producer.columns)
    if not getattr(columns, "is_Integer", isinstance(columns, int)):
        return None
    k = int(columns)
    if not 64 <= k <= MAX_WIDTH or k % group or (layout == "gemm" and k % 128):
        return None
    if producer.is_huge():
        return None
    steps = steps_of(producer)
    if all(step.kind == KEEP for step in steps):
        return None  # no row needed: tiles
    place = place_of(rule, layout)
    width = max(1 << (k - 1).bit_length(), group)
    names = [step.name for step in steps]
    subgraphs = [producer.subgraph(substitute(step.element, names)) for step in steps]
    subgraphs.append(producer.subgraph(substitute(producer.load, names)))
    reads = _all_reads(producer, [step.element for step in steps], set(names))
    kept = hand_over(steps)
    codes = empty(x, (producer.rows, k), torch.float8_e5m2 if rule.e5m2 else torch.float8_e4m3fn)
    kind = torch.uint8 if rule.kind == "mxfp8" else torch.float32
    rows_each = max(1, 1024 // width)
    scales = run_template(
        template(Variant(rule, tuple(step.kind for step in steps), width == k, place)),
        (stored_size(producer.rows, k // group, place), kind),
        [codes, *kept],
        subgraphs,
        reads,
        [covered_rows(producer.rows, place)],
        COLUMNS=k, WIDTH=width, GROUP=group, ROWS_EACH=rows_each,
        num_warps=min(16, max(1, rows_each * width // 2048)),
    )  # fmt: skip
    return as_given(codes, scales, x, k // group, place)


def _all_reads(producer: Producer, elements: list[Any], inside: set[str]) -> list[Any]:
    found = {b.get_name(): b for b in producer.reads()}
    for element in elements:
        found |= {b.get_name(): b for b in buffers_read(element, producer.rows, producer.columns)}
    return [buffer for name, buffer in sorted(found.items()) if name not in inside]
