"""NVFP4 compiled, bit for bit against the oracle. Many values share one compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import nvfp4_family as family
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
device_ = pytest.mark.parametrize("device", DEVICES)
Make = Callable[[Tensor, Tensor], family.Call]


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """The plugin on, nothing compiled yet, and no cache: every compilation leaves its records."""
    torch.compiler.reset()
    with (
        ixt.config.patch(enabled=True, strict=True),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        registry.clear_records()
        yield


def _compile(call: family.Call, *, dynamic: bool = False) -> Callable[..., Any]:
    """Compile the call's op with its constants; the result takes tensors only."""
    op = family.OPS[call.op]
    constants = [None if isinstance(a, Tensor) else (a,) for a in call.args]

    def run(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return op(*(next(given) if c is None else c[0] for c in constants))

    return torch.compile(run, fullgraph=True, dynamic=dynamic)


def _check(run: Callable[..., Any], call: family.Call, device: str) -> None:
    got = run(*(a for a in call.on(device) if isinstance(a, Tensor)))
    call.check(got, f"compiled, {device}")


def _require_lowered(count: int) -> None:
    assert [r.outcome for r in registry.records()] == ["lowered"] * count, registry.records()


def _rows(x: Tensor, amax: Tensor) -> family.Call:
    return family.quantize(x, amax, layout="gemm", rng=family.RNG)


def _columns(x: Tensor, amax: Tensor) -> family.Call:
    return family.quantize(x, amax, (16, 1), True, "gemm", hadamard=True)


def _square(x: Tensor, amax: Tensor) -> family.Call:
    return family.both(x, amax, amax, True, rng=family.RNG)


MAKES: dict[str, tuple[Make, str]] = {
    "rows, bf16": (family.quantize, "bf16"),
    "rows, fp16": (family.quantize, "fp16"),
    "rows, fp32": (_rows, "fp32"),
    "columns": (_columns, "bf16"),
    "columns, stochastic": (
        lambda x, a: family.quantize(x, a, (16, 1), True, rng=family.RNG), "bf16"
    ),
    "square": (_square, "bf16"),
    "amax": (lambda x, a: family.amax_hadamard(x, True), "fp32"),
}  # fmt: skip


@device_
@pytest.mark.parametrize("which", list(MAKES))
def test_values(device: str, which: str) -> None:
    make, dtype = MAKES[which]
    run = None
    for kind in cases.VALUES:
        x = cases.values(kind, 48 * 144, cases.INPUTS[dtype]).view(48, 144)
        for amax in (family.true_amax(x), cases.f32(1e-30)):
            call = make(x, amax)
            run = run or _compile(call)
            _check(run, call, device)
    if which != "amax":
        for amax in family.amaxes():
            assert run is not None
            _check(run, make(x, amax), device)
    _require_lowered(1)


@device_
@pytest.mark.parametrize(
    ("shape", "block", "transposed", "layout", "per_row"),
    [
        ((17, 208), (16, 16), False, "gemm", False),
        ((32, 33), (16, 16), True, "plain", False),
        ((4, 8, 80), (1, 16), False, "plain", True),
        ((48, 7), (16, 1), True, "gemm", True),
        ((0, 16), (1, 16), False, "gemm", False),
        ((16, 0), (16, 1), True, "plain", False),
        ((48,), (1, 16), False, "plain", False),
        ((1, 16), (16, 16), False, "plain", False),
    ],
)
def test_shapes(
    device: str,
    shape: tuple[int, ...],
    block: tuple[int, int],
    transposed: bool,
    layout: str,
    per_row: bool,
) -> None:
    run, amax = None, cases.f32(30.0)
    if per_row and transposed:
        amax = cases.f32(family.row_amaxes(shape[-1])).view(-1, 1)
    elif per_row:
        amax = cases.f32(family.row_amaxes(32)).view(4, 8, 1)
    for kind in ("wide", "nans"):
        x = cases.lay_out(cases.values(kind, 40000, torch.bfloat16), shape, "contiguous")
        call = family.quantize(x, amax, block, transposed, layout)
        run = run or _compile(call)
        _check(run, call, device)
    _require_lowered(1)


@device_
@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_layouts(device: str, layout: str) -> None:
    x = cases.lay_out(cases.values("wide", 40000, torch.float32), (32, 48), layout)
    call = family.both(x, cases.f32(30.0), cases.f32(40.0), False, "gemm")
    _check(_compile(call), call, device)
    _require_lowered(1)


@device_
@pytest.mark.parametrize("transposed", [False, True])
def test_dynamic_sizes(device: str, transposed: bool) -> None:
    """One compilation for every size, of both axes."""
    run = None
    for shape in ((48, 80), (64, 144), (160, 32), (16, 1040)):
        x = cases.values("normal", shape[0] * shape[1], torch.bfloat16).view(shape).clone()
        block = (16, 1) if transposed else (1, 16)
        call = family.quantize(x, cases.f32(3.0), block, transposed, "gemm")
        run = run or _compile(call, dynamic=True)
        _check(run, call, device)
    _require_lowered(1)


@device_
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dequantize(device: str, dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = family.every_scale().repeat(1, 32)
    for layout, square in (("plain", True), ("gemm", False)):
        run = None
        for amax in family.amaxes():
            some = scales[:16] if square else scales
            call = family.dequantize(codes, some, amax, square, cases.INPUTS[dtype], layout)
            run = run or _compile(call)
            _check(run, call, device)
    _require_lowered(2)


@device_
def test_fused_producer(device: str) -> None:
    """A producer fused into a quantize is rounded to its dtype first, as eager mode does."""
    x, y = (cases.values("normal", 64 * 208, torch.bfloat16, s).view(64, 208) for s in (1, 2))
    amax = cases.f32(9.0)
    op = family.OPS["quantize"]

    def products(x: Tensor, y: Tensor, amax: Tensor) -> list[Any]:
        return [op(x * y, amax, 1, 16), op(torch.relu(x), amax, 16, 1, True)]

    run = torch.compile(products, fullgraph=True, dynamic=False)
    rows, columns = run(*(t.to(device) for t in (x, y, amax)))
    family.quantize(x * y, amax).check(rows, f"fused, {device}")
    family.quantize(torch.relu(x), amax, (16, 1), True).check(columns, f"fused, {device}")
    _require_lowered(2)


@device_
def test_fused_consumer(device: str) -> None:
    """What follows a dequantize sees its result rounded to the dtype that it has."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    scales = cases.every_code(torch.float8_e4m3fn)[:64].repeat(8).view(16, 32)
    call = family.dequantize(codes, scales, cases.f32(37.1), False, torch.bfloat16)

    def after(codes: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        return family.OPS["dequantize"](codes, scales, amax, 1, 16, torch.bfloat16).float() * 3

    run = torch.compile(after, fullgraph=True, dynamic=False)
    got = run(*call.on(device)[:3])
    assert torch.equal(got.cpu(), call.want[0].float() * 3)
    _require_lowered(1)
