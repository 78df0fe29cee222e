"""The FP8 family, bit for bit against the oracle: reference, eager kernel and compiled code.

Every test runs on the CPU, and on CUDA where there is a card. Many values share one call and
many calls share one compilation: the compiled tests switch values, not shapes or options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import family
import numpy as np
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry
from inductor_ext.testing import require_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = list(cases.INPUTS)
TARGETS = list(cases.TARGETS)

device_ = pytest.mark.parametrize("device", DEVICES)
dtype_ = pytest.mark.parametrize("dtype", DTYPES)
target_ = pytest.mark.parametrize("target", TARGETS)


def _check_eager(call: family.Call, device: str) -> None:
    args = call.on(device)
    call.check(family.REFERENCES[call.op](*args), f"reference, {device}")
    call.check(family.OPS[call.op](*args), f"eager, {device}")


@pytest.fixture
def plugin() -> Iterator[None]:
    """The plugin on, nothing compiled yet, and no cache: every compilation leaves its records."""
    torch.compiler.reset()
    with (
        ixt.config.patch(enabled=True),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        registry.clear_records()
        yield


def _compile(calls: list[family.Call], *, dynamic: bool) -> Callable[..., Any]:
    """Compile the ops of several calls that share their tensors, as one graph."""
    plan = [(family.OPS[c.op], [a for a in c.args if not isinstance(a, Tensor)]) for c in calls]

    def together(*tensors: Tensor) -> Any:
        results: list[Tensor] = []
        for function, constants in plan:
            result = function(*tensors, *constants)
            results.extend(result if isinstance(result, tuple) else (result,))
        return results

    return torch.compile(together, fullgraph=True, dynamic=dynamic)


def _check_compiled(run: Callable[..., Any], calls: list[family.Call], device: str) -> None:
    """Compare a compiled graph with the oracle, call by call."""
    got = list(run(*(a for a in calls[0].on(device) if isinstance(a, Tensor))))
    for call in calls:
        call.check(tuple(got[: len(call.want)]), f"compiled, {device}")
        del got[: len(call.want)]
    assert not got


def _require_lowered() -> None:
    found = registry.records()
    assert found
    assert {r.outcome for r in found} == {"lowered"}, found


# ---- eager ----


@device_
@dtype_
@target_
@pytest.mark.parametrize("kind", list(cases.VALUES))
def test_values(device: str, dtype: str, target: str, kind: str) -> None:
    x = cases.values(kind, 17 * 129, cases.INPUTS[dtype]).view(17, 129)
    for call in family.value_calls(x, target, kind):
        _check_eager(call, device)


@device_
@dtype_
@target_
def test_shapes_and_layouts(device: str, dtype: str, target: str) -> None:
    for shape in cases.SHAPES:
        flat = cases.values("wide", 33000, cases.INPUTS[dtype])
        for layout in cases.layouts_for(shape):
            x = cases.lay_out(flat, shape, layout)
            for call in family.quantizations(x, target, f"{shape} {layout}"):
                _check_eager(call, device)


@device_
@dtype_
@target_
def test_every_pattern(device: str, dtype: str, target: str) -> None:
    """All 65536 values of a 16-bit dtype, by every scale; then only the finite ones."""
    x = cases.every_pattern(cases.INPUTS[dtype])
    for scale in cases.scales():
        _check_eager(family.static(x, scale, target, "every pattern"), device)
    finite = x[torch.from_numpy(np.isfinite(cases.floats(x)))]
    for y in (x, finite, finite.view(-1, 8)):
        for call in family.quantizations(y, target, "every pattern"):
            _check_eager(call, device)


@device_
@target_
def test_scales_of_one_element(device: str, target: str) -> None:
    """A one-element scale of any rank stands for the whole tensor, and its shape comes back."""
    x = cases.values("normal", 24, torch.bfloat16)
    for shape in ((24,), (4, 6), (2, 3, 4), (1, 24), (24, 1)):
        for scale_shape in ((), (1,), (1, 1), (1, 1, 1)):
            scale = cases.f32(3.0).reshape(scale_shape)
            _check_eager(family.static(x.view(shape), scale, target), device)


@device_
@target_
def test_strided_scales(device: str, target: str) -> None:
    x = cases.rows_of_everything(torch.bfloat16)
    whole = family.row_scales(x)
    room = torch.zeros(len(x), 3)
    room[:, 1:2] = whole
    for scale in (room[:, 1:2], whole[:1].expand(len(x), 1)):
        _check_eager(family.static(x, scale, target), device)


@device_
@dtype_
@target_
def test_dequantize_every_code(device: str, dtype: str, target: str) -> None:
    codes = cases.every_code(cases.TARGETS[target])
    for scale in cases.scales():
        _check_eager(family.dequantize(codes, scale, cases.INPUTS[dtype]), device)
    rows = codes.repeat(26, 1)
    scale_inv = torch.stack(cases.scales() * 2).view(26, 1)
    _check_eager(family.dequantize(rows, scale_inv, cases.INPUTS[dtype]), device)


@device_
@target_
def test_dequantize_shapes_and_layouts(device: str, target: str) -> None:
    flat = cases.every_code(cases.TARGETS[target]).repeat(33000 // 256 + 1)
    for shape in cases.SHAPES:
        for layout in cases.layouts_for(shape):
            codes = cases.lay_out(flat, shape, layout)
            label = f"{shape} {layout}"
            for dtype in cases.INPUTS.values():
                _check_eager(family.dequantize(codes, cases.f32(0.7), dtype, label), device)
                if shape:
                    scale_inv = family.row_scales(codes)
                    _check_eager(family.dequantize(codes, scale_inv, dtype, label), device)


@device_
def test_alignments(device: str) -> None:
    """Vector loads: every start within 16 elements, every length of tail."""
    flat = cases.values("wide", 4096, torch.bfloat16)
    for start in range(17):
        for length in (1, 2, 15, 16, 31, 64, 129):
            x = flat[start : start + length]
            for call in family.quantizations(x, "e4m3", f"start {start} length {length}"):
                _check_eager(call, device)
    for start in range(9):
        x = flat[start : start + 5 * 67].view(5, 67)
        for call in family.quantizations(x, "e4m3", f"start {start}, 5x67"):
            _check_eager(call, device)


@device_
@dtype_
@target_
def test_few_long_rows(device: str, dtype: str, target: str) -> None:
    """Several blocks share a row.  The reference, which the oracle checks above, is the judge."""
    to = cases.TARGETS[target]
    for x, label in cases.few_long_rows(device, cases.INPUTS[dtype]):
        by_row = family.row_scales(x).to(device)
        calls: list[tuple[str, tuple[Any, ...]]] = [("static", (by_row, to)), ("tensor", (to,))]
        calls += [("static", (by_row[0, 0], to))]
        calls += [("row", (to, eps, pow2)) for eps, pow2 in family.OPTIONS]
        for op, rest in calls:
            want, got = (of[op](x, *rest) for of in (family.REFERENCES, family.OPS))
            nan = [False, True, True][: len(want)]
            require_equal(op, f"eager, {device}", got, want, nan_equal=nan, sample=label)


# ---- compiled ----


def _calls(op: str, x: Tensor, label: str, options: Any = ((0.0, False),)) -> list[family.Call]:
    """The calls of one op on one tensor: both targets, and every option."""
    if op == "static":
        return [family.static(x, cases.f32(0.3), target, label) for target in TARGETS]
    if op == "static_row":
        return [family.static(x, family.row_scales(x), target, label) for target in TARGETS]
    current = family.tensor if op == "tensor" else family.row
    return [current(x, target, *option, label) for target in TARGETS for option in options]


@device_
@dtype_
@pytest.mark.parametrize("op", ["static", "static_row", "tensor", "row"])
def test_compiled_values(plugin: None, device: str, dtype: str, op: str) -> None:
    """One dynamic compilation serves every value and several sizes."""
    torch_dtype = cases.INPUTS[dtype]
    xs = [(cases.every_pattern(torch_dtype)[:, :250], "every pattern")]
    xs += [(cases.rows_of_everything(torch_dtype), "every kind")]
    for shape in ((17, 129), (33, 1000), (2, 16)):
        for kind in cases.VALUES:
            flat = cases.values(kind, shape[0] * shape[1], torch_dtype)
            xs.append((flat.view(shape), kind))
    run = _compile(_calls(op, *xs[-1]), dynamic=True)
    for x, label in [xs.pop(), *xs]:  # clones: Dynamo guards the base of a view as well
        _check_compiled(run, _calls(op, x.clone(), label), device)
    if op == "static":
        x = cases.every_pattern(torch_dtype).clone()
        for scale in cases.scales():
            calls = [family.static(x, scale, target, "every pattern") for target in TARGETS]
            _check_compiled(run, calls, device)
    _require_lowered()
    assert len(registry.records()) == 2, "different values or sizes compiled again"


@device_
@dtype_
@pytest.mark.parametrize("op", ["tensor", "row"])
def test_compiled_options(plugin: None, device: str, dtype: str, op: str) -> None:
    run = None
    for kind in cases.VALUES:
        x = cases.values(kind, 17 * 129, cases.INPUTS[dtype]).view(17, 129)
        calls = _calls(op, x, kind, family.OPTIONS[1:])
        run = run or _compile(calls, dynamic=False)
        _check_compiled(run, calls, device)
    _require_lowered()


def _check_shape(kinds: tuple[str, ...], shape: Any, dtype: str, layout: str, device: str) -> None:
    """Compile each op on one shape and layout, and run it on several kinds of values."""
    for op in ("static", "static_row", "tensor", "row") if shape else ("static", "tensor"):
        run = None
        for kind in kinds:
            flat = cases.values(kind, 33000, cases.INPUTS[dtype])
            x = cases.lay_out(flat, shape, layout)
            calls = _calls(op, x, f"{shape} {layout} {kind}")
            run = run or _compile(calls[:1], dynamic=False)
            _check_compiled(run, calls[:1], device)
    _require_lowered()


@device_
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_compiled_shapes(plugin: None, device: str, shape: tuple[int, ...]) -> None:
    _check_shape(("wide", "nans", "zeros"), shape, "bf16", "contiguous", device)


@device_
@pytest.mark.parametrize("layout", cases.LAYOUTS[1:])
def test_compiled_layouts(plugin: None, device: str, layout: str) -> None:
    _check_shape(("wide", "nans"), (4, 3, 65), "bf16", layout, device)


@device_
@dtype_
def test_compiled_dequantize(plugin: None, device: str, dtype: str) -> None:
    for target in TARGETS:
        codes = cases.every_code(cases.TARGETS[target]).repeat(26, 1)
        by_row = torch.stack(cases.scales() * 2).view(26, 1)
        scalar = [family.dequantize(codes, s, cases.INPUTS[dtype]) for s in cases.scales()]
        run = _compile(scalar[:1], dynamic=True)
        for call in scalar:
            _check_compiled(run, [call], device)
        rows = [
            family.dequantize(c, by_row[: len(c)], cases.INPUTS[dtype])
            for c in (codes, codes[:3], codes[5:, 100:])
        ]
        run = _compile(rows[:1], dynamic=True)
        for call in rows:
            _check_compiled(run, [call], device)
    _require_lowered()


@device_
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compiled_producers(plugin: None, device: str, dtype: str) -> None:
    """A producer fused into a quantize is rounded to its dtype first, as eager mode does."""
    x, y = (
        cases.values("normal", 64 * 200, cases.INPUTS[dtype], seed).view(64, 200) for seed in (1, 2)
    )

    def producers(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x * y, x + y, torch.relu(x), x - 0.125]

    def quantized(x: Tensor, y: Tensor) -> list[Any]:
        return [family.OPS["row"](p, torch.float8_e4m3fn) for p in producers(x, y)]

    run = torch.compile(quantized, fullgraph=True, dynamic=False)
    got = run(x.to(device), y.to(device))
    for p, result in zip(producers(x, y), got, strict=True):
        family.row(p, "e4m3", label="producer").check(result, f"fused, {device}")
    _require_lowered()
