"""What a template computes itself instead of reading it: statistics of rows, and stored producers.

A norm is a reduction over the row and then pointwise work.  Inductor has made the reduction a
buffer by the time the quantization is lowered, but has not generated its kernel: what the buffer
would hold can be computed in the template, from a row that is in registers anyway.  The buffer is
then read by nobody and disappears.

A residual sum that the next layer needs too is a buffer with a pointwise kernel.  The template
computes it on the way and stores it; the buffer becomes an allocation that the template fills.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from inductor_ext._compat import FloorDiv, ModularIndexing, V, WrapperHandler, ir, ops

from ..vocabulary import F32, Expression
from .producer import Producer, reads_of

SUM, MEAN, MOMENT, KEEP, ROW = "sum", "mean", "moment", "keep", "row"
STATISTICS = (SUM, MEAN, MOMENT)
_KINDS = {("sum", 0): SUM, ("welford_reduce", 0): MEAN, ("welford_reduce", 1): MOMENT}


class Step(NamedTuple):
    """One thing to compute before the elements.

    Attributes:
        buffer: what it would have been stored in.
        kind: a statistic of the row; or ROW, computed from such ones; or KEEP, of an element.
        element: what it is computed from.
        stored: whether the template stores it in the buffer, for others.
    """

    buffer: Any
    kind: str
    element: Expression
    stored: bool = True

    @property
    def name(self) -> str:
        """The buffer's name."""
        return str(self.buffer.get_name())


def steps_of(producer: Producer, *, store_all: bool = False) -> list[Step]:
    """Return what a template of whole rows computes itself, what others build on first.

    Args:
        store_all: store all of it; otherwise statistics for the template alone are not stored.

    Returns:
        Nothing where one of them is read in another place than that of the element computed, or
        by a kernel that is made already.
    """
    found: dict[str, Step] = {}
    if not _collect(producer.load, producer, found):
        return []
    steps = list(found.values())
    if not store_all:
        steps = _unstored_where_alone(steps, V.graph.current_node)
    return [] if _read_already(steps) else steps


def reads_a_loop(producer: Producer, steps: Iterable[Step]) -> bool:
    """Return whether the elements are read from a pointwise kernel that no step takes in.

    A template would have it store them first, where Inductor's own loops fuse with it.
    """
    names = {step.name for step in steps}
    loops = [b for b in producer.reads() if isinstance(b, ir.ComputedBuffer)]
    # Without a range of nothing: those are allocations that a template fills.
    return any(
        isinstance(b.data, ir.Pointwise) and 0 not in b.data.ranges and b.get_name() not in names
        for b in loops
    )


def _collect(expression: Expression, producer: Producer, found: dict[str, Step]) -> bool:
    """Find the steps of an expression; return whether it reads each in the element's place."""
    for read in reads_of(expression, producer.rows, producer.columns):
        name = read.what.name
        buffer = V.graph.get_buffer(name)
        kind, element = _computed(buffer, producer)
        if kind is None or element is None or producer.uses_positions(element):
            continue  # the last of a `cat`, for instance
        if not producer.is_place(read, of_row=kind != KEEP):
            return False
        if name not in found:
            if not _collect(element, producer, found):
                return False
            found[name] = Step(buffer, kind, element)
    return True


def _computed(buffer: Any, producer: Producer) -> tuple[str | None, Expression | None]:
    """Return what a buffer without a kernel is to the matrix, and how it is computed."""
    data = getattr(buffer, "data", None)
    if not isinstance(buffer, ir.ComputedBuffer):
        return None, None
    if isinstance(data, ir.Reduction):
        return _statistic(data, producer)
    return _kept(buffer, data, producer) if isinstance(data, ir.Pointwise) else (None, None)


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
    """Return a buffer with a number an element of the matrix, or a number a row, in its order."""
    size, inner = list(data.ranges), data.inner_fn
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    if not size or buffer.get_dtype() not in kinds or not buffer.get_layout().is_contiguous():
        return None, None
    of_rows = _equal(math.prod(size), producer.rows)
    whole = _equal(size[-1], producer.columns) and _equal(math.prod(size[:-1]), producer.rows)
    if not of_rows and not whole:
        return None, None

    def element(index: Sequence[Any]) -> Any:
        row, column = index
        place = _unflatten(row, size) if of_rows else [*_unflatten(row, size[:-1]), column]
        # Whoever computes with it rounds it: the rounding pass has put that into the graph.
        return ops.to_dtype(inner(place), F32)

    return ROW if of_rows else KEEP, element


@contextlib.contextmanager
def handed_over(steps: Sequence[Step]) -> Iterator[list[Any]]:
    """Hand the buffers of stored steps over to a template; take them back if it cannot be made."""
    before = [(step.buffer, step.buffer.data) for step in steps]
    try:
        yield hand_over(steps)
    except Exception:
        for buffer, data in before:
            buffer.data = data
        raise


def hand_over(steps: Iterable[Step]) -> list[Any]:
    """Turn the buffers of stored steps into allocations; return them as arguments of a template."""
    given = []
    for step in steps:
        if not step.stored:
            continue
        buffer, data = step.buffer, step.buffer.data
        buffer.freeze_layout()
        dtype = buffer.get_dtype()
        # Nothing to compute: what Inductor itself makes of an empty tensor.
        buffer.data = ir.Pointwise(
            device=data.device,
            dtype=dtype,
            inner_fn=lambda _, d=dtype: ops.constant(0, d),
            ranges=[0] * len(data.ranges),
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
    stored = {step.name for step in steps if step.stored}
    ours = {step.buffer.get_operation_name() for step in steps}
    others = (o for o in V.graph.operations if o.get_operation_name() not in ours)
    return any(not stored.isdisjoint(operation.get_read_names()) for operation in others)


def _unstored_where_alone(steps: Sequence[Step], needed: torch.fx.Node) -> list[Step]:
    """Return the steps, those statistics not stored that are for ``needed`` and the stored ones."""
    before = _ancestors(needed)
    ends = {needed}
    for step in steps:
        if step.kind in (KEEP, ROW):
            origins = [n for n in step.buffer.get_origins() if n in before]
            ends |= {n for n in origins if not any(user in origins for user in n.users)}

    def is_alone(step: Step) -> bool:
        starts = [n for n in step.buffer.get_origins() if n in before and _reduces(n)]
        return bool(starts) and _only_lead_to(ends, before, starts)

    return [step._replace(stored=step.kind in (KEEP, ROW) or not is_alone(step)) for step in steps]


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
