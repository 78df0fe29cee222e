"""The producer of a tensor, as code inside a Triton template.

A template usually reads its input from memory, and Inductor's own way of fusing a producer into it
(prologue fusion) is a global switch that takes pointwise, single-use producers only.  Here the
producer that Inductor has not stored yet is handed to the template as a subgraph, the way that flex
attention takes a score modification: the template names a row and a column, the subgraph computes
the element there, from whatever buffers it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch

from inductor_ext._compat import (
    MemoryDep,
    SimplifyIndexing,
    V,
    WrapperHandler,
    autotune_select_algorithm,
    extract_read_writes,
    ir,
)

from ..blocks import as_matrix
from ..vocabulary import Expression, load_f32, load_unrounded
from .quick import quick

# The template's variables for the position of an element in the matrix (M, K).
ROW = sympy.Symbol("idx_m", integer=True, nonnegative=True)
COLUMN = sympy.Symbol("idx_k", integer=True, nonnegative=True)


class Producer:
    """A tensor (*, K) as a matrix (M, K), computed element by element where it is wanted.

    Attributes:
        rows, columns: M and K, which may be symbolic.
        device, dtype: of the tensor.
        load, unrounded: its elements as fp32, rounded to ``dtype`` or as they are computed.
    """

    def __init__(self, x: Any) -> None:
        *leading, self.columns = x.get_size()
        self.rows = sympy.prod(leading)
        self.device, self.dtype = x.get_device(), x.get_dtype()
        matrix = as_matrix(x)
        self.load, self.unrounded = load_f32(matrix), load_unrounded(matrix)

    def subgraph(self, expression: Expression | None = None) -> Any:
        """Return the code of an element at (ROW, COLUMN), in fp32, as ``modification`` takes it.

        Args:
            expression: another expression over the matrix than the tensor's own elements.
        """
        load, ranges = expression or self.load, {ROW: self.rows, COLUMN: self.columns}

        def element(_: Sequence[Any]) -> Any:
            # What is read has its strides fixed; what is substituted needs none.
            handler = SimplifyIndexing(_constants(quick(V.ops)), ranges)
            with _any_layout(), V.set_ops_handler(handler):
                return load([ROW, COLUMN])

        data = ir.Pointwise(device=self.device, dtype=torch.float32, inner_fn=element, ranges=[])
        layout = ir.FlexibleLayout(self.device, torch.float32, [])
        return ir.ComputedBuffer(name=None, layout=layout, data=data)

    def is_huge(self) -> bool:
        """Return whether the elements are known to be more than 32 bits can count."""
        count = self.rows * self.columns
        return bool(V.graph.sizevars.statically_known_leq(2**31, count))

    def uses_positions(self) -> bool:
        """Return whether the code computes with indices or sizes that are not constants."""
        return uses_positions(self.load, self.rows, self.columns)

    def reads(self) -> list[Any]:
        """Return the buffers that the code reads."""
        return buffers_read(self.load, self.rows, self.columns)

    def is_place(self, read: Read, *, of_row: bool) -> bool:
        """Return whether a read is of the element's own place in a matrix, or in a column."""
        if not isinstance(read.what, MemoryDep):
            return False
        ranges = dict(zip(read.what.var_names, read.what.size, strict=True))
        place = read.row if of_row else read.row * self.columns + read.column
        return bool(V.graph.sizevars.simplify_with_ranges(read.what.index, ranges) == place)


def uses_positions(load: Expression, rows: Any, columns: Any) -> bool:
    """Return whether an expression computes with indices or sizes that are not constants."""
    with _any_layout():
        found = extract_read_writes(load, [rows, columns]).index_exprs
    return any(not sympy.sympify(used.index).is_Integer for used in found)


class Read(NamedTuple):
    """What is read of a buffer (an Inductor dependency) for the element at (row, column)."""

    what: Any
    row: Any
    column: Any


def reads_of(load: Expression, rows: Any, columns: Any) -> list[Read]:
    """Return what an expression over a matrix reads, and where."""
    place: list[Any] = []

    def element(index: Sequence[Any]) -> Any:
        place[:] = index
        return load(index)

    with _any_layout():
        found = extract_read_writes(element, [rows, columns]).reads
    return [Read(what, *place) for what in sorted(found, key=str)]


def buffers_read(load: Expression, rows: Any, columns: Any) -> list[Any]:
    """Return the buffers that an expression over a matrix reads."""
    names = sorted({read.what.name for read in reads_of(load, rows, columns)})
    return [V.graph.get_buffer(name) for name in names]


def _constants(inner: Any) -> Any:
    """Return a handler that makes sizes constants; Inductor's own would use a loop's block."""

    class Constants(WrapperHandler):
        def index_expr(self, expression: Any, dtype: torch.dtype) -> Any:
            return self._inner.constant(int(expression), dtype)

    return Constants(inner)


def _any_layout() -> Any:
    return mock.patch.object(ir.FlexibleLayout, "allow_indexing", True)


def run_template(
    template: Any,
    main: tuple[Sequence[Any], torch.dtype],
    others: list[Any],
    subgraphs: list[Any],
    reads: list[Any],
    call_sizes: list[Any],
    **meta: Any,
) -> Any:
    """Put a template into the graph.

    Args:
        template: a TritonTemplate whose arguments are ``others``.
        main: size and dtype of the result that the template stores with ``store_output``.
        others: its further results, made with ``empty``.
        subgraphs: what its ``modification(i)`` are.
        reads: the buffers that the subgraphs read.
        call_sizes: what its grid function is called with.
        meta: its constants, ``num_warps`` among them.

    Returns:
        The main result.
    """
    device = others[0].get_device()
    for buffer in reads:
        if isinstance(buffer, ir.ComputedBuffer):
            buffer.freeze_layout()
    size, dtype = main
    layout = ir.FixedLayout(device, dtype, list(size))
    choices: list[Any] = []
    problem = template.maybe_append_choice(
        choices, input_nodes=others, layout=layout, mutated_inputs=others, subgraphs=subgraphs,
        call_sizes=call_sizes, num_stages=1, **meta,
    )  # fmt: skip
    if problem is not None:
        raise problem
    result = autotune_select_algorithm(template.name, choices, others, layout)
    result = result[0] if isinstance(result, tuple) else result
    buffer = result.data.data
    buffer.subgraph_inps, buffer.subgraph_outs = reads, [None]
    return result
