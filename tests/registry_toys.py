"""Ops for the tests of ``register``: the kernel doubles, lowerings multiply by other numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from inductor_ext import _compat, _install, registry
from inductor_ext.testing import running

_numbers = itertools.count()
ALL_TWOS = torch.full((4,), 2.0)


def double(x: Tensor) -> Tensor:
    return x * 2


def multiply(x: Any, factor: float, dtype: torch.dtype | None = None, size: Any = None) -> Any:
    """The lowering that the others are made of; ``factor`` tells in the result that it ran."""
    load, own = x.make_loader(), x.get_dtype()
    ops = _compat.ops
    return _compat.ir.Pointwise.create(
        device=x.get_device(),
        dtype=dtype or own,
        inner_fn=lambda index: ops.to_dtype(
            ops.mul(load(index[-1:]), ops.constant(factor, own)), dtype or own
        ),
        ranges=size or x.get_size(),
    )


def triple(x: Any) -> Any:
    return multiply(x, 3.0)


def fivefold(x: Any) -> Any:
    return multiply(x, 5.0)


class Toys:
    """Makes ops of one's own: the op doubles, and counts how often its kernel runs."""

    def __init__(self) -> None:
        self.library = torch.library.Library("ixt_registry", "FRAGMENT")
        self.calls: dict[OpOverload, int] = {}

    def op(self, schema: str = "(Tensor x) -> Tensor") -> OpOverload:
        name = f"op{next(_numbers)}"
        self.library.define(name + schema)

        def real(x: Tensor, *rest: Any) -> Tensor:
            self.calls[made] += 1
            with torch.no_grad():  # as a compiled kernel: no gradient without a rule
                return x * 2

        self.library.impl(name, real, "CPU")
        torch.library.register_fake(
            f"ixt_registry::{name}", lambda x, *rest: torch.empty_like(x), lib=self.library
        )
        made: OpOverload = getattr(torch.ops.ixt_registry, name).default
        self.calls[made] = 0
        return made


@pytest.fixture
def toys() -> Iterator[Toys]:
    made = Toys()
    registry.clear_records()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield made
    for op in made.calls:
        if op in registry.contracts():
            registry.contract(op).unregister()
    assert set(_install.installed()) <= set(registry.contracts())
    made.library._destroy()


def compiled(op: OpOverload, x: Tensor | None = None) -> Tensor:
    """Compile ``op`` anew, whatever was compiled before, and run it on ones."""
    run = running.compiled(running.caller(op))
    result: Tensor = run(torch.ones(4) if x is None else x)
    return result


def factor(op: OpOverload) -> float:
    return float(compiled(op)[0])


def outcomes(op: OpOverload) -> list[tuple[str, str]]:
    name = registry.op_name(op)
    return [(r.outcome, r.reason) for r in registry.records() if r.op == name]


def raised(error: BaseException | None, kind: type[BaseException]) -> BaseException:
    """Find an error of ours in or below what torch.compile raised."""
    while error is not None:
        if isinstance(error, kind):
            return error
        error = error.__cause__ or getattr(error, "inner_exception", None) or error.__context__
    pytest.fail(f"there is no {kind.__name__} in the chain")


def name_of_gradient(result: Tensor) -> str:
    assert result.grad_fn is not None
    return result.grad_fn.name()
