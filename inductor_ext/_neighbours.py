"""What stands next to an op in the graph: is there anything that it could fuse with?"""

from __future__ import annotations

import operator
from typing import Any

import torch

from . import _compat


def comes_from_memory(x: Any) -> bool:
    """Return whether no producer can be fused into loads of ``x``: an input, an opaque result."""
    ir = _compat.ir
    while isinstance(x, (ir.MutableBox, ir.BaseView)):
        x = x.data
    opaque = isinstance(x, (ir.ExternKernel, ir.InputBuffer, ir.ConstantBuffer))
    return opaque and not isinstance(x, ir.TemplateBuffer)


def stands_alone(node: torch.fx.Node, args: Any) -> bool:
    """Return whether an op reads its first argument from memory and only opaque code uses it.

    Args:
        node: the op's call in the graph that is being lowered.
        args: its arguments as Inductor IR.
    """
    return comes_from_memory(args[0]) and not _has_fusible_user(node)


def uses_of(node: torch.fx.Node, result: int) -> list[torch.fx.Node]:
    """Return where an op's result of this number is taken, nothing if nobody does."""
    return [u for u in node.users if u.target is operator.getitem and u.args[1] == result]


def amax_is_used(node: torch.fx.Node) -> bool:
    """Return whether anybody takes the last result of a quantization with a given scale."""
    return bool(uses_of(node, len(node.meta["val"]) - 1))


def reads_alone(node: torch.fx.Node) -> bool:
    """Return whether nothing else is computed from what an op's first argument is computed from."""
    seen, left = {node}, [node.args[0]]
    while left:
        one = left.pop()
        if isinstance(one, torch.fx.Node) and one not in seen:
            seen.add(one)
            left += one.all_input_nodes
    return all(user in seen or user.op == "output" for one in seen - {node} for user in one.users)


def codes_are_fusible(node: torch.fx.Node) -> bool:
    """Return whether Inductor may fuse a user of a quantization's first result, its codes."""
    return any(_has_fusible_user(user) for user in uses_of(node, 0))


def _has_fusible_user(node: torch.fx.Node) -> bool:
    return any(_may_fuse(user) for user in node.users)


def _may_fuse(user: torch.fx.Node) -> bool:
    """Return whether Inductor may fuse this user: it is lowered, and not to an extern kernel."""
    if user.op == "output":
        return False
    target = user.target
    if not isinstance(target, torch._ops.OpOverload):
        return _has_fusible_user(user)  # getitem
    if target.namespace in ("aten", "prims"):
        if target in _VIEWS:
            return _has_fusible_user(user)
        return target not in _PRODUCTS
    from .registry import contracts

    contract = contracts().get(target)
    if contract is not None and contract.strategy != "lowering":
        return False
    return contract is not None or target in _compat.lowerings


_aten = torch.ops.aten
_VIEWS = {
    _aten.view.default,
    _aten.reshape.default,
    _aten.permute.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.alias.default,
}
_PRODUCTS = {_aten._scaled_mm.default, _aten.mm.default, _aten.addmm.default, _aten.bmm.default}
