"""RMSNorm and LayerNorm and their backwards: schemas, fakes, gradients and contracts.

Arithmetic, and the compiled form, since templates and Inductor fuse it like any plain norm:
``decompositions/norms.py``; kernels: ``kernels/cuda/norms.cu`` and ``norms_backward.cu``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from inductor_ext.decompositions import norms as reference

from ..registry import Autograd, register
from ..validation import (
    INPUT_DTYPES,
    check_dtype,
    check_eps,
    check_like,
    check_same_device,
    check_tensor,
)
from ._library import define
from .amax import check_float


def _check_vector(name: str, value: Tensor | None, x: Tensor) -> None:
    """Check a weight or bias: (K,), of any floating dtype that ``x`` may have."""
    if value is None:
        return
    check_tensor(name, value)
    check_dtype(name, value.dtype, INPUT_DTYPES)
    check_same_device(name, value, "x", x)
    if value.dim() != 1 or value.shape[0] != x.shape[-1]:
        raise ValueError(
            f"`{name}` must have the shape ({x.shape[-1]},), one element a column of `x`, got "
            f"{tuple(value.shape)}"
        )


def _check_statistic(name: str, value: Tensor, x: Tensor) -> None:
    """Check a mean or rstd: float32 (*, 1)."""
    check_tensor(name, value)
    check_dtype(name, value.dtype, (torch.float32,))
    check_same_device(name, value, "x", x)
    if value.shape != (*x.shape[:-1], 1):
        raise ValueError(
            f"`{name}` must have the shape {(*x.shape[:-1], 1)}, one element a row of `x`, got "
            f"{tuple(value.shape)}"
        )


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _vector(value: Tensor | None, x: Tensor) -> Tensor:
    if value is None:
        return x.new_empty((0,), dtype=torch.float32)
    return value.new_empty(value.shape)


def _fake_rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    check_float(x, rowwise=True)
    _check_vector("weight", weight, x)
    check_eps(eps)
    return _like(x), _statistic(x)


def _fake_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float = 0.0,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_float(x, rowwise=True)
    check_like("grad", grad, "x", x)
    _check_vector("weight", weight, x)
    _check_statistic("rstd", rstd, x)
    if add is not None:
        check_like("add", add, "x", x)
    return _like(x), _vector(weight, x)


def _fake_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _fake_rms_norm(x, weight, eps, offset)
    check_like("residual", residual, "x", x)
    return y, _like(x), rstd


def _fake_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    check_float(x, rowwise=True)
    _check_vector("weight", weight, x)
    _check_vector("bias", bias, x)
    check_eps(eps)
    return _like(x), _statistic(x), _statistic(x)


def _fake_layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    check_float(x, rowwise=True)
    check_like("grad", grad, "x", x)
    _check_vector("weight", weight, x)
    _check_vector("bias", bias, x)
    _check_statistic("mean", mean, x)
    _check_statistic("rstd", rstd, x)
    return _like(x), _vector(weight, x), _vector(bias, x)


def _define(schema: str, fake: Callable[..., Any]) -> OpOverload:
    formula = getattr(reference, schema.partition("(")[0])
    return define(schema, fake=fake, reference=formula, compiled=False)


rms_norm = _define(
    "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-06, float offset=0.) -> (Tensor, Tensor)",
    _fake_rms_norm,
)
rms_norm_backward = _define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, float offset=0., "
    "Tensor? add=None) -> (Tensor, Tensor)",
    _fake_rms_norm_backward,
)
add_rms_norm = _define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-06, "
    "float offset=0.) -> (Tensor, Tensor, Tensor)",
    _fake_add_rms_norm,
)
layer_norm = _define(
    "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> "
    "(Tensor, Tensor, Tensor)",
    _fake_layer_norm,
)
layer_norm_backward = _define(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, "
    "Tensor rstd) -> (Tensor, Tensor, Tensor)",
    _fake_layer_norm_backward,
)


# ---- gradients: statistics are not differentiable, they are by-products for the backward


def _rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, offset = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset = offset


def _rms_norm_gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = rms_norm_backward(grad, x, weight, rstd, ctx.offset)
    return dx, None if weight is None else dweight, None, None


def _add_rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.offset = inputs[4]


def _add_rms_norm_gradients(ctx: Any, grad: Tensor, grad_sum: Tensor, _: Any) -> Any:
    total, weight, rstd = ctx.saved_tensors
    dx, dweight = rms_norm_backward(grad, total, weight, rstd, ctx.offset, grad_sum)
    return dx, dx, None if weight is None else dweight, None, None


def _layer_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _layer_norm_gradients(ctx: Any, grad: Tensor, *_: Any) -> Any:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = layer_norm_backward(grad, x, weight, bias, mean, rstd)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None


# ---- inputs of the parity harness


def _tensors(device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield x, another tensor like it, and a weight, in every dtype and two layouts."""
    generator = torch.Generator(device=device).manual_seed(0)
    for shape, dtype in itertools.product(((3, 128), (2, 3, 72)), INPUT_DTYPES):
        x, other = (
            torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)
        )
        weight = torch.randn(shape[-1], generator=generator, device=device)
        yield x, other, weight.to(dtype)
        yield x[..., 3:-2], other[..., 3:-2], weight[3:-2]


def _rms_norm_inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, _, weight) in enumerate(_tensors(device)):
        yield (x, weight, 1e-5, float(number % 2))
    yield (x,)


def _rms_norm_backward_inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, grad, weight) in enumerate(_tensors(device)):
        rstd = reference.rms_norm(x, weight)[1]
        yield (grad, x, weight, rstd, float(number % 2), grad if number % 3 else None)
    yield (grad, x, None, rstd)


def _add_rms_norm_inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, residual, weight) in enumerate(_tensors(device)):
        yield (x, residual, weight, 1e-5, float(number % 2))
    yield (x, residual)


def _layer_norm_inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, _, weight) in enumerate(_tensors(device)):
        yield (x, weight, weight.flip(0) if number % 2 else None)
    yield (x,)


def _layer_norm_backward_inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, grad, weight) in enumerate(_tensors(device)):
        bias = weight.flip(0) if number % 2 else None
        yield (grad, x, weight, bias, *reference.layer_norm(x, weight)[1:])
    yield (grad, x, None, None, *reference.layer_norm(x)[1:])


_RULES: dict[OpOverload, tuple[Autograd | None, Callable[..., Any]]] = {
    rms_norm: (Autograd(_rms_norm_gradients, _rms_norm_context), _rms_norm_inputs),
    rms_norm_backward: (None, _rms_norm_backward_inputs),
    add_rms_norm: (Autograd(_add_rms_norm_gradients, _add_rms_norm_context), _add_rms_norm_inputs),
    layer_norm: (Autograd(_layer_norm_gradients, _layer_norm_context), _layer_norm_inputs),
    layer_norm_backward: (None, _layer_norm_backward_inputs),
}
for _op, (_autograd, _inputs) in _RULES.items():
    _name = _op._schema.name.partition("::")[2]
    register(
        _op,
        reference=getattr(reference, _name),
        decomposition=f"inductor_ext.decompositions.norms:{_name}",
        autograd=_autograd,
        inputs=_inputs,
    )
