"""What a template computes itself instead of reading it: statistics of rows, and stored producers.

A norm is a reduction over the row and then pointwise work.  Inductor has made the reduction a
buffer by the time the quantization is lowered, but has not generated its kernel: what the buffer
would hold can be computed in the template, from a row that is in registers anyway.  The buffer is
then read by nobody and disappears.

A residual sum that the next layer needs too is a buffer with a pointwise kernel.  The template
computes it on the way and stores it; the buffer becomes an allocation that the template fills.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from inductor_ext._compat import FloorDiv, ModularIndexing, V, WrapperHandler, ir, ops

from ..vocabulary import F32, Expression
from .producer import Producer, buffers_read

SUM, MEAN, MOMENT, KEEP = "sum", "mean", "moment", "keep"
_KINDS = {("sum", 0): SUM, ("welford_reduce", 0): MEAN, ("welford_reduce", 1): MOMENT}


class Step(NamedTuple):
    """One thing to compute before the elements: for which buffer, what, from which elements."""

    buffer: Any
    kind: str
    element: Expression

    @property
    def name(self) -> str:
        """The buffer's name."""
        return str(self.buffer.get_name())


def steps_of(producer: Producer) -> list[Step]:
    """Return what a template of whole rows computes itself, what others build on first.

    A statistic that somebody else needs too is not among them: its kernel exists then, and so
    does its pass over the rows.
    """
    found: dict[str, Step] = {}
    for buffer in producer.reads():
        _collect(buffer, producer, found)
    steps = list(found.values())
    ours = _all_are_ours(steps, V.graph.current_node) and not _read_already(steps)
    return steps if ours else []


def _collect(buffer: Any, producer: Producer, found: dict[str, Step]) -> None:
    data = getattr(buffer, "data", None)
    if buffer.get_name() in found or not isinstance(buffer, ir.ComputedBuffer):
        return
    kind, element = None, None
    if isinstance(data, ir.Reduction):
        kind, element = _statistic(data, producer)
    elif isinstance(data, ir.Pointwise):
        kind, element = _kept(buffer, data, producer)
    if kind is None or element is None:
        return
    for inner in buffers_read(element, producer.rows, producer.columns):
        _collect(inner, producer, found)
    found[buffer.get_name()] = Step(buffer, kind, element)


def _statistic(data: Any, producer: Producer) -> tuple[str | None, Expression | None]:
    kind = _KINDS.get((data.reduction_type, getattr(data, "output_index", 0)))
    ranges = list(data.ranges)
    whole = len(data.reduction_ranges) == 1 and _equal(data.reduction_ranges[0], producer.columns)
    if kind is None or not whole or not _equal(math.prod(ranges), producer.rows):
        return None, None

    def element(index: Sequence[Any]) -> Any:
        row, column = index
        return ops.to_dtype(data.inner_fn(_unflatten(row, ranges), [column]), F32)

    return kind, element


def _kept(buffer: Any, data: Any, producer: Producer) -> tuple[str | None, Expression | None]:
    """Return an elementwise buffer of the matrix's size, in the order of the matrix."""
    size, inner = list(data.ranges), data.inner_fn
    same = size and _equal(size[-1], producer.columns)
    if not same or not _equal(math.prod(size[:-1]), producer.rows):
        return None, None
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    if buffer.get_dtype() not in kinds or not buffer.get_layout().is_contiguous():
        return None, None

    def element(index: Sequence[Any]) -> Any:
        row, column = index
        # Whoever computes with it rounds it: the rounding pass has put that into the graph.
        return ops.to_dtype(inner([*_unflatten(row, size[:-1]), column]), F32)

    return KEEP, element


def hand_over(steps: Iterable[Step]) -> list[Any]:
    """Turn the buffers of kept steps into allocations; return them as arguments of a template."""
    given = []
    for step in steps:
        if step.kind != KEEP:
            continue
        buffer, data = step.buffer, step.buffer.data
        buffer.freeze_layout()
        dtype = buffer.get_dtype()
        # Nothing to compute: what Inductor itself makes of an empty tensor.
        buffer.data = dataclasses.replace(
            data, inner_fn=lambda _, d=dtype: ops.constant(0, d), ranges=[0] * len(data.ranges)
        )
        given.append(ir.TensorBox(ir.StorageBox(buffer)))
    return given


def substitute(expression: Expression, names: Sequence[str]) -> Expression:
    """Return the expression with loads of the named buffers replaced by template variables.

    The variables are ``step0``, ``step1`` ... in the order of the names; the template gives their
    values as fixed inputs of ``modification``.
    """
    places = {name: f"step{i}" for i, name in enumerate(names)}

    class Handler(WrapperHandler):
        def load(self, name: str, index: Any) -> Any:
            return self._inner.load(places.get(name, name), 0 if name in places else index)

    def replaced(index: Sequence[Any]) -> Any:
        with V.set_ops_handler(Handler(V.ops)):
            return expression(index)

    return replaced


def _read_already(steps: Sequence[Step]) -> bool:
    """Return whether a kernel that is made already reads what a template would only then fill."""
    kept = {step.name for step in steps if step.kind == KEEP}
    ours = {step.buffer.get_operation_name() for step in steps}
    others = (o for o in V.graph.operations if o.get_operation_name() not in ours)
    return any(not kept.isdisjoint(operation.get_read_names()) for operation in others)


def _all_are_ours(steps: Iterable[Step], needed: torch.fx.Node) -> bool:
    """Return whether the template of ``needed`` can be the one that computes all the buffers.

    A statistic must be for ``needed`` and what is kept, and nothing else.  What is kept may have
    other users, but none whose code has been made already: it would read the buffer before the
    template fills it.
    """
    before = _ancestors(needed)
    order = {node: place for place, node in enumerate(needed.graph.nodes)}
    ends, starts = {needed}, list[torch.fx.Node]()
    for step in steps:
        origins = [n for n in step.buffer.get_origins() if n in before]
        if step.kind == KEEP:
            made = [n for n in origins if not any(user in origins for user in n.users)]
            if len(made) != 1:
                return False
            ends.add(made[0])
            starts += [user for user in made[0].users if order[user] < order[needed]]
        else:
            reductions = [n for n in origins if _reduces(n)]
            if not reductions:
                return False
            starts += reductions
    return _only_lead_to(ends, before, starts)


def _only_lead_to(
    ends: set[torch.fx.Node], before: set[torch.fx.Node], start: list[torch.fx.Node]
) -> bool:
    """Return whether everything computed from ``start`` is for one of ``ends``."""
    left, seen = list(start), set(ends)
    while left:
        node = left.pop()
        if node in seen:
            continue
        if node not in before:
            return False
        seen.add(node)
        left += node.users
    return True


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    left = list(node.all_input_nodes)
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += one.all_input_nodes
    return found


def _reduces(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.reduction in target.tags or target in _REDUCTIONS


_aten = torch.ops.aten
_REDUCTIONS = {_aten.mean.dim, _aten.sum.dim_IntList, _aten.var_mean.correction}


def _unflatten(row: Any, sizes: Sequence[Any]) -> list[Any]:
    """Return the index in ``sizes`` of a row's number."""
    index: list[Any] = []
    step = 1
    for size in reversed(sizes):
        index.append(ModularIndexing(row, step, size))
        step = step * size
    if index:
        index[-1] = FloorDiv(row, step // sizes[0])
    return index[::-1]


def _equal(a: Any, b: Any) -> bool:
    return bool(V.graph.sizevars.statically_known_equals(a, b))
