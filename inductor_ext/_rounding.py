"""Under "exact" numerics, what is fused in front of our ops rounds where eager mode rounds.

Eager mode stores every intermediate of a bf16 or fp16 chain, and so rounds it; Inductor keeps it
in fp32.  An op of ours rounds its own input, but what the chain before it kept has moved codes by
then.  This pass walks back from the inputs of our ops through what may be fused into them and
puts ``inductor_ext::round_to_dtype`` between an op that computes a bf16 or fp16 value and the ops
that compute with it.  Only those uses see the rounded value: outputs, the backward and ops outside
the chains stay as they are, and a graph without an op of ours is not touched.

It runs before Inductor's joint-graph passes, since one of them (torch 2.11 and 2.12) removes a
cast to bf16 that a cast to fp32 follows, after which nobody knows that eager rounded there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from . import _compat

_NARROW = (torch.bfloat16, torch.float16)

# Ops that hand on elements of their inputs, or those negated: a rounding after such an op is as
# good as one before it.
_SELECTING = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view", "abs", "cat", "clone", "embedding", "flip", "gather", "index",
        "index_select", "neg", "repeat", "select_scatter", "slice_scatter", "where",
    )
)  # fmt: skip
# Ops whose result needs no rounding, but whose inputs do: which of -0.0 and 0.0 comes out depends
# on what has underflowed before.
_CHOOSING = frozenset(f"aten::{name}" for name in ("amax", "amin", "maximum", "minimum", "relu"))
# Ops that end with no product, and ops that begin with no addition: elsewhere a compiler could make
# one fused multiply-add of the two, and skip the rounding in between.
_NO_PRODUCT = _CHOOSING | {"aten::add", "aten::sub"}
_NO_ADDITION = _CHOOSING | {
    f"aten::{name}" for name in ("div", "eq", "ge", "gt", "le", "lt", "mul", "ne", "pow")
}
_CONSTANTS = frozenset(("aten::full", "aten::full_like", "aten::scalar_tensor"))


def wrap_joint_passes(is_ours: Callable[[Any], bool]) -> Callable[[], None]:
    """Run the pass on every graph that Inductor compiles; ``is_ours(target)`` tells our ops.

    Under "fast" numerics it is ``_weight_products.py``'s turn, also before those passes: one of
    them pads the products.

    Returns:
        The function that undoes it.
    """
    module = _compat.compile_fx_module
    original = module._recursive_joint_graph_passes

    def joint_graph_passes(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        from . import config
        from ._weight_products import join_products

        exact = config.numerics == "exact"
        if insert_roundings(gm.graph, is_ours) if exact else join_products(gm.graph):
            gm.recompile()
        return original(gm, *args, **kwargs)

    module._recursive_joint_graph_passes = joint_graph_passes

    def undo() -> None:
        if module._recursive_joint_graph_passes is joint_graph_passes:
            module._recursive_joint_graph_passes = original

    return undo


def insert_roundings(graph: Graph, is_ours: Callable[[Any], bool]) -> int:
    """Insert the roundings of eager mode in front of our ops; return how many."""
    fused = _fused_into(graph, is_ours)
    unrounded: set[Node] = set()
    count = 0
    for node in list(graph.nodes):
        if node not in fused:
            continue
        computes = not _selects(node)
        if not computes and unrounded.isdisjoint(node.all_input_nodes):
            continue
        if isinstance(node.meta.get("val"), torch.Tensor) and not _is_narrow(node):
            continue  # wider, an integer or a truth value: no rounding to make up for
        if _round_constant(node) or _schema_name(node) in _CHOOSING:
            continue
        unrounded.add(node)
        if not _is_narrow(node):  # several results; each is a node of its own
            continue
        users = [u for u in node.users if u in fused and not _rounds_later(u, node)]
        if users:
            _round(graph, node, users)
            count += 1
    return count


def _fused_into(graph: Graph, is_ours: Callable[[Any], bool]) -> set[Node]:
    """Return the nodes that Inductor may compute in the kernels of our ops."""
    found: set[Node] = set()
    left = [n for node in graph.nodes if is_ours(node.target) for n in node.all_input_nodes]
    while left:
        node = left.pop()
        if node not in found and (_selects(node) or _computes(node)):
            found.add(node)
            left += node.all_input_nodes
    return found


def _selects(node: Node) -> bool:
    """Return whether the node hands on elements of its inputs: it is a view, or one of the list."""
    target = node.target
    if target is operator.getitem or _schema_name(node) in _SELECTING:
        return True
    return isinstance(target, OpOverload) and any(
        out.alias_info is not None for out in target._schema.returns
    )


def _rounds_later(user: Node, node: Node) -> bool:
    """Return whether ``user`` hands on what ``node`` computed, so that it can be rounded then."""
    value = user.meta.get("val")
    return _selects(user) and (
        not isinstance(value, torch.Tensor) or value.dtype == node.meta["val"].dtype
    )


def _computes(node: Node) -> bool:
    """Return whether Inductor has its own code for the node: no GEMM, attention or custom op."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return (
        torch.Tag.pointwise in target.tags
        or torch.Tag.reduction in target.tags
        or _schema_name(node) in _CONSTANTS
        or _schema_name(node) == "aten::constant_pad_nd"
    )


def _schema_name(node: Node) -> str:
    return str(node.target._schema.name) if isinstance(node.target, OpOverload) else ""


def _is_narrow(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _NARROW


def _round_constant(node: Node) -> bool:
    """Round the number that the node fills a tensor with; return whether there is one.

    In the graph itself, since Inductor undoes casts of constants there and back.
    """
    name = _schema_name(node)
    if name not in _CONSTANTS:
        return False
    place = 0 if name == "aten::scalar_tensor" else 1
    number = node.args[place]
    if not isinstance(number, (int, float)):
        return False
    exact = torch.tensor(number, dtype=node.meta["val"].dtype).item()
    node.update_arg(place, exact)
    return True


def _may_contract(node: Node, users: list[Node]) -> bool:
    """Return whether ``node`` may be a product that one of its users adds to something."""
    return _schema_name(node) not in _NO_PRODUCT and any(_may_add(user) for user in users)


def _may_add(user: Node) -> bool:
    if _schema_name(user) == "prims::convert_element_type" or _selects(user):
        return any(_may_add(next_user) for next_user in user.users)
    return _schema_name(user) not in _NO_ADDITION


def _round(graph: Graph, node: Node, users: list[Node]) -> None:
    from .ops.rounding import round_to_dtype

    with graph.inserting_after(node):
        rounding = graph.call_function(round_to_dtype, (node, _may_contract(node, users)))
    like = node.meta["val"]
    rounding.meta.update(node.meta)
    rounding.meta.pop("eager_input_vals", None)
    rounding.meta["val"] = like.new_empty_strided(like.shape, like.stride())
    for user in users:
        user.replace_input_with(node, rounding)
