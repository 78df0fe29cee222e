"""What the backward saves: an activation that fusion removed must not come back for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import Autograd, _compat, config
from inductor_ext.testing import running

pytestmark = pytest.mark.contract


def fake_quant(x: Tensor, s: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / s), -127.0, 127.0) * s


def fake_quant_grad(grad: Tensor, x: Tensor, s: Tensor) -> Tensor:
    return torch.where((x / s).abs() <= 127.0, grad, 0.0)


def lower_fake_quant(x: Any, s: Any) -> Any:
    ops, load, scale = _compat.ops, x.make_loader(), s.make_loader()

    def element(index: Any) -> Any:
        code = ops.round(ops.truediv(load(index), scale([])))
        limit = ops.constant(127.0, torch.float32)
        return ops.mul(ops.minimum(ops.maximum(code, ops.neg(limit)), limit), scale([]))

    return _compat.ir.Pointwise.create(
        device=x.get_device(), dtype=x.get_dtype(), inner_fn=element, ranges=x.get_size()
    )


def lower_fake_quant_grad(grad: Any, x: Any, s: Any) -> Any:
    ops = _compat.ops
    load_grad, load, scale = grad.make_loader(), x.make_loader(), s.make_loader()

    def element(index: Any) -> Any:
        inside = ops.le(
            ops.abs(ops.truediv(load(index), scale([]))), ops.constant(127.0, torch.float32)
        )
        return ops.where(inside, load_grad(index), ops.constant(0.0, torch.float32))

    return _compat.ir.Pointwise.create(
        device=x.get_device(), dtype=x.get_dtype(), inner_fn=element, ranges=x.get_size()
    )


def save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.ixt_partition.fq_grad.default(grad, *ctx.saved_tensors), None


STRATEGIES: dict[str, dict[str, dict[str, Any]]] = {
    "lowering": {"fq": {"lowering": lower_fake_quant}, "grad": {"lowering": lower_fake_quant_grad}},
    "decomposition": {
        "fq": {"decomposition": fake_quant},
        "grad": {"decomposition": fake_quant_grad},
    },
}


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("ixt_partition", "FRAGMENT")
    made.define("fq(Tensor x, Tensor s) -> Tensor")
    made.define("fq_grad(Tensor g, Tensor x, Tensor s) -> Tensor")
    for name, real in (("fq", fake_quant), ("fq_grad", fake_quant_grad)):
        made.impl(name, torch.no_grad()(real), "CPU")
        torch.library.register_fake(
            f"ixt_partition::{name}", lambda x, *rest: torch.empty_like(x), lib=made
        )
    with torch.compiler.config.patch(force_disable_caches=True):
        yield made
    made._destroy()


def register(strategy: str, recomputable: bool) -> list[Any]:
    ops = torch.ops.ixt_partition
    ways = STRATEGIES[strategy]
    rule = Autograd(backward, save_inputs)
    return [
        ixt.register(
            ops.fq.default,
            reference=fake_quant,
            autograd=rule,
            recomputable=recomputable,
            **ways["fq"],
        ),
        ixt.register(
            ops.fq_grad.default,
            reference=fake_quant_grad,
            autograd=None,
            recomputable=recomputable,
            **ways["grad"],
        ),
    ]


def loss_of(x: Tensor, s: Tensor) -> Tensor:
    quantized: Tensor = torch.ops.ixt_partition.fq.default(torch.nn.functional.gelu(x), s)
    return (quantized * quantized).sum()


def saved_and_gradient() -> tuple[list[tuple[int, ...]], Tensor]:
    x = torch.linspace(-4, 4, 64).reshape(4, 16).requires_grad_()
    loss = running.compiled(running.own_code(loss_of, "loss"))(x, torch.tensor(0.05))
    saved = [tuple(tensor.shape) for tensor in loss.grad_fn.saved_tensors]
    loss.backward()
    assert x.grad is not None
    return sorted(saved), x.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gelu_into_fake_quant(library: torch.library.Library, strategy: str) -> None:
    """Without the plugin x, s and gelu(x) are saved; with it x and s."""
    contracts = register(strategy, recomputable=True)
    try:
        with config.patch(enabled=False):
            saved_off, gradient_off = saved_and_gradient()
        with config.patch(enabled=True):
            saved_on, gradient_on = saved_and_gradient()
    finally:
        for contract in contracts:
            contract.unregister()
    assert len(saved_off) >= 3
    assert saved_off.count((4, 16)) >= 2
    assert saved_on == [(), (4, 16)]
    torch.testing.assert_close(gradient_on, gradient_off)
    x = torch.linspace(-4, 4, 64).reshape(4, 16).requires_grad_()
    inner = torch.nn.functional.gelu(x)
    # straight through: d loss / d gelu = 2 fq
    inner.backward(2 * fake_quant(inner, torch.tensor(0.05)).detach())
    torch.testing.assert_close(gradient_on, x.grad)


def test_not_recomputable(library: torch.library.Library) -> None:
    """An op that says so is not recomputed: more is saved."""
    contracts = register("lowering", recomputable=False)
    try:
        with config.patch(enabled=True):
            saved, _ = saved_and_gradient()
    finally:
        for contract in contracts:
            contract.unregister()
    assert len(saved) >= 3


def test_list_is_live() -> None:
    packet = torch.ops.inductor_ext.quantize_fp8_row
    opaque = torch.ops.inductor_ext.scaled_mm
    lists = _compat.partitioners.get_default_op_list
    assert packet not in lists().recomputable_ops
    with config.patch(enabled=True):
        inside = _compat.partitioners.get_default_op_list()
        assert packet in inside.recomputable_ops
        assert packet in inside.fusible_ops
        assert opaque not in inside.recomputable_ops
        with config.patch(disabled_ops={"inductor_ext::quantize_fp8_row"}):
            assert packet not in _compat.partitioners.get_default_op_list().recomputable_ops
    assert packet not in _compat.partitioners.get_default_op_list().fusible_ops
