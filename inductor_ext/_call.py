"""Call an op from the public API: what it refuses is a TypeError or ValueError with clear words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _compat
from .validation import check_no_grad


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
    try:
        return op(*args, **kwargs)
    except RuntimeError:
        _raise_what_the_fake_says(op, args, kwargs)
        raise


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
