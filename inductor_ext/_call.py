"""Call an op from the public API: what it refuses is a TypeError or ValueError with clear words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _compat
from .errors import CompatError
from .validation import check_no_grad

KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""CUDA kernels of ops that are written in Python: the same as the op, called with all arguments.

The dispatcher's way from Python to Python takes longer than such a kernel."""


def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an op that has no gradient; see :func:`call_with_gradient`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for value in args:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                _refuse_grad(op, args)
    return call_with_gradient(op, *args, **kwargs)


def _refuse_grad(op: Any, args: tuple[Any, ...]) -> None:
    name = op._schema.name.partition("::")[2]
    for argument, value in zip(op._schema.arguments, args, strict=False):
        check_no_grad(argument.name, value, name)


def call_with_gradient(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an op that has a gradient rule.

    While compiling, the op's fake checks the arguments: an exception raised in traced code would
    lose its message.  In eager mode the kernel checks them, and only when it refuses is the fake
    asked for the typed error, so that a good call pays nothing.
    """
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    kernel = KERNELS.get(op)
    try:
        if kernel is not None and args[0].is_cuda and is_plain((*args, *kwargs.values())):
            return kernel(*args, **kwargs)
        return op(*args, **kwargs)
    except RuntimeError:
        _raise_what_the_fake_says(op, args, kwargs)
        raise


_PLAIN = frozenset((torch.Tensor, type(None), torch.dtype, bool, int, str))


def is_plain(args: tuple[Any, ...]) -> bool:
    """Return whether the dispatcher would call the arguments' kernel and do nothing else.

    Subclasses of Tensor, modes, transforms such as vmap, traces and the profiler want to see ops.
    """
    if not _PLAIN.issuperset(map(type, args)):
        return False
    asked = _questions()
    if asked is None:
        return False
    dispatch_modes, function_modes, profiler_runs, transform, jit_trace = asked
    if dispatch_modes() or function_modes() or profiler_runs():
        return False
    return transform() is None and jit_trace() is None


@functools.cache
def _questions() -> tuple[Callable[[], Any], ...] | None:
    """Return what to ask PyTorch about the state that it is in, None if that has moved."""
    try:
        return (
            _compat.dispatch_modes, _compat.function_modes, _compat.profiler_runs,
            _compat.transform, _compat.jit_trace,
        )  # fmt: skip
    except CompatError:
        return None


def _raise_what_the_fake_says(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    mode = _compat.FakeTensorMode()
    fakes, named = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    with mode:
        try:
            op(*fakes, **named)
        except (TypeError, ValueError) as refusal:
            raise refusal from None
