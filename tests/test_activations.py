"""Activations, gated ones and their backwards: against float64, compiled, fused, refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import floats
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu
from inductor_ext.decompositions import activations as formulas

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = {
    "silu": 1, "gelu": 1, "gelu tanh": 1, "relu2": 1, "swiglu": 2, "geglu": 2, "geglu tanh": 2,
}  # fmt: skip


def _op(name: str, suffix: str = "") -> Callable[..., Any]:
    """Return the op of a name such as "gelu tanh"."""
    base, _, approximate = name.partition(" ")
    op = getattr(torch.ops.inductor_ext, base + suffix).default
    return (lambda *args: op(*args, approximate)) if approximate else op


def _true_unary(name: str, x: Tensor) -> Tensor:
    """The formulas in float64, written without cancellation."""
    if name.startswith(("silu", "swiglu")):
        return x * torch.sigmoid(x)
    if name.startswith("relu2"):
        return torch.where(x > 0, x * x, 0)
    if name.endswith("tanh"):
        return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return 0.5 * x * torch.special.erfc(-x / 2**0.5)


def _true(name: str, *args: Tensor) -> Tensor:
    y = _true_unary(name, args[0])
    return y * args[1] if len(args) > 1 else y


def _true_gradients(name: str, grad: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    leaves = [a.clone().requires_grad_() for a in args]
    return torch.autograd.grad(_true(name, *leaves), leaves, grad)


def values(count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.cat([torch.randn(3000, generator=generator) * s for s in (0.01, 1, 8)])
    order = [torch.randperm(len(spread), generator=generator) for _ in range(count)]
    return [spread[o].to(dtype).view(90, 100) for o in order]


def _slack(name: str, *factors: Tensor, backward: bool = False) -> Tensor:
    """What fp32 loses where the function itself is tiny: exp overflows, 1 + erf cancels."""
    size = torch.ones_like(factors[0].double())
    for factor in factors:
        size = size * factor.double().abs().clamp(min=1)
    if name == "relu2":
        return 0 * size
    if backward:
        return 2**-21 * size
    return (2**-118 if name in ("silu", "swiglu") else 2**-21) * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_within_one_ulp_of_float64(name: str, dtype: torch.dtype) -> None:
    args = values(NAMES[name], dtype)
    check_forward(name, *args)


def check_forward(name: str, *args: Tensor) -> None:
    got = _op(name)(*args)
    want = _true(name, *(a.double() for a in args))
    floats.require_close(got, want, _slack(name, *args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_backward_within_one_ulp_of_float64(name: str, dtype: torch.dtype) -> None:
    check_backward(name, *values(NAMES[name] + 1, dtype))


def check_backward(name: str, grad: Tensor, *args: Tensor) -> None:
    got = _op(name, "_backward")(grad, *args)
    want = _true_gradients(name, *(a.double() for a in (grad, *args)))
    for mine, true in zip(got if NAMES[name] > 1 else (got,), want, strict=True):
        floats.require_close(mine, true, _slack(name, grad, *args, backward=True))


@pytest.mark.parametrize("name", [n for n, count in NAMES.items() if count == 1])
def test_every_bf16_value(name: str) -> None:
    """All 65,536: finite values give no NaN, backwards neither; NaN stays NaN."""
    check_every_bf16_value(name, "cpu")


def check_every_bf16_value(name: str, device: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.bfloat16)
    finite = x.isfinite()
    y, slope = _op(name)(x), _op(name, "_backward")(torch.ones_like(x), x)
    assert not y[finite].isnan().any()
    assert not slope[finite].isnan().any()
    assert y[x.isnan()].isnan().all()
    usual = x.abs() < 2.0**126  # beyond, PyTorch's own gelu has a factor of 2 that overflows
    floats.require_close(y[usual], _true(name, x[usual].double()), _slack(name, x[usual]))


def test_relu2_bit_for_bit() -> None:
    """One product, rounded once: whatever computes it."""
    check_relu2("cpu")


def check_relu2(device: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.bfloat16)
    v = x.double().clamp(min=0)
    got, want = ixt.relu2(x), (v * v).float().bfloat16()
    both = got.isnan() & want.isnan()
    assert torch.equal(got[~both], want[~both])
    with ixt.config.patch(enabled=True):
        compiled = torch.compile(ixt.relu2, fullgraph=True)(x)
    assert torch.equal(compiled[~both], want[~both])
    assert compiled[both].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck_of_the_formula(name: str) -> None:
    """In float64, where the formulas do not round."""
    base, _, approximate = name.partition(" ")
    rest = (approximate,) if approximate else ()
    args = [a[:2, :7].double().requires_grad_() for a in values(NAMES[name], torch.float32)]

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            with floats.as_float64():
                return getattr(formulas, base)(*tensors, *rest)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            with floats.as_float64():
                return getattr(formulas, base + "_backward")(grad, *ctx.saved_tensors, *rest)

    assert torch.autograd.gradcheck(Rule.apply, args)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (), (5,), (2, 3, 7)], ids=str)
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    args = [torch.randn(shape).bfloat16() for _ in range(NAMES[name])]
    got = _op(name)(*args)
    assert got.shape == shape
    floats.require_close(got, _true(name, *(a.double() for a in args)), _slack(name, *args))


@pytest.mark.parametrize("name", NAMES)
def test_the_public_function_and_its_gradient_compiled(name: str) -> None:
    base, _, approximate = name.partition(" ")
    rest = (approximate,) if approximate else ()
    function = getattr(ixt, base)
    args = [a.requires_grad_() for a in values(NAMES[name] + 1, torch.bfloat16)]
    grad = args.pop().detach()
    want = function(*args, *rest)
    gradients = torch.autograd.grad(want, args, grad)
    ixt.clear_records()
    with ixt.config.patch(enabled=True), torch.compiler.config.patch(force_disable_caches=True):
        got = torch.compile(lambda *a: function(*a, *rest), fullgraph=True)(*args)
        theirs = torch.autograd.grad(got, args, grad)
    assert {(r.op.split("::")[1], r.outcome) for r in ixt.records()} == {
        (base, "decomposed"), (f"{base}_backward", "decomposed"),
    }  # fmt: skip
    slack = _slack(name, *args, grad, backward=True)
    for mine, other in zip((got, *theirs), (want, *gradients), strict=True):
        floats.require_close(mine.detach(), other.detach().double(), slack.detach())


FORMATS: dict[str, ixt.Format] = {
    "row": ixt.FP8(granularity="row"),
    "1x128": ixt.FP8(granularity="block"),
    "MXFP8": ixt.MXFP8(),
}


def _kernels(chain: Callable[..., Any], count: int, templates: bool = True) -> tuple[int, int]:
    args = [torch.empty(512, 1024, dtype=torch.bfloat16) for _ in range(count)]
    with ixt.config.patch(enabled=True, templates=templates, strict=True):
        (graph,) = fake_gpu.capture(chain, args, "sm_90")
    return len(graph.kernels), len(graph.externs)


@pytest.mark.parametrize("templates", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "silu", "relu2"])
def test_one_kernel_with_quantize(name: str, fmt: str, templates: bool) -> None:
    def chain(*tensors: Tensor) -> Any:
        return ixt.quantize(_op(name)(*tensors), FORMATS[fmt])[:2]

    assert _kernels(chain, NAMES[name], templates) == (1, 0)


def test_the_backward_of_swiglu_fuses_with_quantize() -> None:
    def chain(g: Tensor, a: Tensor, b: Tensor) -> Any:
        da, db = torch.ops.inductor_ext.swiglu_backward(g, a, b)
        both = torch.cat([da, db], -1)
        return ixt.quantize(both, ixt.FP8(granularity="row"))[:2]

    assert _kernels(chain, 3) == (1, 0)


def _plain_swiglu_backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    g, u, v = grad.float(), a.float(), b.float()
    s = torch.sigmoid(u)
    return (g * v * s * (1 + u * (1 - s))).to(a.dtype), (g * u * s).to(a.dtype)


@pytest.mark.parametrize("fmt", ["1x128", "MXFP8"])
def test_the_backward_of_swiglu_and_codes_both_ways_is_a_kernel_a_gradient(fmt: str) -> None:
    """As many as the same written in plain PyTorch takes."""

    def chain(backward: Callable[..., Any], *args: Tensor) -> Any:
        made = [ixt.quantize(t, FORMATS[fmt], orientation="both") for t in backward(*args)]
        return [t for both in made for q in (both.row, both.column) for t in q if t is not None]

    for backward in (torch.ops.inductor_ext.swiglu_backward, _plain_swiglu_backward):
        assert _kernels(functools.partial(chain, backward), 3) == (2, 0)


X = torch.ones(2, 8)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ixt.silu(None), TypeError, "`x` must be a Tensor, got NoneType"),  # type: ignore[arg-type]
    (lambda: ixt.silu(X.int()), TypeError, "`x` must be bfloat16, float16 or float32, got int32"),
    (lambda: ixt.gelu(X, "erf"), ValueError, '`approximate` must be "none" or "tanh", got \'erf\''),  # type: ignore[arg-type]
    (lambda: ixt.swiglu(X, X[:, :4]), ValueError, "`b` must have the shape of `a`, "),
    (lambda: ixt.geglu(X, X.half()), TypeError, "`b` must be float32, got float16"),
    (
        lambda: torch.ops.inductor_ext.silu_backward(X[0], X),
        ValueError,
        r"`grad` must have the shape of `x`, \(2, 8\), got \(8,\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
