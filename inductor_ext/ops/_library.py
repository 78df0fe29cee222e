"""The ``inductor_ext`` operator namespace: how a built-in op is defined."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from .. import _compat
from ..errors import InductorExtWarning
from ..validation import check_no_grad

LIBRARY = torch.library.Library("inductor_ext", "DEF")
_warned = False


def define(
    schema: str, *, fake: Callable[..., Any], reference: Callable[..., Any], compiled: bool = True
) -> OpOverload:
    """Define an op without a gradient, its fake, and the kernel that runs without a compiled one.

    Args:
        schema: "name(arguments) -> results", or "name.out(..., *, Tensor(a!) out) -> ()", which
            is called with a buffer that Inductor planned.  (Returning nothing, it can be made
            functional on every torch; ``torch.Tag.out``, since 2.13, would want ``out`` back.)
        fake: shapes, strides and dtypes of the results; also checks the arguments.
        reference: plain PyTorch, run in eager mode on devices without a compiled kernel.
        compiled: whether a compiled kernel exists, so that running the reference is worth a word.
    """
    name = schema.partition("(")[0]
    packet, _, overload_name = name.partition(".")
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    names = [argument.split("=")[0].split()[-1] for argument in _arguments(schema)]

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for argument, value in (*zip(names, args, strict=False), *kwargs.items()):
            check_no_grad(argument, value, name)  # autograd=None, said where compilers see it
        return fake(*args, **kwargs)

    torch.library.register_fake(f"inductor_ext::{name}", checked, lib=LIBRARY)

    @functools.wraps(reference)
    def fallback(*args: Any, **kwargs: Any) -> Any:
        checked(*args, **kwargs)
        if compiled:
            _warn_once(name)
        with torch.no_grad():  # as a compiled kernel: no gradient unless the contract has a rule
            return reference(*args, **kwargs)

    LIBRARY.impl(name, fallback, "CompositeExplicitAutograd")
    overload = getattr(getattr(torch.ops.inductor_ext, packet), overload_name or "default")
    assert isinstance(overload, OpOverload)
    return overload


@functools.cache
def has_cuda_kernel(name: str) -> bool:
    """Return whether a compiled library that holds the kernel of a private op is loaded."""
    found: bool = _compat.dispatch_has_kernel(f"inductor_ext::{name}", "CUDA")
    return found


def _arguments(schema: str) -> list[str]:
    return schema[schema.index("(") + 1 : schema.rindex(") ->")].split(", ")


def _warn_once(name: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"inductor_ext::{name} has no compiled kernel for this device and runs as plain "
            "PyTorch: right, but slow. `python -m inductor_ext doctor` says what to install.",
            InductorExtWarning,
            stacklevel=4,
        )
