"""RMSNorm and LayerNorm and their backwards: against float64, compiled, fused, refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import floats
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu
from inductor_ext.decompositions import norms as formulas

OPS = torch.ops.inductor_ext
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW, BLOCK = ixt.FP8(granularity="row"), ixt.FP8(granularity="block")


def _true_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, layer: bool
) -> Tensor:
    """The formulas in float64; ``weight`` with its offset."""
    mean = x.sum(-1, keepdim=True) / x.shape[-1] if layer else torch.zeros_like(x[..., :1])
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    y = (x - mean) / (variance + eps).sqrt() * weight
    return y if bias is None else y + bias


def case(dtype: torch.dtype, weight_dtype: torch.dtype, columns: int = 200) -> list[Tensor]:
    """x with rows of many magnitudes, a tensor like it, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(64, columns, generator=generator) for _ in range(2))
    x *= torch.exp2(torch.arange(64) % 16 - 8.0)[:, None]
    weight, bias = (torch.randn(columns, generator=generator).to(weight_dtype) for _ in range(2))
    return [x.to(dtype), other.to(dtype), weight, bias]


def _slack(*parts: Tensor) -> Tensor:
    """What cancels in an fp32 sum of numbers of these sizes."""
    return 2**-20 * sum(part.double().abs() for part in parts)


def _error_of_a_sum(x: Tensor) -> float:
    """Return the most by which fp32 additions and a division may change a row's mean, for mean|.|.

    An element that goes through d additions and the division is multiplied by d + 1 factors of
    1 + e, |e| <= 2^-24, so the mean is off by (d + 1) * 2^-24 times the mean of the magnitudes, but
    for squares of 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).  In
    kernels/cuda/norms.cu and norms_backward.cu d is 3 inside a pack of 16 bytes, one less than the
    packs of a thread, 5 in its warp, and 5 over at most 32 warps.  A thread has up to 4 packs; in
    longer rows it is one of 512.  PyTorch's sums on the CPU, of which nothing is promised, are held
    to the same.
    """
    packs = x.shape[-1] * x.element_size() / 16
    additions = 3 + max(4, math.ceil(packs / 512)) - 1 + 5 + 5
    return (additions + 1) * 2**-24


PAIRS = [(d, d) for d in DTYPES] + [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS, ids=str)
def test_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype, offset: float) -> None:
    """One ulp, and the rounding of a number that fp32 arithmetic may give."""
    x, residual, weight, _ = case(dtype, weight_dtype)
    check_rms_norm(x, residual, weight, offset)


def check_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, offset: float) -> None:
    y, rstd = OPS.rms_norm(x, weight, 1e-5, offset)
    gain = weight.double() + offset
    want = _true_norm(x.double(), gain, None, 1e-5, layer=False)
    floats.require_close(y, want)
    # rstd may be off by 2^-20 (below), and two products and, with an offset, a sum by 2^-24 each
    floats.require_rounding_of(y, want, 2**-20 + 3 * 2**-24)
    mean = x.double().pow(2).mean(-1, keepdim=True)
    floats.require_close(rstd, (mean + 1e-5) ** -0.5)
    sums = OPS.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert torch.equal(sums[1], x + residual)
    again = OPS.rms_norm(x + residual, weight, 1e-5, offset)
    assert torch.equal(sums[0], again[0])
    assert torch.equal(sums[2], again[1])


@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS, ids=str)
def test_layer_norm(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, _, weight, bias = case(dtype, weight_dtype)
    check_layer_norm(x + 3 * x.abs().amax(-1, keepdim=True), weight, bias)


def check_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    y, mean, rstd = OPS.layer_norm(x, weight, bias, 1e-5)
    want = _true_norm(x.double(), weight.double(), bias.double(), 1e-5, layer=True)
    floats.require_close(y, want, _slack(weight * 16, bias))
    size = x.double().abs().mean(-1, keepdim=True)
    floats.require_close(mean, x.double().mean(-1, keepdim=True), _error_of_a_sum(x) * size)
    variance = x.double().var(-1, correction=0, keepdim=True)
    floats.require_close(rstd, (variance + 1e-5) ** -0.5)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS, ids=str)
def test_backward(dtype: torch.dtype, weight_dtype: torch.dtype, layer: bool) -> None:
    x, grad, weight, bias = case(dtype, weight_dtype)
    check_backward(grad, x, weight, bias, layer=layer)


@pytest.mark.parametrize("layer", [False, True])
def test_backward_of_long_rows(layer: bool) -> None:
    """Where a gradient is near 0, the errors of its row's sums are what is left."""
    x, grad, weight, bias = case(torch.float32, torch.bfloat16, 16392)
    check_backward(grad, x, weight, bias, layer=layer)


def check_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *, layer: bool) -> None:
    """dx = (g - mean(g) - n * mean(g * n)) * rstd: its terms are rounded, and so are their sums."""
    if layer:
        got = OPS.layer_norm_backward(grad, x, weight, bias, *OPS.layer_norm(x, weight, bias)[1:])
    else:
        got = OPS.rms_norm_backward(grad, x, weight, OPS.rms_norm(x, weight, 1e-5)[1])
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)][: 2 + layer]
    y = _true_norm(leaves[0], leaves[1], leaves[2] if layer else None, 1e-5, layer=layer)
    want = torch.autograd.grad(y, leaves, grad.double())
    n = _true_norm(x.double(), torch.ones_like(weight), None, 1e-5, layer=layer)
    scaled = grad.double() * weight.double()
    centred = x.double() - x.double().mean(-1, keepdim=True) if layer else x.double()
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-5) ** -0.5
    along = n.abs() * (scaled * n).abs().mean(-1, keepdim=True)
    sums = along + scaled.abs().mean(-1, keepdim=True) if layer else along
    rounded = _slack(scaled * rstd, along * rstd)
    floats.require_close(got[0], want[0], rounded + _error_of_a_sum(x) * sums * rstd)
    rows = (grad.double() * n).abs().sum(0)
    floats.require_close(got[1], want[1], _slack(rows))
    if layer:
        floats.require_close(got[2], want[2], _slack(grad.double().abs().sum(0)))


def test_a_gradient_that_came_around_the_norm_is_added_before_the_rounding() -> None:
    x, grad, weight, _ = case(torch.bfloat16, torch.float32)
    around = grad.flip(0)
    rstd = OPS.rms_norm(x, weight)[1]
    in_fp32 = formulas.rms_norm_backward(grad.float(), x.float(), weight, rstd)[0]
    got = OPS.rms_norm_backward(grad, x, weight, rstd, 0.0, around)[0]
    assert torch.equal(got, (in_fp32 + around.float()).bfloat16())


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_gradcheck_of_the_formula(layer: bool, affine: bool) -> None:
    """In float64, where the formulas do not round."""
    x, _, weight, bias = (
        t[..., :9][:3].double().clone() if t.dim() > 1 else t[:9].double()
        for t in case(torch.float32, torch.float32)
    )
    tensors = [x, *([weight, *([bias] if layer else [])] if affine else [])]

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            with floats.as_float64():
                y, *rest = (formulas.layer_norm if layer else formulas.rms_norm)(*given)
            ctx.save_for_backward(*given, *rest)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            given, rest = ctx.saved_tensors[: len(tensors)], ctx.saved_tensors[len(tensors) :]
            padded = (*given, *(None,) * (2 + layer - len(tensors)))
            function = formulas.layer_norm_backward if layer else formulas.rms_norm_backward
            with floats.as_float64():
                return function(grad, *padded, *rest)[: len(tensors)]

    assert torch.autograd.gradcheck(Rule.apply, [t.requires_grad_() for t in tensors])


SHAPES = [(0, 8), (3, 0), (1, 1), (5,), (0,), (2, 3, 7), (2, 0, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).bfloat16(), torch.randn(shape[-1])
    for op, rest in ((OPS.rms_norm, ()), (OPS.layer_norm, (weight,))):
        y, *statistics = op(x, weight, *rest)
        assert y.shape == shape
        assert all(s.shape == (*shape[:-1], 1) for s in statistics)
        assert not y.isnan().any()
    rstd = OPS.rms_norm(x, weight)[1]
    dx, dweight = OPS.rms_norm_backward(x, x, weight, rstd)
    assert dx.shape == shape
    assert dweight.shape == weight.shape
    if 0 in shape[:-1]:
        assert not dweight.any()


def test_rows_of_zeros_and_of_the_largest_numbers_give_no_nan() -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e15), torch.full((64,), 2e-30)])
    for op in (ixt.rms_norm, ixt.layer_norm):
        assert op(x.bfloat16()).isfinite().all()  # type: ignore[operator]


def _public(name: str) -> tuple[Callable[..., Any], list[Tensor]]:
    x, residual, weight, bias = case(torch.bfloat16, torch.bfloat16)
    return {
        "rms_norm": (lambda *t: (ixt.rms_norm(*t, offset=1.0),), [x, weight]),
        "add_rms_norm": (ixt.add_rms_norm, [x, residual, weight]),
        "layer_norm": (lambda *t: (ixt.layer_norm(*t),), [x, weight, bias]),
    }[name]


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_the_public_function_and_its_gradient_compiled(name: str) -> None:
    """Decomposed, forward and backward; eager's results but for the order of sums."""
    function, args = _public(name)
    for arg in args:
        arg.requires_grad_()
    want = function(*args)
    grads = [torch.ones_like(t) * 0.5 for t in want]
    gradients = torch.autograd.grad(want, args, grads)
    ixt.clear_records()
    with ixt.config.patch(enabled=True), torch.compiler.config.patch(force_disable_caches=True):
        got = torch.compile(function, fullgraph=True)(*args)
        theirs = torch.autograd.grad(got, args, grads)
    backward = f"{name.removeprefix('add_')}_backward"
    assert {(r.op.split("::")[1], r.outcome) for r in ixt.records()} == {
        (name, "decomposed"), (backward, "decomposed"),
    }  # fmt: skip
    for mine, other in zip((*got, *theirs), (*want, *gradients), strict=True):
        size = 2**-18 * float(other.detach().abs().max())
        floats.require_close(mine.detach(), other.detach().double(), size)


def _matrix(count: int = 1) -> list[Tensor]:
    return [torch.empty(512, 1024, dtype=torch.bfloat16) for _ in range(count)]


def _kernels(chain: Callable[..., Any], *args: Tensor) -> tuple[int, int]:
    with ixt.config.patch(enabled=True, templates=True, strict=True):
        (graph,) = fake_gpu.capture(chain, args, "sm_90")
    return len(graph.kernels), len(graph.externs)


WEIGHT = torch.empty(1024, dtype=torch.bfloat16)


def _add_in_plain_pytorch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight), total


CHAINS: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
    "rms_norm": lambda x, r, w: ixt.rms_norm(x, w),
    "rms_norm with offset": lambda x, r, w: ixt.rms_norm(x, w, offset=1.0),
    "layer_norm": lambda x, r, w: ixt.layer_norm(x, w, w),
    "add_rms_norm, the sum kept": ixt.add_rms_norm,
    "rms_norm in plain PyTorch": lambda x, r, w: F.rms_norm(x, w.shape, w),
    "add_rms_norm in plain PyTorch": _add_in_plain_pytorch,
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("fmt", [ROW, BLOCK, ixt.MXFP8()], ids=["row", "1x128", "MXFP8"])
def test_one_kernel_with_quantize(name: str, fmt: ixt.Format) -> None:
    def chain(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        made = CHAINS[name](x, residual, weight)
        y, *total = made if isinstance(made, tuple) else (made,)
        return (*ixt.quantize(y, fmt)[:2], *total)

    assert _kernels(chain, *_matrix(2), WEIGHT) == (1, 0)


def test_the_backward_fuses_with_quantize() -> None:
    """dx and its codes in one kernel; the sums over the rows are split in two, as Inductor's."""

    def codes_alone(g: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> Any:
        return ixt.quantize(OPS.rms_norm_backward(g, x, w, rstd)[0], ROW)[:2]

    rstd = torch.empty(512, 1)
    assert _kernels(codes_alone, *_matrix(2), WEIGHT, rstd) == (1, 0)

    def everything(g: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> Any:
        dx, dw = OPS.rms_norm_backward(g, x, w, rstd)
        return (*ixt.quantize(dx, ROW)[:2], dw)

    def plain(g: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> Any:
        dx, dw = formulas.rms_norm_backward(g, x, w, rstd)
        return (*ixt.quantize(dx, ROW)[:2], dw)

    args = (*_matrix(2), WEIGHT, rstd)
    assert _kernels(everything, *args) == _kernels(plain, *args)


X, W = torch.ones(2, 8), torch.ones(8)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ixt.rms_norm(None), TypeError, "`x` must be a Tensor, got NoneType"),  # type: ignore[arg-type]
    (lambda: ixt.rms_norm(X.double()), TypeError, "`x` must be bfloat16, float16 or float32"),
    (lambda: ixt.rms_norm(X.sum()), ValueError, "`x` must have at least one dimension, got 0-d"),
    (lambda: ixt.rms_norm(X, W[:4]), ValueError, r"`weight` must have the shape \(8,\), .* \(4,\)"),
    (lambda: ixt.rms_norm(X, W.int()), TypeError, "`weight` must be bfloat16, float16 or float32"),
    (lambda: ixt.rms_norm(X, W, eps=-1.0), ValueError, "`eps` must be at least 0"),
    (lambda: ixt.add_rms_norm(X, X.half()), TypeError, "`residual` must be float32, got float16"),
    (lambda: ixt.layer_norm(X, W, W[None]), ValueError, r"`bias` must have the shape \(8,\)"),
    (
        lambda: OPS.rms_norm_backward(X, X, W, X[:, 0]),
        ValueError,
        r"`rstd` must have the shape \(2, 1\), one element a row of `x`, got \(2,\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
