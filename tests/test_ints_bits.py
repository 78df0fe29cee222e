"""INT8, INT4, amax and delayed scaling, bit for bit against the oracle: reference, eager, compiled.

Every test runs on the CPU, and on CUDA where there is a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import ints
import numpy as np
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry
from inductor_ext.testing import require_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
device_ = pytest.mark.parametrize("device", DEVICES)
dtype_ = pytest.mark.parametrize("dtype", list(cases.INPUTS))


@device_
@dtype_
@pytest.mark.parametrize("kind", list(cases.VALUES))
def test_values(device: str, dtype: str, kind: str) -> None:
    flat = cases.values(kind, 18 * 256, cases.INPUTS[dtype])
    for call in ints.of_any_shape(flat[: 17 * 129].view(17, 129), kind):
        ints.run(call, device)
    for group in ints.GROUPS:
        for call in ints.of_groups(flat.view(18, 256), group, kind):
            ints.run(call, device)
            for back in ints.dequantizations(call, cases.INPUTS[dtype]):
                ints.run(back, device)


@device_
@dtype_
def test_shapes_and_layouts(device: str, dtype: str) -> None:
    flat = cases.values("wide", 33000, cases.INPUTS[dtype])
    for shape in cases.SHAPES:
        for layout in cases.layouts_for(shape):
            for call in ints.of_any_shape(cases.lay_out(flat, shape, layout), f"{shape} {layout}"):
                ints.run(call, device)
                for back in ints.dequantizations(call, cases.INPUTS[dtype]):
                    ints.run(back, device)


@device_
@dtype_
def test_few_long_rows(device: str, dtype: str) -> None:
    """Several blocks share a row.  The reference, which the oracle checks here, is the judge."""
    for x, label in cases.few_long_rows(device, cases.INPUTS[dtype]):
        for op in ("amax_row", "quantize_int8_row", "quantize_int8_tensor"):
            want, got = (of[op](x) for of in (ints.REFERENCES, ints.OPS))
            require_equal(op, f"eager, {device}", got, want, sample=label)


@device_
@dtype_
@pytest.mark.parametrize("shape", [(64,), (0, 64), (5, 0), (3, 1, 192), (2, 0, 64), (33, 1024)])
def test_group_shapes_and_layouts(device: str, dtype: str, shape: tuple[int, ...]) -> None:
    flat = cases.values("nans", 33 * 1024, cases.INPUTS[dtype])
    for layout in cases.layouts_for(shape):
        x = cases.lay_out(flat, shape, layout)
        for call in ints.of_groups(x, 64, f"{shape} {layout}"):
            ints.run(call, device)
            for back in ints.dequantizations(call, cases.INPUTS[dtype]):
                ints.run(back, device)


@device_
@dtype_
def test_every_pattern(device: str, dtype: str) -> None:
    """All 65536 values of a 16-bit dtype; then only the finite ones, whose scales differ."""
    x = cases.every_pattern(cases.INPUTS[dtype])
    finite = x[torch.from_numpy(np.isfinite(cases.floats(x)))]
    rows = finite[: len(finite) // 128 * 128].view(-1, 128)
    for y in (x, rows, rows.t().contiguous()[:, : len(rows) // 32 * 32]):
        for call in (*ints.of_any_shape(y), *ints.of_groups(y, 32)):
            ints.run(call, device)


@device_
@dtype_
def test_ties(device: str, dtype: str) -> None:
    for steps, columns in ((127, 256), (7, 32), (15, 32)):
        x = ints.tied(cases.INPUTS[dtype], steps, columns)
        for y in (x, x.abs(), -x.abs()):  # asymmetric: with zero in the middle and at both ends
            for call in (*ints.of_any_shape(y, "ties"), *ints.of_groups(y, columns, "ties")):
                ints.run(call, device)


def test_no_nan_from_infinities() -> None:
    """An infinite amax counts as the largest fp32: the infinities saturate, nothing becomes NaN."""
    x = torch.tensor([[float("inf"), -float("inf"), 1.0, float("nan")] * 8])
    codes, scale = ints.OPS["quantize_int8_row"](x)
    assert codes[0, :4].tolist() == [127, -127, 0, 0]
    assert not ints.OPS["dequantize_int8"](codes, scale, 0, torch.float32).isnan().any()
    codes, scale, zero = ints.OPS["quantize_int4_asymmetric"](x, 32)
    assert not ints.OPS["dequantize_int4"](codes, scale, zero, 32, torch.float32).isnan().any()


@device_
def test_alignments(device: str) -> None:
    """Vector loads: every start within 16 elements, every length of tail."""
    flat = cases.values("wide", 8192, torch.bfloat16)
    for start in range(17):
        for length in (1, 2, 15, 16, 31, 64, 129):
            for call in ints.of_any_shape(flat[start : start + length], f"{start} {length}"):
                ints.run(call, device)
        for group in (32, 256):
            x = flat[start : start + 6 * 512].view(6, 512)
            for y in (x, x[:, :256], x[:, 256:]):
                for call in ints.of_groups(y, group, f"start {start}"):
                    ints.run(call, device)


@device_
@dtype_
def test_dequantize_every_code(device: str, dtype: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    rows = every.repeat(65, 1)
    target = cases.INPUTS[dtype]
    for scale in cases.scales():
        ints.run(ints.dequantize_int8(every.view(torch.int8), scale, 0, target), device)
    by_row = ints.extreme_scales(65).view(65, 1)
    ints.run(ints.dequantize_int8(rows.view(torch.int8), by_row, 0, target), device)
    for group in ints.GROUPS:
        for columns in (256, 250, 17):
            codes = rows[:, :columns].view(torch.int8)
            scale = ints.extreme_scales(65 * -(-columns // group)).view(65, -1)
            ints.run(ints.dequantize_int8(codes, scale, group, target), device)
        scale = ints.extreme_scales(65 * 512 // group).view(65, -1)
        zero = torch.arange(scale.numel(), dtype=torch.int32).to(torch.uint8).view(scale.shape)
        for zeros in (None, zero):
            ints.run(ints.dequantize_int4(rows, scale, zeros, group, target), device)
            room = torch.zeros(65, 300, dtype=torch.uint8)
            room[:, 3:259] = rows
            call = ints.dequantize_int4(room[:, 3:259], scale, zeros, group, target)
            ints.run(call, device)


def _updates() -> Iterator[ints.Call]:
    nan, inf = float("nan"), float("inf")
    columns = [
        [3.5, 1.0, 7.0, 0.25],
        [0.0, 0.0, 0.0, 0.0],
        [nan, 2.0, 3.0, 1.0],
        [1.0, nan, nan, nan],
        [inf, 1.0, 1.0, 1.0],
        [1e-40, 0.0, 0.0, 0.0],
        [3e38, 1.0, 1.0, 1.0],
        [-4.0, -1.0, -2.0, -0.0],
    ]
    table = torch.tensor(columns).t().contiguous()
    scale = torch.arange(1.0, 9.0)
    for dtype in cases.TARGETS.values():
        for algorithm in scaling_algorithms:
            for margin in (0, 3, -2, 100, -100):
                yield ints.update(table, scale, dtype, margin, algorithm)
                yield ints.update(table[:, 0], scale[0], dtype, margin, algorithm)
            for length in (0, 1, 2, 3):
                yield ints.update(table[:length], scale, dtype, 0, algorithm)
            yield ints.update(table.repeat(200, 1), scale, dtype, 0, algorithm)
            yield ints.update(table.t(), scale[:4].flip(0), dtype, 0, algorithm)
            yield ints.update(table[:, :0], scale[:0], dtype, 0, algorithm)
            yield ints.update(table[1], scale[:1].view(1, 1), dtype, 0, algorithm)
            wide = scale.repeat_interleave(2)
            yield ints.update(table[::2, ::3], wide[::2][:3], dtype, 0, algorithm)


scaling_algorithms = ("max", "most_recent")


def _dense(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


@device_
def test_update_fp8_scale(device: str) -> None:
    for call in _updates():
        ints.run(call, device)
        args = ints.own(call.on(device))
        assert ixt.ops.scaling.update_fp8_scale_(*args) is None
        call.check(tuple(map(_dense, args[:2])), f"in place, {device}")


# ---- compiled ----


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


def _compile(calls: list[ints.Call], *, dynamic: bool) -> Callable[..., Any]:
    """Compile the ops of several calls that share their tensors, as one graph."""
    torch.compiler.reset()  # one function, many times: Dynamo stops at its eighth version
    plan = [(ints.OPS[c.op], [a for a in c.args if not isinstance(a, Tensor)]) for c in calls]

    def together(*tensors: Tensor) -> Any:
        results: list[Tensor] = []
        for function, constants in plan:
            result = function(*tensors, *constants)
            results.extend(result if isinstance(result, tuple) else (result,))
        return results

    return torch.compile(together, fullgraph=True, dynamic=dynamic)


def _check_compiled(run: Callable[..., Any], calls: list[ints.Call], device: str) -> None:
    got = list(run(*(a for a in calls[0].on(device) if isinstance(a, Tensor))))
    for call in calls:
        call.check(tuple(got[: len(call.want)]), f"compiled, {device}")
        del got[: len(call.want)]
    assert not got


def _require_lowered(compilations: int | None = None, ops: int = 1) -> None:
    found = registry.records()
    assert {r.outcome for r in found} == {"lowered"}, found
    if compilations is not None:
        assert len(found) == compilations * ops, "different values or sizes compiled again"


@device_
@dtype_
@pytest.mark.parametrize("group", [None, 32, 256])
def test_compiled_values(plugin: None, device: str, dtype: str, group: int | None) -> None:
    """One dynamic compilation serves every value and several sizes."""
    kinds = ("normal", "nans", "infinities", "subnormals", "near_max", "wide", "zeros")
    run, target = None, cases.INPUTS[dtype]
    columns, count = (129, 6) if group is None else (2 * group, 3)
    for rows in (18, 33):
        for kind in kinds:
            x = cases.values(kind, rows * columns, target).view(rows, columns)
            if group is None:
                calls = list(ints.of_any_shape(x, kind))
            else:
                calls = list(ints.of_groups(x, group, kind))
            assert len(calls) == count
            run = run or _compile(calls, dynamic=True)
            _check_compiled(run, calls, device)
            columns = columns if group is None else columns + group
    _require_lowered(1, count)


@device_
@dtype_
def test_compiled_every_pattern(plugin: None, device: str, dtype: str) -> None:
    x = cases.every_pattern(cases.INPUTS[dtype])
    calls = [*ints.of_any_shape(x), *ints.of_groups(x, 64)]
    _check_compiled(_compile(calls, dynamic=False), calls, device)
    tied = ints.tied(cases.INPUTS[dtype], 7, 32)
    calls = [*ints.of_any_shape(tied), *ints.of_groups(tied, 32)]
    _check_compiled(_compile(calls, dynamic=False), calls, device)
    _require_lowered()


@device_
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 0), (3, 1), (17, 129), (4, 3, 257), (2, 64)])
def test_compiled_shapes(plugin: None, device: str, shape: tuple[int, ...]) -> None:
    x = cases.lay_out(cases.values("nans", 33000, torch.bfloat16), shape, "contiguous")
    calls = list(ints.of_any_shape(x, str(shape)))
    if shape and shape[-1] % 64 == 0:
        calls += list(ints.of_groups(x, 64, str(shape)))
    _check_compiled(_compile(calls, dynamic=False), calls, device)
    _require_lowered()


@device_
@pytest.mark.parametrize("layout", cases.LAYOUTS[1:])
def test_compiled_layouts(plugin: None, device: str, layout: str) -> None:
    x = cases.lay_out(cases.values("wide", 33000, torch.bfloat16), (4, 3, 64), layout)
    calls = [*ints.of_any_shape(x, layout), *ints.of_groups(x, 32, layout)]
    _check_compiled(_compile(calls, dynamic=False), calls, device)
    _require_lowered()


@device_
@dtype_
def test_compiled_dequantize(plugin: None, device: str, dtype: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(26, 1)
    target = cases.INPUTS[dtype]
    by_row = ints.extreme_scales(26).view(26, 1)
    by_group = ints.extreme_scales(26 * 8).view(26, 8)
    zero = torch.arange(26 * 8, dtype=torch.uint8).view(26, 8)
    codes = every.view(torch.int8)
    of_tensor = [ints.dequantize_int8(codes, s, 0, target) for s in cases.scales()[3:6]]
    run = _compile(of_tensor[:1], dynamic=False)
    for call in of_tensor:
        _check_compiled(run, [call], device)
    for call in (
        ints.dequantize_int8(codes, by_row, 0, target),
        ints.dequantize_int8(codes, by_group, 32, target),
        ints.dequantize_int8(codes[:, :250], by_group, 32, target),
        ints.dequantize_int4(every, by_group, zero, 64, target),
    ):
        _check_compiled(_compile([call], dynamic=False), [call], device)
    call = ints.dequantize_int4(every, by_group, None, 64, target)
    run = torch.compile(
        lambda q, s: [ints.OPS["dequantize_int4"](q, s, None, 64, target)], fullgraph=True
    )
    _check_compiled(run, [call], device)
    _require_lowered()


@device_
def test_compiled_update(plugin: None, device: str) -> None:
    """As results, and in place: then the compiled code writes to its arguments."""
    for call in list(_updates())[::13]:
        _check_compiled(_compile([call], dynamic=False), [call], device)
        _require_lowered()
        registry.clear_records()
        args = ints.own(call.on(device))
        options = args[2:]

        def in_place(h: Tensor, s: Tensor, options: Any = options) -> Tensor:
            ixt.ops.scaling.update_fp8_scale_(h, s, *options)
            return s * 2

        doubled = torch.compile(in_place, fullgraph=True, dynamic=False)(*args[:2])
        call.check(tuple(map(_dense, args[:2])), f"compiled in place, {device}")
        assert torch.equal(doubled, args[1] * 2) or args[1].isnan().any()
        registry.clear_records()


@device_
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compiled_producers(plugin: None, device: str, dtype: str) -> None:
    """A producer fused into a quantize is rounded to its dtype first, as eager mode does."""
    x, y = (
        cases.values("normal", 64 * 256, cases.INPUTS[dtype], seed).view(64, 256) for seed in (1, 2)
    )

    def products(x: Tensor, y: Tensor) -> list[Any]:
        p = x * y
        results = [ints.OPS[c.op](p, *c.args[1:]) for c in calls]
        return [t for r in results for t in (r if isinstance(r, tuple) else (r,))]

    p = x * y
    calls = [*ints.of_any_shape(p, "producer"), *ints.of_groups(p, 64, "producer")]
    got = torch.compile(products, fullgraph=True, dynamic=False)(x.to(device), y.to(device))
    for call in calls:
        call.check(tuple(got[: len(call.want)]), f"fused, {device}")
        del got[: len(call.want)]
    _require_lowered()
