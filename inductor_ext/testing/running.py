"""Run an op eagerly, on fakes, and compiled with the plugin on or off, from fresh state."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext import _compat, config, registry
from inductor_ext.registry import OpContract, Record

_fresh = itertools.count()


def own_code(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a copy of a function under a code object of its own.

    Dynamo keeps compiled code by code object; a copy starts with none, whatever ran before it,
    and nobody's compiled functions have to be reset.
    """
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=f"{name}_{next(_fresh)}")
    return types.FunctionType(code, fn.__globals__, code.co_name, fn.__defaults__, fn.__closure__)


def caller(op: Callable[..., Any], name: str = "call") -> Callable[..., Any]:
    """Return a fresh function that calls ``op`` and nothing else."""

    def call(*args: Any) -> Any:
        return op(*args)

    return own_code(call, name)


@contextlib.contextmanager
def plugin(enabled: bool) -> Iterator[None]:
    """Turn the plugin on or off, with exact numerics, no disabled op and no compile cache.

    Without caches every compilation lowers anew, so that its records tell what happened.
    """
    with (
        config.patch(
            enabled=enabled,
            strict=False,
            numerics="exact",
            disabled_ops=frozenset(),
            always_lower=True,
        ),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        yield


def compiled(fn: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    """Compile the whole of ``fn`` with Inductor."""
    run: Callable[..., Any] = torch.compile(fn, fullgraph=True, dynamic=dynamic)
    return run


def fake_result(contract: OpContract, args: tuple[Any, ...]) -> Any:
    """Run the op on fake copies of its arguments."""
    mode = _compat.FakeTensorMode()
    fakes = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)
    with mode:
        return contract.op(*fakes)


def records_of(contract: OpContract) -> list[Record]:
    """Return the op's records since :func:`inductor_ext.registry.clear_records`."""
    return [record for record in registry.records() if record.op == contract.name]


def stays_opaque(contract: OpContract, args: tuple[Any, ...]) -> bool:
    """Return whether the contract says itself that these arguments are not compiled."""
    return contract.supports is not None and contract.supports(*args) is not True


def implementation(contract: OpContract) -> Callable[..., Any]:
    """Return the contract's lowering or decomposition as a function."""
    found = contract.implementation
    function = _compat.resolve(found) if isinstance(found, str) else found
    assert callable(function)
    return function


def graphs() -> int:
    """Return how many graphs Dynamo has compiled in this process."""
    return int(_compat.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def no_size_is_special() -> Iterator[None]:
    """Compile without PyTorch's own specialisation of the sizes 0 and 1."""
    with _compat.fx_config.patch(backed_size_oblivious=True):
        yield


@contextlib.contextmanager
def no_size_is_equal() -> Iterator[None]:
    """Compile without PyTorch's guess that sizes are equal for good if they are at first."""
    with _compat.fx_config.patch(use_duck_shape=False):
        yield
