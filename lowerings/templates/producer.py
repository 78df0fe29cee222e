"""The producer of a tensor, as code inside a Triton template.

A template usually reads its input from memory, and Inductor's own way of fusing a producer into it
(prologue fusion) is a global switch that takes pointwise, single-use producers only.  Here the
producer that Inductor has not stored yet is handed to the template as a subgraph, the way that flex
attention takes a score modification: the template names a row and a column, the subgraph computes
the element there, from whatever buffers it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import sympy
import torch

from inductor_ext._compat import (
    SimplifyIndexing,
    V,
    autotune_select_algorithm,
    extract_read_writes,
    ir,
    lowerings,
)

from ..vocabulary import Expression, load_f32

# The template's variables for the position of an element in the matrix (M, K).
ROW = sympy.Symbol("idx_m", integer=True, nonnegative=True)
COLUMN = sympy.Symbol("idx_k", integer=True, nonnegative=True)


class Producer:
    """A tensor (*, K) as a matrix (M, K), computed element by element where it is wanted.

    Attributes:
        rows, columns: M and K, which may be symbolic.
        device, dtype: of the tensor; its elements are rounded to ``dtype``.
    """

    def __init__(self, x: Any) -> None:
        *leading, self.columns = x.get_size()
        self.rows = sympy.prod(leading)
        self.device, self.dtype = x.get_device(), x.get_dtype()
        view = lowerings[torch.ops.aten.view.default]
        matrix = x if len(leading) == 1 else view(x, [self.rows, self.columns])
        self._load = load_f32(matrix)

    def subgraph(self) -> Any:
        """Return the code of an element at (ROW, COLUMN), in fp32."""
        return as_subgraph(self._load, self.rows, self.columns, self.device)

    def reads(self) -> list[Any]:
        """Return the buffers that the code reads."""
        with mock.patch.object(ir.FlexibleLayout, "allow_indexing", True):
            found = extract_read_writes(self._load, [self.rows, self.columns]).reads
        return [V.graph.get_buffer(name) for name in sorted({read.name for read in found})]


def as_subgraph(load: Expression, rows: Any, columns: Any, device: torch.device) -> Any:
    """Return an expression over a matrix as the subgraph that ``modification`` takes."""

    def element(_: Sequence[Any]) -> Any:
        with V.set_ops_handler(SimplifyIndexing(V.ops, {ROW: rows, COLUMN: columns})):
            return load([ROW, COLUMN])

    data = ir.Pointwise(device=device, dtype=torch.float32, inner_fn=element, ranges=[])
    layout = ir.FlexibleLayout(device, torch.float32, [])
    return ir.ComputedBuffer(name=None, layout=layout, data=data)


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
