"""Activations, gated ones and their backwards: schemas, fakes, gradients and contracts.

Arithmetic, and the compiled form, since Inductor and our templates fuse it: ``decompositions/
activations.py``; kernels: ``kernels/cuda/activations.cu``.  On the CPU the ops run as PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from inductor_ext.decompositions import activations as reference

from ..registry import Autograd, register
from ..validation import INPUT_DTYPES, check_dtype, check_like, check_tensor
from ._library import define

APPROXIMATIONS = ("none", "tanh")


def _check(approximate: str = "none", /, **tensors: Tensor) -> Tensor:
    """Check tensors of one shape, dtype and device; return a new one like them."""
    if approximate not in APPROXIMATIONS:
        raise ValueError(f'`approximate` must be "none" or "tanh", got {approximate!r}')
    (name, first), *others = tensors.items()
    check_tensor(name, first)
    check_dtype(name, first.dtype, INPUT_DTYPES)
    for other, value in others:
        check_like(other, value, name, first)
    return first.new_empty(first.shape)


def _fake_unary(x: Tensor, approximate: str = "none") -> Tensor:
    return _check(approximate, x=x)


def _fake_unary_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    return _check(approximate, x=x, grad=grad)


def _fake_gated(a: Tensor, b: Tensor, approximate: str = "none") -> Tensor:
    return _check(approximate, a=a, b=b)


def _fake_gated_backward(
    grad: Tensor, a: Tensor, b: Tensor, approximate: str = "none"
) -> tuple[Tensor, Tensor]:
    made = _check(approximate, a=a, b=b, grad=grad)
    return made, torch.empty_like(made)


def _rule(backward: OpOverload, count: int) -> Autograd:
    """Return the gradient rule of an op of ``count`` tensors and its other arguments."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.rest = inputs[count:]

    def gradients(ctx: Any, grad: Tensor) -> Any:
        made = backward(grad, *ctx.saved_tensors, *ctx.rest)
        return (*(made if count > 1 else (made,)), *(None for _ in ctx.rest))

    return Autograd(gradients, setup_context)


def _inputs(count: int, approximations: bool) -> Callable[[torch.device], Iterator[Any]]:
    def make(device: torch.device) -> Iterator[Any]:
        generator = torch.Generator(device=device).manual_seed(0)
        for number, shape in enumerate(((3, 128), (2, 3, 40))):
            for dtype in INPUT_DTYPES:
                made = [
                    (4 * torch.randn(shape, generator=generator, device=device)).to(dtype)
                    for _ in range(count)
                ]
                rest = (APPROXIMATIONS[number],) if approximations else ()
                yield (*made, *rest)
                yield (*(t[..., 3:-2] for t in made), *rest)

    return make


def _family(name: str, tensors: str, approximations: bool) -> tuple[OpOverload, OpOverload]:
    """Define and register an activation of ``tensors`` ("x", or "a, b") and its backward."""
    names = tensors.split(", ")
    gated, how = len(names) > 1, ', str approximate="none"' if approximations else ""
    arguments = ", ".join(f"Tensor {n}" for n in names) + how
    results = "(Tensor, Tensor)" if gated else "Tensor"
    defined = []
    for op, schema, fake in (
        (name, f"({arguments}) -> Tensor", _fake_gated if gated else _fake_unary),
        (
            f"{name}_backward",
            f"(Tensor grad, {arguments}) -> {results}",
            _fake_gated_backward if gated else _fake_unary_backward,
        ),
    ):
        formula = getattr(reference, op)
        defined.append(define(op + schema, fake=fake, reference=formula, compiled=False))
    forward, backward = defined
    for op, extra, rule in ((forward, 0, _rule(backward, len(names))), (backward, 1, None)):
        short = op._schema.name.partition("::")[2]
        register(
            op,
            reference=getattr(reference, short),
            decomposition=f"inductor_ext.decompositions.activations:{short}",
            autograd=rule,
            inputs=_inputs(len(names) + extra, approximations),
        )
    return forward, backward


silu, silu_backward = _family("silu", "x", False)
gelu, gelu_backward = _family("gelu", "x", True)
relu2, relu2_backward = _family("relu2", "x", False)
swiglu, swiglu_backward = _family("swiglu", "a, b", False)
geglu, geglu_backward = _family("geglu", "a, b", True)
