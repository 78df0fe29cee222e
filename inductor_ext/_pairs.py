"""Put the two orientations of one quantization together again, after the graphs are cut.

While it traces, ``quantize(..., orientation="both")`` makes two ops, so that an orientation that
nobody uses disappears and the partitioner may keep one in the forward and put the other into the
backward.  Where both are still in one graph they become the op that makes both from one read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from . import _compat, config

_ops = torch.ops.inductor_ext
Arguments = dict[str, Any]


def _fp8(k: Arguments, m: Arguments) -> tuple[Any, ...] | None:
    size = k["block_k"]
    square = k["block_m"] == size
    blocks = ((size, size), (size, size)) if square else ((1, size), (size, 1))
    if not _are(k, m, blocks, same=("dtype", "eps", "pow2", "layout")) or not m["transposed"]:
        return None
    return (k["x"], k["dtype"], size, square, k["eps"], k["pow2"], k["layout"])


def _mxfp8(k: Arguments, m: Arguments) -> tuple[Any, ...] | None:
    square = k["block_m"] == 32
    blocks = ((32, 32), (32, 32)) if square else ((1, 32), (32, 1))
    if not _are(k, m, blocks, same=("dtype", "mode", "layout")):
        return None
    return (k["x"], k["dtype"], square, m["transposed"], k["mode"], k["layout"])


def _nvfp4(k: Arguments, m: Arguments) -> tuple[Any, ...] | None:
    square = k["block_m"] == 16
    blocks = ((16, 16), (16, 16)) if square else ((1, 16), (16, 1))
    if not _are(k, m, blocks, same=("layout", "rng")) or k["hadamard"] or not m["transposed"]:
        return None
    return (k["x"], k["amax"], m["amax"], square, k["layout"], m["hadamard"], k["rng"])


_PAIRS: dict[Any, tuple[Any, Callable[[Arguments, Arguments], tuple[Any, ...] | None]]] = {
    _ops.quantize_fp8_block.default: (_ops.quantize_fp8_block_both.default, _fp8),
    _ops.quantize_mxfp8.default: (_ops.quantize_mxfp8_both.default, _mxfp8),
    _ops.quantize_nvfp4.default: (_ops.quantize_nvfp4_both.default, _nvfp4),
}


def _are(k: Arguments, m: Arguments, blocks: tuple[Any, Any], *, same: tuple[str, ...]) -> bool:
    """Return whether two calls are the row and the column half of one quantization."""
    found = tuple((call["block_m"], call["block_k"]) for call in (k, m))
    return (
        found == blocks
        and not k["transposed"]
        and k["x"] is m["x"]
        and all(k[name] is m[name] or k[name] == m[name] for name in same)
    )


def wrap_post_passes() -> Callable[[], None]:
    """Run the pass on every graph that Inductor compiles; returns the function that undoes it."""
    module = _compat.compile_fx_module
    original = module._recursive_post_grad_passes

    def post_grad_passes(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        result = original(gm, *args, **kwargs)
        if join(gm.graph):
            gm.recompile()
        return result

    module._recursive_post_grad_passes = post_grad_passes

    def undo() -> None:
        if module._recursive_post_grad_passes is post_grad_passes:
            module._recursive_post_grad_passes = original

    return undo


def join(graph: Graph) -> int:
    """Replace each pair of orientations by the op that makes both; return how many."""
    count = 0
    calls = [node for node in graph.nodes if node.target in _PAIRS]
    while calls:
        first = calls.pop(0)
        for other in calls:
            if other.target is first.target and _join(graph, first, other):
                calls.remove(other)
                count += 1
                break
    return count


def _join(graph: Graph, first: Node, second: Node) -> bool:
    target, rule = _PAIRS[first.target]
    if {first.target._schema.name, target._schema.name} & config.disabled_ops:
        return False
    for k, m in ((first, second), (second, first)):
        arguments = rule(_arguments(k), _arguments(m))
        if arguments is not None:
            break
    else:
        return False
    order = {node: place for place, node in enumerate(graph.nodes)}
    if any(isinstance(a, Node) and order[a] > order[first] for a in arguments):
        return False  # an amax that comes after the first half
    with graph.inserting_before(first):
        both = graph.call_function(target, arguments)
        both.meta.update({key: v for key, v in first.meta.items() if key != "eager_input_vals"})
        both.meta["val"] = (*k.meta["val"], *m.meta["val"])
        items = [(user, offset) for half, offset in ((k, 0), (m, 2)) for user in half.users]
        for user, offset in items:  # getitem: each half returns two tensors
            result = graph.call_function(operator.getitem, (both, user.args[1] + offset))
            result.meta.update(user.meta)
            user.replace_all_uses_with(result)
    for node in (*(user for user, _ in items), k, m):
        graph.erase_node(node)
    return True


def _arguments(node: Node) -> Arguments:
    """Return the call's arguments by name, defaults included."""
    values = dict(node.kwargs)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        values[argument.name] = value
    for argument in node.target._schema.arguments:
        values.setdefault(argument.name, argument.default_value)
    return values
