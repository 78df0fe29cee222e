"""What a child process does; see ``zygote.py``.  inductor_ext is first imported in the child."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

OPTIONS: tuple[dict[str, Any] | None, ...] = (None, {"max_fusion_size": 32})


def _start(package: str, flags: dict[str, Any]) -> Any:
    """Import the toy package, whose registrations plug it in, and set the plugin's flags."""
    sys.path.insert(0, package)
    import toy_ops

    import inductor_ext

    with inductor_ext.config.patch():  # patching nothing is allowed, too
        pass
    for name, value in flags.items():
        setattr(inductor_ext.config, name, value)
    return toy_ops


def _counts() -> dict[str, int]:
    aot, fx = counters["aot_autograd"], counters["inductor"]
    return {
        "aot_hit": aot["autograd_cache_hit"],
        "aot_miss": aot["autograd_cache_miss"],
        "aot_bypass": aot["autograd_cache_bypass"],
        "fx_hit": fx["fxgraph_cache_hit"],
        "fx_miss": fx["fxgraph_cache_miss"],
        "fx_bypass": fx["fxgraph_cache_bypass"],
    }


def _variants(fn: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Compile with and without ``options``, each under a code object of its own."""
    import types

    made = []
    for number, options in enumerate(OPTIONS):
        code = fn.__code__.replace(co_name=f"{fn.__name__}_{number}")
        copy = types.FunctionType(code, fn.__globals__, code.co_name, None, fn.__closure__)
        made.append(torch.compile(copy, options=options, fullgraph=True))
    return made


def forward(package: str, ops: list[str], **flags: Any) -> dict[str, Any]:
    """Compile ``op(x) + 1`` for x = 1 and return, for each op and option, the factor it used."""
    toy = _start(package, flags)
    factors: dict[str, list[float]] = {}
    for name in ops:
        op = getattr(torch.ops.ixt_toy, name).default

        def closed(x: torch.Tensor) -> torch.Tensor:
            return op(x) + 1  # noqa: B023 (used up within the iteration)

        factors[name] = [run(torch.ones(4))[0].item() - 1 for run in _variants(closed)]
    return {"factors": factors, "calls": dict(toy.CALLS), **_counts()}


def backward(package: str, toggle: dict[str, Any] | None = None, **flags: Any) -> dict[str, Any]:
    """Return the gradient's factor of ``graded``, compiled; flags may change before backward."""
    toy = _start(package, flags)
    import inductor_ext

    op = torch.ops.ixt_toy.graded.default

    def closed(x: torch.Tensor) -> torch.Tensor:
        return op(x) + 1

    factors, gradients = [], []
    for run in _variants(closed):
        for name, value in flags.items():
            setattr(inductor_ext.config, name, value)
        x = torch.ones(4, requires_grad=True)
        y = run(x)
        for name, value in (toggle or {}).items():
            setattr(inductor_ext.config, name, value)
        y.sum().backward()
        assert x.grad is not None
        factors.append(y[0].item() - 1)
        gradients.append(x.grad[0].item())
    return {"factors": factors, "gradients": gradients, "calls": dict(toy.CALLS), **_counts()}


def quantize(enabled: bool, numerics: str = "exact") -> dict[str, Any]:
    """Compile scale -> quantize -> dequantize with our own ops through the public API."""
    import inductor_ext as ixt

    ixt.config.enabled, ixt.config.numerics = enabled, numerics
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

    def closed(x: torch.Tensor) -> torch.Tensor:
        q = ixt.quantize(x * 1.37, ixt.FP8(granularity="row"))
        return ixt.dequantize(q, ixt.FP8()).float()

    values = [run(x).flatten().tolist() for run in _variants(closed)]
    outcomes = sorted(record.outcome for record in ixt.records())
    return {"values": values, "outcomes": outcomes, **_counts()}
