"""Bad arguments: the same clear error in eager mode, from the raw op, on fakes and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat

pytestmark = pytest.mark.contract
ROW, TENSOR = ixt.FP8(granularity="row"), ixt.FP8(granularity="tensor")
E4M3 = torch.float8_e4m3fn
X = torch.randn(4, 8)
CODES = X.to(E4M3)
SCALE = torch.tensor(2.0)


def quantize(x: Any) -> Any:
    return ixt.quantize(x, ROW)[:2]


def quantize_with(scale: Any) -> Any:
    return tuple(ixt.quantize(X, TENSOR, scale))


def dequantize(codes: Any, scale_inv: Any = SCALE) -> Tensor:
    return ixt.dequantize((codes, scale_inv), ROW)


def scaled_mm(a: Any, b: Any, scale_a: Any = SCALE, bias: Any = None) -> Tensor:
    return ixt.scaled_mm(ixt.Quantized(a, scale_a), ixt.Quantized(b, SCALE), ROW, bias=bias)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "dtype": (quantize, (X.double(),), "`x` must be bfloat16, float16 or float32, got float64"),
    "integers": (quantize, (X.int(),), "`x` must be bfloat16, .* got int32"),
    "complex": (quantize, (X.to(torch.complex64),), "`x` must be bfloat16, .* got complex64"),
    "0-d rows": (quantize, (torch.tensor(1.0),), "`x` must have at least one dimension"),
    "gradient": (quantize, (X.clone().requires_grad_(),), "`x` must not require grad"),
    "scale's dtype": (quantize_with, (SCALE.double(),), "`scale` must be float32, got float64"),
    "scale's shape": (quantize_with, (torch.ones(3, 1),), r"`scale` must have one element for"),
    "scale's gradient": (quantize_with, (SCALE.clone().requires_grad_(),), "`scale` must not"),
    "codes": (dequantize, (X,), "`codes` must be float8_e4m3fn or float8_e5m2, got float32"),
    "codes' gradient": (dequantize, (CODES.clone().requires_grad_(),), "`codes` must not require"),
    "scale_inv's shape": (dequantize, (CODES, torch.ones(4)), "`scale_inv` must have one element"),
    "inner sizes": (scaled_mm, (CODES, CODES[:, 1:]), "`b` must have the K of `a`, 8, got 7"),
    "dimensions": (scaled_mm, (CODES, CODES[0]), "`b.codes` must have 2 dimensions, got 1"),
    "scale_a's shape": (scaled_mm, (CODES, CODES, torch.ones(4, 2)), r"`scale_a` must have one"),
    "bias's shape": (
        scaled_mm, (CODES, CODES, SCALE, torch.ones(5).bfloat16()), r"`bias` must have the"
    ),
    "bias's gradient": (
        scaled_mm, (CODES, CODES, SCALE, torch.ones(4).bfloat16().requires_grad_()),
        "`bias` must not require grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_eager_and_compiled_say_the_same(case: str) -> None:
    function, arguments, message = CASES[case]
    with pytest.raises((TypeError, ValueError), match=message):
        function(*arguments)
    for enabled in (False, True):
        torch.compiler.reset()
        with ixt.config.patch(enabled=enabled):
            compiled = torch.compile(function, fullgraph=True, backend="inductor")
            with pytest.raises(Exception, match=message):
                compiled(*arguments)


@pytest.mark.parametrize("case", ["dtype", "scale's dtype", "codes", "inner sizes"])
def test_fakes_say_the_same(case: str) -> None:
    function, arguments, message = CASES[case]
    with _compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        with pytest.raises((TypeError, ValueError), match=message):
            function(*fakes)


RAW: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: torch.ops.inductor_ext.quantize_fp8_row(X.double(), E4M3),
        "`x` must be bfloat16, float16 or float32",
    ),
    "target": (
        lambda: torch.ops.inductor_ext.quantize_fp8_row(X, torch.int8),
        "`dtype` must be float8_e4m3fn or float8_e5m2",
    ),
    "eps": (
        lambda: torch.ops.inductor_ext.quantize_fp8_tensor(X, E4M3, 1e39),
        "`eps` must be at least 0 and at most",
    ),
    "nan eps": (
        lambda: torch.ops.inductor_ext.quantize_fp8_tensor(X, E4M3, float("nan")),
        "`eps` must be at least 0 and at most",
    ),
    "scale": (
        lambda: torch.ops.inductor_ext.quantize_fp8_static(X, torch.ones(8), E4M3),
        "`scale` must have 1 element or a scale a row",
    ),
}


@pytest.mark.parametrize("case", RAW)
def test_raw_ops_never_compute_on_garbage(case: str) -> None:
    call, message = RAW[case]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested", "list"])
def test_only_dense_tensors(kind: str) -> None:
    made: dict[str, Callable[[], Any]] = {
        "sparse_coo": X.to_sparse,
        "sparse_csr": X.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([X, X[:2]]),
        "list": X.tolist,
    }
    expected = "must be a Tensor, got list" if kind == "list" else "must be a dense tensor, got a"
    with pytest.raises(TypeError, match=expected):
        ixt.quantize(made[kind](), ROW)


def test_granularity_and_scale_must_agree() -> None:
    with pytest.raises(ValueError, match=r'one element for granularity "tensor", got \(4, 1\)'):
        ixt.quantize(X, TENSOR, torch.ones(4, 1))
    with pytest.raises(ValueError, match=r'shape \(4, 1\) for granularity "row", got \(\)'):
        ixt.quantize(X, ROW, SCALE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": torch.int8}, "`dtype` must be float8_e4m3fn or float8_e5m2, got int8"),
        ({"granularity": "column"}, '`granularity` must be "tensor", "row", "block" or "square"'),
        ({"eps": -1.0}, "`eps` must be at least 0"),
        ({"eps": 1e39}, "`eps` must be at least 0 and at most 3.4"),
        ({"eps": "0"}, "`eps` must be a number"),
        ({"pow2": 1}, "`pow2` must be a bool"),
    ],
)
def test_formats_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ixt.FP8(**fields)


def test_no_gradient_is_asked_for_where_none_is_wanted() -> None:
    """Under no_grad, on a detached tensor and in an autograd.Function, eager and compiled."""

    class RoundTrip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            q = ixt.quantize(x, ROW)
            return ixt.dequantize(q, ixt.FP8(), torch.float32)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 3

    def loss(x: Tensor) -> Tensor:
        return (RoundTrip.apply(x * 2) + ixt.quantize(x.detach(), ROW).scale_inv).sum()

    with ixt.config.patch(enabled=True):
        for function in (loss, torch.compile(loss, fullgraph=True)):
            x = X.clone().requires_grad_()
            function(x).backward()
            assert x.grad is not None
            assert torch.equal(x.grad, torch.full_like(X, 6.0))
            with torch.no_grad():
                assert not ixt.quantize(x, ROW).scale_inv.requires_grad
