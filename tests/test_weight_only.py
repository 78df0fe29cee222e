"""weight_only_mm on the CPU: every format against float64, routes, refusals, compiled."""

from __future__ import annotations

import re
from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import weights
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat
from inductor_ext.ops._routes_weight_only import MOST_ROWS, Call, choose_weight_only
from inductor_ext.ops.weight_only import FAMILIES
from inductor_ext.weight_only import _op_and_weight

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
name_ = pytest.mark.parametrize("name", list(weights.FORMATS))


@name_
def test_against_float64(name: str) -> None:
    k = 3 * weights.multiple(weights.FORMATS[name])
    for number, (m, n) in enumerate(((1, 5), (3, 64), (17, 33))):
        dtype = (BF16, F16, F32)[number]
        case = weights.case(name, m, n, k, dtype, bias=number != 1, seed=number)
        case.require(case.run(), weights.CPU_SUM)


@name_
def test_kernel_is_given_the_same_weight(name: str) -> None:
    """Codes, scales and zero points in the one form that the CUDA kernel takes."""
    case = weights.case(name, 1, 70, 2 * max(64, weights.multiple(weights.FORMATS[name])), BF16)
    op, weight = _op_and_weight(case.q, case.format)
    family = FAMILIES[op._schema.name.partition("weight_only_mm_")[2]]
    want = weights.value(case.q, case.format)
    given = weights.from_decode_arguments(family, weight)
    # the oracle rounds to fp32 up to three times: scale times amax, over 2688, times the code
    assert (np.abs(given - want) <= 3 * 2.0**-24 * np.abs(want)).all()


def test_shapes_and_layouts() -> None:
    case = weights.case("int8 row", 6, 10, 64, BF16, bias=True)
    flat = case.run()
    x = case.x

    def run(x: Tensor) -> Tensor:
        return ixt.weight_only_mm(x, case.q, case.format, bias=case.bias)

    assert torch.equal(run(x.view(2, 3, 64)), flat.view(2, 3, 10))
    assert torch.equal(run(x[2]), flat[2])
    assert torch.equal(run(x[::2]), flat[::2])
    assert torch.equal(run(x[1:2].expand(4, 64)), flat[1:2].expand(4, 10))
    wide = torch.empty(6, 65, dtype=BF16)
    wide[:, 1:] = x
    assert torch.equal(run(wide[:, 1:]), flat)
    assert torch.equal(run(x.t().contiguous().t()), flat)
    for shape in ((0, 64), (3, 0, 64)):
        assert run(torch.empty(shape, dtype=BF16)).shape == (*shape[:-1], 10)
    nothing = ixt.Quantized(torch.empty(4, 0, dtype=torch.int8), torch.ones(4, 1))
    assert (ixt.weight_only_mm(torch.ones(2, 0), nothing, ixt.INT8()) == 0).all()
    none = ixt.Quantized(torch.empty(0, 64, dtype=torch.int8), torch.ones(0, 1))
    assert ixt.weight_only_mm(x, none, ixt.INT8()).shape == (6, 0)
    as_tuple = ixt.weight_only_mm(x, tuple(case.q), case.format, bias=case.bias)
    assert torch.equal(as_tuple, flat)


def test_layout_of_gemms_is_read() -> None:
    w, x = torch.randn(40, 256), torch.randn(3, 256)
    for plain, swizzled in (
        (ixt.MXFP8(), ixt.MXFP8(layout="gemm")),
        (ixt.NVFP4(square=True), ixt.NVFP4(square=True, layout="gemm")),
        (ixt.FP8(granularity="square"), ixt.FP8(granularity="square", layout="gemm")),
    ):
        one, other = (ixt.weight_only_mm(x, ixt.quantize(w, f), f) for f in (plain, swizzled))
        assert torch.equal(one, other)


def test_nan_stays_where_it_is() -> None:
    w, x = torch.randn(6, 64), torch.randn(5, 64)
    w[2, 7], x[3, 1] = torch.nan, torch.nan
    for name in ("fp8 row", "mxfp8", "fp8 1x32"):
        format = weights.FORMATS[name]
        got = ixt.weight_only_mm(x, ixt.quantize(w, format), format)
        want = torch.zeros(5, 6, dtype=torch.bool)
        want[3], want[:, 2] = True, True
        assert torch.equal(got.isnan(), want), name


# ---- what the user writes


@pytest.mark.parametrize("enabled", [True, False])
def test_compiled(enabled: bool) -> None:
    """One opaque call; the same bits as in eager mode."""
    case = weights.case("int4 asymmetric 32", 5, 24, 128, BF16, bias=True)

    def layer(x: Tensor) -> Tensor:
        return ixt.weight_only_mm(x, case.q, case.format, bias=case.bias).t()

    torch.compiler.reset()
    with ixt.config.patch(enabled=enabled):
        assert torch.equal(torch.compile(layer, fullgraph=True)(case.x), layer(case.x))


@pytest.mark.parametrize("name", ["int8 row", "nvfp4"])
def test_written_as_a_product(name: str) -> None:
    """F.linear(x, dequantize(w)) differs by the rounding of the weight, and sums in 16 bits."""
    case = weights.case(name, 4, 32, 128, BF16)

    def layer(x: Tensor) -> Tensor:
        return F.linear(x, ixt.dequantize(case.q, case.format))

    torch.compiler.reset()
    with ixt.config.patch(enabled=True):
        got = torch.compile(layer, fullgraph=True)(case.x)
    for result in (got, layer(case.x)):
        case.require(result, 2.0**-8 + 2.0**-20)


# ---- routes


def _call(**changes: Any) -> Call:
    return Call(8, 4096, 4096, BF16, 8, "plain")._replace(**changes)


def test_default_route() -> None:
    for rows, route in ((1, "kernel"), (MOST_ROWS, "kernel"), (MOST_ROWS + 1, "dequantize")):
        name, reason = choose_weight_only(_call(rows=rows))
        assert name == route
        assert f"{rows} rows" in reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"rows": MOST_ROWS + 1}, "x has 17 rows, the kernel takes 16"),
        ({"rows": 0}, "the product is empty"),
        ({"k": 0}, "the product is empty"),
        ({"dtype": F32}, "x is float32"),
        ({"layout": "gemm"}, 'layout "gemm"'),
        ({"k": 4104}, "K is 4104"),
        ({"k": 4112}, ""),
        ({"k": 4112, "bits": 4}, "multiples of 32"),
    ],
    ids=str,
)
def test_pinned_route(changes: dict[str, Any], words: str) -> None:
    with ixt.config.patch(weight_only="kernel"):
        if not words:
            assert choose_weight_only(_call(**changes))[0] == "kernel"
            return
        with pytest.raises(ValueError, match=r'config.weight_only must be .* got "kernel"') as told:
            choose_weight_only(_call(**changes))
        assert words in str(told.value)
    with ixt.config.patch(weight_only="dequantize"):
        assert choose_weight_only(_call(**changes))[0] == "dequantize"


def test_pin_is_checked() -> None:
    with pytest.raises(ValueError, match=r"config\.weight_only must be"):
        ixt.config.weight_only = "fastest"


# ---- refusals

W = weights.case("int8 row", 3, 8, 64, BF16)
GOOD = {"x": W.x, "w": W.q, "format": ixt.INT8(), "bias": None}


def _with(**changes: Any) -> ixt.Quantized:
    return W.q._replace(**changes)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": W.x.double()}, TypeError, "`x` must be bfloat16, float16 or float32, got float64"),
        ({"x": W.x[:, :32]}, ValueError, "`x` must have a last dimension of 64, as `codes` has"),
        ({"x": W.x[0, 0]}, ValueError, "`x` must have a last dimension of 64"),
        ({"w": _with(codes=W.q.codes[0], scale_inv=torch.ones(1))}, ValueError, "`codes` must ha"),
        ({"w": _with(codes=W.q.codes.float())}, TypeError, "`codes` must be int8, got float32"),
        ({"w": _with(scale_inv=torch.ones(3, 1))}, ValueError, "`scale` must have one element or"),
        ({"format": ixt.FP8()}, TypeError, "`codes` must be float8_e4m3fn or float8_e5m2, got in"),
        ({"bias": torch.ones(8)}, TypeError, "`bias` must be bfloat16, got float32"),
        ({"bias": torch.ones(7).bfloat16()}, ValueError, "`bias` must have the shape (8,), got (7"),
        ({"x": W.x.clone().requires_grad_()}, ValueError, "`x` must not require grad"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    """The same in eager mode and on fakes."""
    arguments = {**GOOD, **change}
    bias = arguments.pop("bias")
    with pytest.raises(error, match=re.escape(words)):
        ixt.weight_only_mm(**arguments, bias=bias)
    mode = _compat.FakeTensorMode()
    op, weight = _op_and_weight(arguments["w"], arguments["format"])
    fakes = [
        mode.from_tensor(a) if isinstance(a, Tensor) else a for a in (arguments["x"], *weight, bias)
    ]
    with mode, pytest.raises(error, match=re.escape(words)):
        op(*fakes)


@pytest.mark.parametrize("w", [W.q.codes, (W.q.codes,), None], ids=["tensor", "short", "none"])
def test_weight_must_be_quantized(w: Any) -> None:
    with pytest.raises(TypeError, match="`w` must be Quantized"):
        ixt.weight_only_mm(W.x, w, ixt.INT8())


def test_compiled_refusal() -> None:
    torch.compiler.reset()
    run = torch.compile(lambda x: ixt.weight_only_mm(x, W.q, ixt.INT8()), fullgraph=True)
    with pytest.raises(Exception, match="`x` must have a last dimension of 64"):
        run(W.x[:, :32])


def test_oracle_knows_the_codes() -> None:
    """The test's own reading of a weight is not all zeros."""
    for name in weights.FORMATS:
        case = weights.case(name, 1, 8, 256, F32)
        assert np.abs(weights.value(case.q, case.format)).max() > 0.5, name
        assert cases.floats(case.x).any()
