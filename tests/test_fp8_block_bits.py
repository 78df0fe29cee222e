"""FP8 with a scale a block or a column, and with a transpose, bit for bit against the oracle.

Every test runs on the CPU, and on CUDA where there is a card; compiled tests put all ops on one
tensor into one graph and then change its values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import blocks
import cases
import numpy as np
import pytest
import together
import torch
from oracle import blocks as oracle
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
device_ = pytest.mark.parametrize("device", DEVICES)
dtype_ = pytest.mark.parametrize("dtype", list(cases.INPUTS))
target_ = pytest.mark.parametrize("target", list(cases.TARGETS))

RAGGED, EXACT = (70, 133), (256, 128)
SHAPES = (*cases.SHAPES[1:], (127, 3), (1, 128), (129, 1), (2, 64, 64), (256, 384))


def filled(kind: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor without a base: Dynamo guards the base of a view as well."""
    return cases.values(kind, math.prod(shape), cases.INPUTS[dtype]).view(shape).clone()


def dequantizations(calls: list[blocks.Call]) -> Iterator[blocks.Call]:
    """Dequantize what each call of quantize_fp8_block gives; dtypes take turns."""

    def has_layout(call: blocks.Call) -> bool:  # no GEMM takes blocks down the columns of codes
        block_k = call.args[2] if call.args[4] else call.args[3]
        return bool(block_k > 1 or call.args[-1] == "plain")

    quantize = [c for c in calls if c.op == "quantize_fp8_block" and has_layout(c)]
    for call, dtype in zip(quantize, itertools.cycle(cases.INPUTS.values()), strict=False):
        yield blocks.dequantize_block(call, dtype)


# ---- eager ----


@device_
@dtype_
@target_
def test_values(device: str, dtype: str, target: str) -> None:
    for kind in cases.VALUES:
        calls = list(blocks.fp8_calls(filled(kind, RAGGED, dtype), target, kind))
        for call in (*calls, *dequantizations(calls)):
            together.check_eager(call, device)


@device_
@target_
def test_options(device: str, target: str) -> None:
    """Every eps and pow2 on every kind of block."""
    for kind, (eps, pow2) in itertools.product(cases.VALUES, blocks.OPTIONS):
        x = filled(kind, (33, 40), "bf16")
        for block_m, block_k in ((1, 32), (32, 1), (32, 32)):
            for transposed in (False, True):
                call = blocks.block(x, target, block_m, block_k, transposed, eps, pow2)
                together.check_eager(call, device)
        for transposed in (False, True):
            together.check_eager(blocks.column(x, target, transposed, eps, pow2, kind), device)
        together.check_eager(blocks.tensor_both(x, target, eps, pow2, kind), device)


@device_
@dtype_
def test_shapes_and_layouts(device: str, dtype: str) -> None:
    flat = cases.values("wide", 98304, cases.INPUTS[dtype])
    for number, shape in enumerate(SHAPES):
        few = dtype != "bf16" or math.prod(shape) > 2500
        for layout in ("contiguous",) if few else cases.layouts_for(shape):
            x = cases.lay_out(flat, shape, layout)
            target = ("e4m3", "e5m2")[number % 2]
            size = blocks.GROUPS[number % 3]
            calls = list(blocks.fp8_calls(x, target, f"{shape} {layout}", (size,)))
            for call in (*calls, *dequantizations(calls)):
                together.check_eager(call, device)


@device_
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@target_
def test_every_pattern(device: str, dtype: str, target: str) -> None:
    """All 65536 inputs: in blocks of neighbours and of all magnitudes, with inf and NaN or not."""
    x = cases.every_pattern(cases.INPUTS[dtype])
    finite = x[torch.from_numpy(np.isfinite(cases.floats(x)))].view(-1, 128)
    for y, size in itertools.product((x, finite), (32, 128)):
        for call in blocks.fp8_calls(y, target, "every pattern", (size,)):
            together.check_eager(call, device)


@device_
def test_alignments(device: str) -> None:
    """Vector loads: rows and starts that are aligned to nothing."""
    flat = cases.values("wide", 16384, torch.bfloat16)
    for start, columns in itertools.product((0, 1, 3, 8), (31, 32, 136, 200)):
        x = flat[start : start + 33 * columns].view(33, columns)
        for call in blocks.fp8_calls(x, "e4m3", f"start {start}, {columns} columns", (32,)):
            together.check_eager(call, device)


@device_
@target_
def test_static_scales(device: str, target: str) -> None:
    """Scales of every kind and of every rank with one element."""
    x = filled("wide", (33, 65), "bf16")
    for scale in cases.scales():
        together.check_eager(blocks.static_both(x, scale, target), device)
    for shape in ((1,), (1, 1), (1, 1, 1)):
        together.check_eager(blocks.static_both(x, cases.f32(3.0).reshape(shape), target), device)


@device_
@target_
def test_dequantize_every_code(device: str, target: str) -> None:
    """All 256 codes with each of a few hundred scales; strided codes and scales."""
    codes = cases.every_code(cases.TARGETS[target]).repeat(64, 1)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, (64, 8), dtype=np.uint64).astype(np.uint32)
    bits[:13, 0] = cases.raw(torch.stack(cases.scales()))
    scales = cases.from_raw(bits, torch.float32)
    for dtype in cases.INPUTS.values():
        want = cases.from_raw(
            oracle.dequantize(
                cases.raw(codes), target, cases.floats(scales), 1, 32, cases.NAMES[dtype]
            ),
            dtype,
        )
        for q, s in ((codes, scales), (codes.t().contiguous().t(), scales.t().contiguous().t())):
            call = blocks.Call("dequantize_fp8_block", (q, s, 1, 32, dtype), (want,))
            together.check_eager(call, device)


# ---- compiled ----

Calls = Callable[[Tensor, str], list[blocks.Call]]


def _everything(target: str, size: int) -> Calls:
    return lambda x, label: list(blocks.fp8_calls(x, target, label, (size,)))


def check_values(calls: Calls, shape: tuple[int, ...], dtype: str, device: str) -> None:
    """Compile calls on one shape and run them on every kind of values."""
    with together.plugin():
        run = together.compiled(calls(filled("normal", shape, dtype), ""))
        for kind in cases.VALUES:
            made = calls(filled(kind, shape, dtype), kind)
            together.check_compiled(run, made, device)
        together.require_lowered(len(made))


@device_
@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("fp16", RAGGED, 64), ("bf16", EXACT, 128), ("fp32", EXACT, 32)],
)
def test_compiled_values(device: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
    check_values(_everything(("e4m3", "e5m2")[size == 64], size), shape, dtype, device)


@device_
def test_compiled_every_pattern(device: str) -> None:
    def calls(x: Tensor, label: str) -> list[blocks.Call]:
        return [blocks.block(x, t, 1, 32, label=label) for t in cases.TARGETS] + [
            blocks.block(x, "e4m3", 32, 32, True, label=label)
        ]

    x = cases.every_pattern(torch.bfloat16)
    with together.plugin():
        run = together.compiled(calls(x, ""))
        for y in (x, x.t().contiguous(), x.view(128, 2, 256).transpose(0, 1).reshape(256, 256)):
            together.check_compiled(run, calls(y.clone(), "every pattern"), device)
        together.require_lowered(3)


@device_
@pytest.mark.parametrize("dims", ["rows", "all"])
def test_compiled_sizes(device: str, dims: str) -> None:
    """One graph for all sizes, where there are several blocks (or several tiles of scales).

    PyTorch compiles once more for dimensions of 0 and of 1; test_contracts.py has those.
    """

    def calls(x: Tensor) -> list[blocks.Call]:
        some = [
            blocks.block(x, "e4m3", 1, 128, layout="gemm"),
            blocks.block(x, "e5m2", 32, 1, True),
            blocks.column(x, "e4m3", True, 0.0, False),
        ]
        return some[:1] if dims == "rows" else some

    rows = [(130, 256), (300, 256), (161, 256)]
    shapes = rows if dims == "rows" else [(257, 133), (130, 256), (384, 129)]
    with together.plugin():
        run = None
        for shape in shapes:
            made = calls(filled("wide", shape, "bf16"))
            if run is None:
                run = together.compiled(made, dynamic=True if dims == "all" else None)
            together.check_compiled(run, made, device, any_rows=dims == "rows")
        together.require_lowered(len(made))


@device_
@pytest.mark.parametrize("shape", [(0,), (5, 0), (2, 3, 1, 5)], ids=str)
def test_compiled_shapes(device: str, shape: tuple[int, ...]) -> None:
    """One graph a shape, with the plain layout of every op and both of some."""
    calls = list(blocks.fp8_calls(filled("wide", shape, "bf16"), "e4m3", str(shape), (32,)))
    with together.plugin():
        together.check_compiled(together.compiled(calls), calls, device)
        together.require_lowered(len(calls))


@device_
@pytest.mark.parametrize("layout", ["rotated", "strided"])
def test_compiled_layouts(device: str, layout: str) -> None:
    flat = cases.values("wide", 33000, torch.bfloat16)
    x = cases.lay_out(flat, (4, 8, 96), layout)
    calls = [
        blocks.block(x, "e4m3", 1, 32, label=layout),
        blocks.block(x, "e4m3", 32, 1, True, label=layout),
        blocks.block(x, "e4m3", 64, 64, label=layout),
        blocks.tensor_both(x, "e4m3", 0.0, False, label=layout),
    ]
    with together.plugin():
        together.check_compiled(together.compiled(calls), calls, device)
        together.require_lowered(len(calls))


@device_
@pytest.mark.parametrize("shape", [RAGGED, EXACT], ids=str)
def test_compiled_dequantize(device: str, shape: tuple[int, ...]) -> None:
    calls = list(dequantizations(list(blocks.fp8_calls(filled("wide", shape, "bf16"), "e4m3"))))
    with together.plugin():
        together.check_apart(calls[::2], device)
        together.require_lowered(len(calls[::2]))


@device_
@pytest.mark.parametrize("shape", [RAGGED, EXACT], ids=str)
def test_compiled_producers(device: str, shape: tuple[int, ...]) -> None:
    """A producer fused into a quantize is rounded to its dtype first, as eager mode does."""
    x, y = (
        cases.values("normal", math.prod(shape), torch.bfloat16, seed).view(shape)
        for seed in (1, 2)
    )

    def calls(p: Tensor) -> list[blocks.Call]:
        return [
            blocks.block(p, "e4m3", 1, 32),
            blocks.block(p, "e4m3", 32, 1, True),
            blocks.column(p, "e4m3", True, 0.0, False),
        ]

    made = calls(x * y)
    plan = [(blocks.op_of(c.op), c.args[1:]) for c in made]

    def fused(x: Tensor, y: Tensor) -> list[tuple[Tensor, ...]]:
        return [op(x * y, *constants) for op, constants in plan]

    with together.plugin():
        got = torch.compile(fused, fullgraph=True, dynamic=False)(x.to(device), y.to(device))
        for call, result in zip(made, got, strict=True):
            call.check(tuple(result), f"fused, {device}")
        together.require_lowered(len(made))
