"""Scaled products under torch.compile: planned buffers, no copies around them, the same errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from unittest import mock

import gemm_cases as g
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu
from inductor_ext.ops import scaled_mm_fp8_block, scaled_mm_int8, scaled_mm_mxfp8, scaled_mm_nvfp4

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
BLOCK, SQUARE = ixt.FP8(granularity="block", layout="gemm"), ixt.FP8(
    granularity="square", layout="gemm"
)  # fmt: skip
LAYERS = {
    "tensor": (ixt.FP8(granularity="tensor"), ixt.FP8(granularity="tensor")),
    "row": (ixt.FP8(), ixt.FP8()),
    "block": (BLOCK, SQUARE),
    "mxfp8": (ixt.MXFP8(layout="gemm"), ixt.MXFP8(layout="gemm")),
    "nvfp4": (ixt.NVFP4(layout="gemm"), ixt.NVFP4(square=True, layout="gemm")),
    "int8": (ixt.INT8(), ixt.INT8()),
}


@pytest.fixture(autouse=True)
def plugin() -> Any:
    torch.compiler.reset()
    with torch.no_grad(), ixt.config.patch(enabled=True):
        yield


@needs_triton
@pytest.mark.parametrize("kind", LAYERS)
def test_no_kernel_but_the_quantization(kind: str) -> None:
    """Two GEMMs read codes that were written once, and write buffers that Inductor planned.

    Rows of 656 and 6560 elements are those of which Inductor pads the strides.
    """
    f, of_weight = LAYERS[kind]
    weights = [ixt.quantize(torch.randn(n, 656), of_weight) for n in (6560, 48)]

    def layer(x: Tensor, *weights: Any) -> tuple[Tensor, ...]:
        q = ixt.quantize(x, f)
        return tuple(ixt.scaled_mm(q, w, f, of_weight) for w in weights)

    def quantization(x: Tensor) -> Any:
        return tuple(t for t in ixt.quantize(x, f) if t is not None)

    x = torch.randn(2, 130, 656).bfloat16()
    told = ixt.explain(layer, x, *weights, target="sm_90", print=False)
    alone = ixt.explain(quantization, x, target="sm_90", print=False)
    assert len(told.kernels) == len(alone.kernels)
    (calls,) = [k for k in told.externs if "scaled_mm" in k.name]
    assert calls.name.endswith(".out")
    assert calls.launches == 2
    reasons = {op.reason for op in told.ops if "scaled_mm" in op.op}
    assert len(reasons) == 1
    native = kind not in ("mxfp8", "nvfp4")
    assert reasons.pop().startswith("library: " if native else "dequantize: torch's GEMM has")


@needs_triton
def test_in_place_forms() -> None:
    """``out`` and the accumulation write where they are told, without a copy."""
    f = ixt.FP8()
    a, b = (ixt.quantize(torch.randn(n, 32), f) for n in (6, 5))

    def fn(out: Tensor, total: Tensor, *q: Any) -> Tensor:
        ixt.scaled_mm(q[0], q[1], f, out=out)
        ixt.scaled_mm_accumulate_(total, q[0], q[1], f)
        return out + 1

    out, total = torch.empty(6, 5, dtype=torch.bfloat16), torch.ones(6, 5)
    told = ixt.explain(fn, out, total, a, b, target="sm_90", print=False)
    assert [kernel.ops for kernel in told.kernels] == [("aten::add",)]
    assert [kernel.launches for kernel in (*told.kernels, *told.externs)] == [1, 1, 1]
    got = torch.compile(fn, fullgraph=True, backend="aot_eager")(out, total, a, b)
    want = ixt.scaled_mm(a, b, f)
    assert torch.equal(out, want)
    assert torch.equal(got, want + 1)
    assert torch.equal(total, 1 + ixt.scaled_mm(a, b, f, dtype=torch.float32))


class Linear(torch.autograd.Function):
    """A linear layer whose three products are FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        f = ixt.FP8()
        return ixt.scaled_mm(ixt.quantize(x, f), ixt.quantize(w, f), f)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x, w), f = ctx.saved_tensors, ixt.FP8()
        dy_t, x_t, w_t = (ixt.quantize(t, f, orientation="column") for t in (dy, x, w))
        return ixt.scaled_mm(ixt.quantize(dy, f), w_t, f), ixt.scaled_mm(dy_t, x_t, f)


@pytest.mark.parametrize("shape", [(5, 32), (5, 3, 32)], ids=str)
def test_in_an_autograd_function(shape: tuple[int, ...]) -> None:
    """Sizes that may change, forward and backward in one graph each."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (Linear.apply(x, w) * 2).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    gradients = []
    for fn in (loss, compiled):
        x, w = (torch.randn(s, generator=torch.manual_seed(0)).bfloat16() for s in (shape, (7, 32)))
        with torch.enable_grad():
            fn(x.requires_grad_(), w.requires_grad_()).backward()
        gradients.append((x.grad, w.grad))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


OUT_FORMS = {
    gemm.name: gemm
    for gemm in (
        ixt.ops.scaled_mm.GEMM,
        scaled_mm_fp8_block.GEMM,
        scaled_mm_mxfp8.GEMM,
        scaled_mm_nvfp4.GEMM,
        scaled_mm_int8.GEMM,
    )
}


@pytest.mark.contract
@pytest.mark.parametrize("name", OUT_FORMS)
def test_out_form(name: str) -> None:
    """A sound op that writes what the functional one returns."""
    gemm = OUT_FORMS[name]
    out_op = getattr(torch.ops.inductor_ext, name).out
    args = next(gemm.inputs(torch.device("cpu")))
    want = gemm.op(*args)
    out = torch.empty_like(want)
    assert out_op(*args, out=out) is None
    assert torch.equal(out, want)
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(out_op, args, {"out": out}, test_utils=tests)


@pytest.mark.parametrize("card", ["sm_90", "sm_100"])
def test_calls_satisfy_torchs_own_checks(card: str) -> None:
    """torch's meta functions take what the routes hand over; no value is read on the host."""
    aten = torch.ops.aten

    def checked(op: Any, *args: Any, out: Tensor | None) -> Tensor:
        made: Tensor = op(*args)
        assert out is None or out.shape == made.shape
        return made

    v1, v2 = (
        functools.partial(checked, getattr(aten, name).default)
        for name in ("_scaled_mm", "_scaled_mm_v2")
    )

    for pair, (m, n, k) in itertools.product(g.PAIRS, ((17, 33, 65), (128, 256, 640))):
        if m == 17 and any(getattr(f, "granularity", "") == "square" for f in pair):
            continue  # torch 2.11's meta function rounds M / 128 down, its kernel rounds it up
        q = g.operands(pair, (m, n, g.k_for(pair, k)), 0)
        op, operands, options = ixt.gemm._product(*q, *pair, False)
        family = OUT_FORMS[op.__name__]
        with (
            fake_gpu.pretend(card),
            _compat.FakeTensorMode(),
            mock.patch.multiple(torch, _scaled_mm=v1, _scaled_mm_v2=v2),
        ):
            moved = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                for t in operands
            ]
            family.forget()
            for dtype in (torch.bfloat16, torch.float32):
                assert family.run(*moved, None, dtype, *options).shape == (m, n)
            family.forget()


X, W = torch.randn(6, 32), torch.randn(5, 32)
TENSOR, ROW, MX, NV, I8 = (
    ixt.FP8(granularity="tensor"), ixt.FP8(), ixt.MXFP8(), ixt.NVFP4(), ixt.INT8()
)  # fmt: skip
GROUP = ixt.INT8(granularity="group", group=32)
PLAIN = ixt.FP8(granularity="block")


def q(f: ixt.Format, x: Tensor = X, **changed: Any) -> ixt.Quantized:
    """Quantize, and put something else in."""
    return ixt.quantize(x, f)._replace(**changed)


def mm(a: Any, b: Any, f: Any, other: Any = None, **more: Any) -> Tensor:
    return ixt.scaled_mm(a, b, f, other, **more)


def accumulate(out: Any, a: Any, b: Any, f: Any) -> Tensor:
    return ixt.scaled_mm_accumulate_(out, a, b, f)


E5M2 = ixt.FP8(dtype=torch.float8_e5m2)
BAD: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = {
    "not quantized": (mm, (X, q(ROW, W), ROW), {}, "`a` must be Quantized"),
    "no format": (mm, (q(ROW), q(ROW, W), "fp8"), {}, "`format` must be FP8"),
    "int4": (mm, (q(ROW), q(ROW, W), ROW, ixt.INT4()), {}, "`format_b` must not be INT4, which"),
    "other kind": (mm, (q(ROW), q(MX, W), ROW, MX), {}, r"`format_b` must be FP8\(...\) like"),
    "row and block": (
        mm, (q(ROW), q(PLAIN, W), ROW, PLAIN), {}, '`format_b` must have the granularity "tensor"'
    ),
    "block sizes": (
        mm, (q(PLAIN), q(PLAIN, W), PLAIN, ixt.FP8(granularity="block", block=32)), {},
        "`format_b` must have blocks of 128",
    ),
    "both e5m2": (mm, (q(E5M2), q(E5M2, W), E5M2), {}, "must not both be float8_e5m2: no GPU"),
    "k": (mm, (q(I8), q(I8, W[:, :16]), I8), {}, "`b` must have the K of `a`, 32, got 16"),
    "codes": (mm, (q(I8), q(ROW, W), I8), {}, "`b` must be int8, got float8_e4m3fn"),
    "block scale": (
        mm, (q(PLAIN), q(PLAIN, W, scale_inv=torch.ones(5, 2)), PLAIN), {},
        r"`scale_b` must have the shape \(5, 1\), got \(5, 2\)",
    ),
    "mx scale": (
        mm, (q(MX, scale_inv=torch.ones(6, 1)), q(MX, W), MX), {}, "`scale_a` must be uint8, got"
    ),
    "mx layout": (
        mm, (q(MX), q(MX, W), MX, ixt.MXFP8(layout="gemm")), {},
        r"`scale_b` must have the shape \(128, 4\), got \(5, 1\)",
    ),
    "no amax": (mm, (q(NV)[:2], q(NV, W), NV), {}, "`a.amax` must be a Tensor, got NoneType"),
    "amax": (
        mm, (q(NV), q(NV, W, amax=torch.ones(4, 1)), NV), {},
        r"`amax_b` must have one element or the shape \(5, 1\), got \(4, 1\)",
    ),
    "groups": (
        mm, (q(GROUP, scale_inv=torch.ones(6, 2)), q(I8, W), GROUP, I8), {},
        r"`scale_a` must have the shape \(6, 1\), got \(6, 2\)",
    ),
    "bias": (
        mm, (q(MX), q(MX, W), MX), {"bias": torch.ones(5)}, "`bias` must be bfloat16, got float32"
    ),
    "dtype": (mm, (q(MX), q(MX, W), MX), {"dtype": torch.int8}, "`dtype` must be bfloat16, floa"),
    "out": (
        mm, (q(ROW), q(ROW, W), ROW), {"out": torch.empty(5, 6)},
        r"`out` must have the shape \(6, 5\), got \(5, 6\)",
    ),
    "out's dtype": (
        mm, (q(ROW), q(ROW, W), ROW), {"out": torch.empty(6, 5)}, "`out` must be bfloat16, got"
    ),
    "out is expanded": (
        accumulate, (torch.zeros(1, 5).expand(6, 5), q(ROW), q(ROW, W), ROW), {},
        "`out` must not be expanded",
    ),
    "gradient": (
        mm, (q(ROW), q(ROW, W), ROW), {"bias": torch.ones(5).bfloat16().requires_grad_()},
        "`bias` must not require grad",
    ),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("case", BAD)
def test_eager_fake_and_compiled_say_the_same(case: str) -> None:
    function, args, more, message = BAD[case]
    with torch.enable_grad():
        with pytest.raises((TypeError, ValueError), match=message):
            function(*args, **more)
        with pytest.raises(Exception, match=message):
            torch.compile(function, fullgraph=True, backend="aot_eager")(*args, **more)
    if case in ("not quantized", "gradient"):
        return
    with _compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, (args, more))
        with pytest.raises((TypeError, ValueError), match=message):
            function(*fakes[0], **fakes[1])
