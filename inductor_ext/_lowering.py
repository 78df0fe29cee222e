"""What Inductor calls in place of a registered op: run it, check it or fall back, record it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _compat, config
from ._neighbours import stands_alone
from ._out_form import call_into_planned_buffer, has_out_form
from .errors import Decline, DeclinedError, InductorExtWarning, LoweringError
from .registry import OpContract, Record, add_record

_warned: set[tuple[str, str]] = set()


def _implementation(contract: OpContract) -> Callable[..., Any]:
    found = contract.implementation
    function = _compat.resolve(found) if isinstance(found, str) else found
    assert callable(function)
    return function


def decomposition(contract: OpContract) -> Callable[..., Any]:
    """Return the function to put into Inductor's decomposition table."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        try:
            reason = _unsupported(contract, args, kwargs)
            result = None if reason is not None else _implementation(contract)(*args, **kwargs)
        except Decline as decline:
            reason = str(decline)
        except Exception as error:
            _fail(contract, f"{type(error).__name__}: {error}", error)
            return NotImplemented
        if reason is None:
            add_record(Record(contract.name, "decomposed"))
            return result
        _decline(contract, reason)
        return NotImplemented

    return decompose


def lowering(contract: OpContract) -> Callable[..., Any]:
    """Return the function to put into Inductor's lowering table."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        if contract.strategy != "lowering":
            if contract.strategy == "opaque":
                add_record(Record(contract.name, "opaque", _why_opaque(contract)))
            return _fall_back(contract, args, kwargs)
        node = _compat.V.graph.current_node
        fakes = pytree.tree_map_only(torch.fx.Node, _fake, (node.args, node.kwargs))
        if _kernel_is_faster(contract, fakes, args, node):
            add_record(Record(contract.name, "kernel", "nothing to fuse with, and it is faster"))
            return _fall_back(contract, args, kwargs)
        error = problem = None
        try:
            reason = _unsupported(contract, *fakes)
            if reason is None:
                result = _implementation(contract)(*args, **kwargs)
                problem = _contradiction(result, node.meta.get("val"))
        except Decline as decline:
            reason = str(decline)
        except Exception as raised:
            error, problem, reason = raised, f"{type(raised).__name__}: {raised}", None
        if reason is not None:
            _decline(contract, reason)
        elif problem is not None:
            _fail(contract, problem, error)
        else:
            add_record(Record(contract.name, "lowered"))
            return result
        return _fall_back(contract, args, kwargs)

    return lower


def _why_opaque(contract: OpContract) -> str:
    if contract.why is None:
        return "registered as opaque"
    node = _compat.V.graph.current_node
    fakes = pytree.tree_map_only(torch.fx.Node, _fake, (node.args, node.kwargs))
    return contract.why(*fakes[0], **fakes[1])


def _fake(node: torch.fx.Node) -> Any:
    return node.meta.get("val")


def _unsupported(contract: OpContract, args: Any, kwargs: Any) -> str | None:
    if contract.supports is None:
        return None
    answer = contract.supports(*args, **kwargs)
    if answer is True:
        return None
    return answer if isinstance(answer, str) else "its `supports` predicate returned False"


def _kernel_is_faster(contract: OpContract, fakes: Any, args: Any, node: torch.fx.Node) -> bool:
    if contract.kernel_alone is None or config.always_lower or not stands_alone(node, args):
        return False
    fake_args, fake_kwargs = fakes
    return contract.kernel_alone(*fake_args, **fake_kwargs)


def _decline(contract: OpContract, reason: str) -> None:
    add_record(Record(contract.name, "declined", reason))
    if config.strict:
        raise DeclinedError(contract.name, reason)


def _fail(contract: OpContract, reason: str, error: Exception | None) -> None:
    add_record(Record(contract.name, "failed", reason))
    if config.strict:
        raise LoweringError(contract.name, reason) from error
    if (contract.name, reason) not in _warned:
        _warned.add((contract.name, reason))
        warnings.warn(
            f"the lowering of {contract.name} failed and the opaque kernel runs instead: {reason}",
            InductorExtWarning,
            stacklevel=2,
        )


def _fall_back(contract: OpContract, args: Any, kwargs: Any) -> Any:
    """Call the op's own kernel, with inputs in the strides that eager would have given it.

    An explicit fallback gets no layout constraint from Inductor; this applies the default of
    untagged custom ops, or nothing where the op's tag says that any layout will do.  Inputs are
    realized first: a constraint on what is still a formula would compute it for this call alone,
    and codes that two GEMMs read would be written twice.
    """
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, _compat.ir.TensorBox):
            value.realize()
    node = _compat.V.graph.current_node
    if torch.Tag.flexible_layout not in contract.op.tags:
        normalize = torch.fx.operator_schemas.normalize_function
        traced = pytree.tree_map_only(torch.fx.Node, _fake, (node.args, node.kwargs))
        fake = normalize(contract.op, *node.meta.get("eager_input_vals", traced))
        real = normalize(contract.op, args, kwargs)
        if fake is not None and real is not None:
            args, kwargs = _compat.constrain_to_fake_tensors(*real, *fake)
    if contract.strategy == "opaque" and has_out_form(contract.op):
        return call_into_planned_buffer(contract.op, args, kwargs)
    return _compat.fallback_handler(contract.op, add_to_fallback_set=False)(*args, **kwargs)


def _contradiction(result: Any, fake: Any) -> str | None:
    """Compare a lowering's result with what the op's fake promised; None if they agree."""
    got = pytree.tree_leaves(result, is_leaf=lambda leaf: leaf is None)
    expected = pytree.tree_leaves(fake)
    if len(got) != len(expected):
        return f"it returned {len(got)} results, the fake says {len(expected)}"
    for index, (value, like) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(like, torch.Tensor):
            continue
        where = f"result {index}"
        if not hasattr(value, "get_dtype"):
            return f"{where} is a {type(value).__name__}, not Inductor IR"
        if value.get_dtype() != like.dtype:
            return f"{where} is {value.get_dtype()}, the fake says {like.dtype}"
        if value.get_device() != like.device:
            return f"{where} is on {value.get_device()}, the fake says {like.device}"
        if not _same_size(value.get_size(), like.shape):
            return (
                f"{where} has the shape {list(value.get_size())}, the fake says {list(like.shape)}"
            )
        stride = _fixed_strides(value)
        if stride is not None and not _same_strides(stride, like):
            return f"{where} has the strides {list(stride)}, the fake says {list(like.stride())}"
    return None


def _fixed_strides(value: Any) -> Any:
    layout = value.maybe_get_layout()
    return layout.stride if isinstance(layout, _compat.ir.FixedLayout) else None


def _same_strides(got: Any, like: torch.Tensor) -> bool:
    """Compare strides where they can be seen: in dimensions of more than one element."""
    if any(size == 0 for size in like.shape):
        return True
    seen = [i for i, size in enumerate(like.shape) if size != 1]
    return _same_size([got[i] for i in seen], [like.stride(i) for i in seen])


def _same_size(got: Any, expected: Any) -> bool:
    sizevars = _compat.V.graph.sizevars
    if len(got) != len(expected):
        return False
    for a, b in zip(got, expected, strict=True):
        symbol = b.node.expr if isinstance(b, torch.SymInt) else b
        if not sizevars.statically_known_equals(a, symbol):
            return False
    return True
