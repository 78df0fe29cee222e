"""Let ``x @ dequantize(w).t()`` be one kernel where the weight would be read once for few rows.

A product of a dequantized weight, as ``F.linear`` makes it, becomes ``weight_only_mm`` where that
op would run its own CUDA kernel for it: see ``ops/_routes_weight_only.py``.  The weight is then
not rounded to the dtype of x (docs/weight_only.md has the bound), so it is done with
``config.numerics`` "fast" only, and for numbers of rows that the graph knows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import config
from ._pairs import _arguments

_aten = torch.ops.aten


@cache
def _families() -> dict[Any, tuple[Any, Any, list[str]]]:
    """Return, by dequantize op: the family, its product, the names of the weight's arguments."""
    from .ops.weight_only import FAMILIES, OPS

    return {
        getattr(torch.ops.inductor_ext, f"dequantize_{name}").default: (
            family,
            OPS[name],
            [argument.split()[-1] for argument in family.arguments.split(", ")],
        )
        for name, family in FAMILIES.items()
    }


def join_products(graph: Graph) -> int:
    """Replace the products that can be; return how many.  For "fast" numerics only."""
    found = [node for node in graph.nodes if node.target in (_aten.mm.default, _aten.addmm.default)]
    return sum(_join(graph, node) for node in found)


def _join(graph: Graph, product: Node) -> bool:
    bias, x, transposed = (None, *product.args)[-3:]
    dequantize = _untransposed(transposed)
    if product.kwargs or dequantize is None or not isinstance(x, Node):
        return False
    family, op, names = _families()[dequantize.target]
    arguments = _arguments(dequantize)
    weight = tuple(arguments[name] for name in names)
    if arguments.get("block_k") == 1:  # a matrix that was quantized along its columns
        return False
    if not _fits(family, op, x, bias, weight, arguments["dtype"]):
        return False
    with graph.inserting_before(product):
        call = graph.call_function(op, (x, *weight, bias))
    call.meta.update({k: v for k, v in product.meta.items() if k != "eager_input_vals"})
    product.replace_all_uses_with(call)
    for node in (product, transposed, dequantize):
        if not node.users:
            graph.erase_node(node)
    return True


def _untransposed(node: Any) -> Node | None:
    """Return the dequantize op whose result this is, transposed."""
    if not isinstance(node, Node) or node.target not in (_aten.permute.default, _aten.t.default):
        return None
    if node.target is _aten.permute.default and list(node.args[1]) != [1, 0]:
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and source.target in _families() else None


def _fits(
    family: Any, op: Any, x: Node, bias: Any, weight: tuple[Any, ...], dtype: torch.dtype
) -> bool:
    """Return whether the op takes these, and runs its kernel for them."""
    from .ops._routes_weight_only import choose_weight_only

    values = [a.meta.get("val") if isinstance(a, Node) else a for a in (x, *weight, bias)]
    of_x, *of_weight, of_bias = values
    sizes = [size for v in values if isinstance(v, Tensor) for size in v.shape]
    if not isinstance(of_x, Tensor) or not all(isinstance(size, int) for size in sizes):
        return False
    if of_x.device.type != "cuda" or of_x.dtype != dtype or op._schema.name in config.disabled_ops:
        return False
    if of_bias is not None and (of_bias.dim() != 1 or of_bias.dtype != dtype):
        return False
    try:
        family.check(tuple(of_weight), dtype)
        route, _ = choose_weight_only(family.call(of_x, tuple(of_weight)))
    except (TypeError, ValueError):  # a pin that cannot take this call
        return False
    return route == "kernel"
