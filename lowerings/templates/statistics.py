"""The row statistics that a producer reads: sums and moments of a row that a template takes itself.

A norm is a reduction over the row and then pointwise work.  Inductor has made the reduction a
buffer by the time the quantization is lowered, but has not generated its kernel: what the buffer
would hold can be computed in the template, from a row that is in registers anyway.  The buffer is
then read by nobody and disappears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inductor_ext._compat import FloorDiv, ModularIndexing, V, WrapperHandler, ir, ops

from ..vocabulary import Expression
from .producer import Producer, buffers_read

SUM, MEAN, MOMENT = "sum", "mean", "moment"
_KINDS = {("sum", 0): SUM, ("welford_reduce", 0): MEAN, ("welford_reduce", 1): MOMENT}


class Statistic(NamedTuple):
    """One statistic: the buffer that it replaces, what is done to a row, of which elements."""

    name: str
    kind: str
    element: Expression


def of_rows(producer: Producer) -> list[Statistic] | None:
    """Return the statistics of rows that the producer's code reads, those read by others first.

    None if there is one that somebody else needs too: its kernel exists then, and so does its
    pass over the rows.
    """
    found: dict[str, Statistic] = {}
    for buffer in producer.reads():
        _collect(buffer, producer, found)
    quantize = V.graph.current_node
    alone = all(_only_leads_to(V.graph.get_buffer(name), quantize) for name in found)
    return list(found.values()) if alone else None


def _collect(buffer: Any, producer: Producer, found: dict[str, Statistic]) -> None:
    data = getattr(buffer, "data", None)
    if buffer.get_name() in found or not isinstance(buffer, ir.ComputedBuffer):
        return
    if not isinstance(data, ir.Reduction):
        return
    kind = _KINDS.get((data.reduction_type, getattr(data, "output_index", 0)))
    equal = V.graph.sizevars.statically_known_equals
    rows = 1
    for size in data.ranges:
        rows = rows * size
    whole_row = len(data.reduction_ranges) == 1 and equal(
        data.reduction_ranges[0], producer.columns
    )
    if kind is None or not whole_row or not equal(rows, producer.rows):
        return
    ranges = list(data.ranges)

    def element(index: Sequence[Any]) -> Any:
        row, column = index
        return ops.to_dtype(data.inner_fn(_unflatten(row, ranges), [column]), torch.float32)

    for inner in buffers_read(element, producer.rows, producer.columns):
        _collect(inner, producer, found)
    found[buffer.get_name()] = Statistic(buffer.get_name(), kind, element)


def _unflatten(row: Any, sizes: Sequence[Any]) -> list[Any]:
    index, step = [], 1
    for size in reversed(sizes):
        index.append(ModularIndexing(row, step, size))
        step = step * size
    if index:
        index[-1] = FloorDiv(row, step // sizes[0])
    return index[::-1]


def _only_leads_to(buffer: Any, quantize: torch.fx.Node) -> bool:
    """Return whether nothing but ``quantize`` needs what is computed from a buffer's value."""
    origins = buffer.get_origins()
    before: set[torch.fx.Node] = set()
    left = list(quantize.all_input_nodes)
    while left:
        node = left.pop()
        if node not in before:
            before.add(node)
            left += node.all_input_nodes
    reductions = [n for n in origins if n in before and _reduces(n)]
    after = list(reductions)
    seen: set[torch.fx.Node] = set()
    while after:
        node = after.pop()
        if node is quantize or node in seen:
            continue
        if node not in before:
            return False
        seen.add(node)
        after += node.users
    return bool(reductions)


def _reduces(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.reduction in target.tags or target in _REDUCTIONS


_aten = torch.ops.aten
_REDUCTIONS = {_aten.mean.dim, _aten.sum.dim_IntList, _aten.var_mean.correction}


def substitute(expression: Expression, names: Sequence[str]) -> Expression:
    """Return the expression with loads of the named buffers replaced by template variables.

    The variables are ``stat0``, ``stat1`` ... in the order of the names; the template gives their
    values as fixed inputs of ``modification``.
    """
    places = {name: f"stat{i}" for i, name in enumerate(names)}

    class Handler(WrapperHandler):
        def load(self, name: str, index: Any) -> Any:
            return self._inner.load(places.get(name, name), 0 if name in places else index)

    def replaced(index: Sequence[Any]) -> Any:
        with V.set_ops_handler(Handler(V.ops)):
            return expression(index)

    return replaced
