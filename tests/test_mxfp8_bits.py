"""MXFP8, bit for bit against the oracle: reference, eager kernel and compiled code.

Every test runs on the CPU, and on CUDA where there is a card.
"""

from __future__ import annotations

import itertools
import math

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


def dequantizations(codes: Tensor, seed: int = 0) -> list[blocks.Call]:
    """Dequantize (*, K) codes in every kind of block and both layouts, with random exponents."""
    rng = np.random.default_rng(seed)
    rows, columns = math.prod(codes.shape[:-1]), codes.shape[-1]
    calls = []
    dtypes = itertools.cycle(cases.INPUTS.values())
    for (block_m, block_k), layout in itertools.product(blocks.MX_BLOCKS, ("plain", "gemm")):
        count = -(-rows // block_m), -(-columns // block_k)
        e = rng.integers(0, 256, count).astype(np.uint8)
        label = f"{tuple(codes.shape)}"
        call = blocks.dequantize_mx(codes, e, block_m, block_k, next(dtypes), layout, label)
        calls.append(call)
    return calls


def of_every_exponent(dtype: str) -> Tensor:
    """Rows of 32 whose amax has every exponent and many mantissas; (8192, 32)."""
    if dtype == "fp32":  # the bits around each power of two, and around powers of two times 448
        bits = np.arange(256, dtype=np.int64)[:, None] << 23
        steps = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
        amax = np.minimum((bits + np.resize(steps, 32)[None]).reshape(-1), 0x7F800000)
        first = cases.from_raw(amax.astype(np.uint32), torch.float32)
    else:
        patterns = np.linspace(0, 0x7C00 if dtype == "fp16" else 0x7F80, 8192).astype(np.uint16)
        first = cases.from_raw(patterns, cases.INPUTS[dtype])
    rest = torch.linspace(-1, 1, 31).to(first.dtype)
    others = torch.where(first[:, None].isinf(), rest, first[:, None] * rest)
    return torch.cat([first[:, None], others], 1)


# ---- eager ----


@device_
@dtype_
@target_
def test_values(device: str, dtype: str, target: str) -> None:
    for kind in cases.VALUES:
        for call in blocks.mx_calls(filled(kind, RAGGED, dtype), target, kind):
            together.check_eager(call, device)


@device_
@dtype_
def test_shapes_and_layouts(device: str, dtype: str) -> None:
    flat = cases.values("wide", 98304, cases.INPUTS[dtype])
    for number, shape in enumerate(SHAPES):
        few = dtype != "bf16" or math.prod(shape) > 2500
        for layout in ("contiguous",) if few else cases.layouts_for(shape):
            x = cases.lay_out(flat, shape, layout)
            target = ("e4m3", "e5m2")[number % 2]
            calls = list(blocks.mx_calls(x, target, f"{shape} {layout}"))
            for call in (*calls, *dequantizations(calls[0].want[0])):
                together.check_eager(call, device)


@device_
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@target_
def test_every_pattern(device: str, dtype: str, target: str) -> None:
    """All 65536 inputs: in blocks of neighbours and of all magnitudes, with inf and NaN or not."""
    x = cases.every_pattern(cases.INPUTS[dtype])
    finite = x[torch.from_numpy(np.isfinite(cases.floats(x)))].view(-1, 128)
    for y in (x, finite):
        for call in blocks.mx_calls(y, target, "every pattern"):
            together.check_eager(call, device)


@device_
@dtype_
@target_
@pytest.mark.parametrize("mode", blocks.MODES)
def test_every_exponent(device: str, dtype: str, target: str, mode: str) -> None:
    """Every exponent that quantizing can give, and each side of where it changes."""
    x = of_every_exponent(dtype)
    call = blocks.mx(x, target, 1, 32, mode=mode)
    together.check_eager(call, device)
    if dtype == "fp32":
        seen = set(call.want[1].unique().tolist())
        assert set(range({"e4m3": 247, "e5m2": 240}[target])) <= seen


@device_
@target_
def test_dequantize_every_code_and_exponent(device: str, target: str) -> None:
    """All 256 codes with all 256 exponents, in every layout of scales."""
    codes = cases.every_code(cases.TARGETS[target]).repeat(256, 1)
    e = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, 1)
    for dtype, layout in itertools.product(cases.INPUTS.values(), ("plain", "gemm")):
        call = blocks.dequantize_mx(codes, e, 1, 32, dtype, layout)
        together.check_eager(call, device)
        turned = codes.t().contiguous()
        together.check_eager(blocks.dequantize_mx(turned, e.T, 32, 1, dtype, layout), device)
    strided = codes.t().contiguous().t()
    together.check_eager(blocks.dequantize_mx(strided, e, 1, 32, torch.float32), device)


@device_
def test_padding_is_written_on_every_run(device: str) -> None:
    """Memory that was full of ones before gives zeros in the padding of swizzled scales."""
    x = filled("normal", (5, 33), "bf16")
    calls = [c for c in blocks.mx_calls(x, "e4m3") if c.args[-1] == "gemm"]
    assert len(calls) >= 6
    for call in calls:
        for _ in range(3):
            dirt = [torch.full((n,), 255, dtype=torch.uint8, device=device) for n in (512, 1024)]
            del dirt
            call.check(blocks.op_of(call.op)(*call.on(device)), f"eager, {device}")


# ---- compiled ----


def check_values(shape: tuple[int, ...], dtype: str, target: str, device: str) -> None:
    with together.plugin():
        run = together.compiled(list(blocks.mx_calls(filled("normal", shape, dtype), target)))
        for kind in cases.VALUES:
            calls = list(blocks.mx_calls(filled(kind, shape, dtype), target, kind))
            together.check_compiled(run, calls, device)
        together.require_lowered(len(calls))


@device_
@pytest.mark.parametrize(
    ("dtype", "shape", "target"),
    [("bf16", RAGGED, "e5m2"), ("fp16", EXACT, "e4m3")],
)
def test_compiled_values(device: str, dtype: str, shape: tuple[int, ...], target: str) -> None:
    check_values(shape, dtype, target, device)


@device_
def test_compiled_every_exponent_and_pattern(device: str) -> None:
    for x in (of_every_exponent("fp32"), cases.every_pattern(torch.bfloat16)):
        calls = [
            blocks.mx(x, target, 1, 32, mode=mode)
            for target in cases.TARGETS
            for mode in blocks.MODES
        ]
        with together.plugin():
            together.check_compiled(together.compiled(calls), calls, device)
            together.require_lowered(4)


@device_
@pytest.mark.parametrize("dims", ["rows", "all"])
def test_compiled_sizes(device: str, dims: str) -> None:
    """One graph for all sizes, where there are several blocks (or several tiles of scales).

    PyTorch compiles once more for dimensions of 0 and of 1; test_contracts.py has those.
    """

    def calls(x: Tensor) -> list[blocks.Call]:
        along_k = blocks.mx(x, "e4m3", 1, 32, layout="gemm")
        if dims == "rows":
            return [along_k]
        return [along_k, blocks.mx(x, "e5m2", 32, 1, True, layout="gemm")]

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
@pytest.mark.parametrize("shape", [(160,), (0, 5)], ids=str)
def test_compiled_shapes(device: str, shape: tuple[int, ...]) -> None:
    calls = list(blocks.mx_calls(filled("wide", shape, "bf16"), "e4m3", str(shape)))
    with together.plugin():
        together.check_compiled(together.compiled(calls), calls, device)
        together.require_lowered(len(calls))


@device_
@pytest.mark.parametrize("layout", ["rotated", "expanded"])
def test_compiled_layouts(device: str, layout: str) -> None:
    x = cases.lay_out(cases.values("wide", 33000, torch.bfloat16), (4, 8, 96), layout)
    calls = [
        blocks.mx(x, "e4m3", 1, 32, label=layout),
        blocks.mx(x, "e4m3", 32, 1, True, layout="gemm", label=layout),
        blocks.mx(x, "e4m3", 32, 32, label=layout),
    ]
    with together.plugin():
        together.check_compiled(together.compiled(calls), calls, device)
        together.require_lowered(3)


@device_
@pytest.mark.parametrize("shape", [(256, 256), (70, 133), (3, 5, 64)], ids=str)
def test_compiled_dequantize(device: str, shape: tuple[int, ...]) -> None:
    """Every code with random exponents, each kind of block and layout, as one graph."""
    flat = cases.every_code(torch.float8_e4m3fn).repeat(256)
    calls = dequantizations(flat[: math.prod(shape)].view(shape))
    with together.plugin():
        together.check_apart(calls, device)
        together.require_lowered(len(calls))


def test_oracle_is_the_smallest_power_that_holds_the_block() -> None:
    """ "ceil": the smallest e with amax <= max_finite * 2^(e - 127), by another way."""
    for target, top in (("e4m3", 448.0), ("e5m2", 57344.0)):
        amax = cases.floats(of_every_exponent("fp32")[:, 0])
        amax = amax[np.isfinite(amax)]
        e = oracle.e8m0_of(amax, target, "ceil").astype(np.int64)
        quotient = (amax * (np.float32(1) / np.float32(top))).astype(np.float64)  # fp32 product
        assert (quotient <= np.ldexp(1.0, e - 127)).all()
        lower = quotient <= np.ldexp(1.0, e - 128)
        assert not (lower & (e > 0)).any()


def test_oracle_by_hand() -> None:
    def e(amax: float, target: str = "e4m3", mode: str = "ceil") -> int:
        return int(oracle.e8m0_of(np.array([amax], np.float32), target, mode)[0])

    assert (e(0.0), e(448.0), e(448.01), e(1.0), e(np.inf)) == (0, 127, 128, 119, 254)
    assert (e(1.0, "e5m2"), e(57344.0, "e5m2"), e(np.inf, "e5m2")) == (112, 127, 254)
    assert (e(0.0, mode="floor"), e(1.0, mode="floor"), e(1.99, mode="floor")) == (0, 119, 119)
    assert (e(448.0, mode="floor"), e(500.0, mode="floor"), e(np.inf, mode="floor")) == (
        127, 127, 247,
    )  # fmt: skip
    assert e(float(np.finfo(np.float32).max)) == 247
    # codes and inverses of all 256 exponents
    every = np.arange(256, dtype=np.uint8)
    value, inverse = oracle.e8m0_value(every), oracle.e8m0_inverse(every)
    assert np.isnan([value[255], inverse[255]]).all()
    assert (value[:255].astype(np.float64) * inverse[:255] == 1).all()
    assert (value[0], value[127], value[254]) == (2.0**-127, 1.0, 2.0**127)
    assert inverse[254].view(np.uint32) == 0x00400000


def test_oracles_swizzle_by_hand() -> None:
    scales = np.arange(1, 131, dtype=np.uint8)[:, None].repeat(5, 1)  # (130, 5)
    flat = oracle.swizzled(scales).reshape(-1)
    assert oracle.swizzled(scales).shape == (256, 8)
    # row 0 and 1 of tile 0: bytes 0 and 16; row 32: byte 4; row 128, the third tile: byte 1024
    assert (flat[0], flat[16], flat[4], flat[1024]) == (1, 2, 33, 129)
    assert (flat[512], flat[513]) == (1, 0)  # column 4 is the second tile's first, 5 is padding
    assert np.count_nonzero(flat) == scales.size
    repeated = oracle.mx_operand(np.array([[7, 8]], np.uint8), 32, 32, False, (5, 33))
    assert repeated.tolist() == [[7, 8]] * 5
    turned = oracle.mx_operand(np.array([[7, 8]], np.uint8), 32, 32, True, (5, 33))
    assert turned.tolist() == [[7]] * 32 + [[8]]


def test_oracle_of_blocks_by_hand() -> None:
    x = np.zeros((3, 40), np.float32)
    x[0, 0], x[0, 33], x[2, 39] = -2.0, np.nan, 7.0
    assert oracle.amax_of(x, 1, 32).tolist() == [[2, 0], [0, 0], [0, 7]]
    assert oracle.amax_of(x, 32, 32).tolist() == [[2, 7]]
    assert oracle.amax_of(x, 2, 1).shape == (2, 40)
    for shape in ((0, 5), (5, 0)):
        got = oracle.amax_of(np.zeros(shape, np.float32), 32, 32)
        assert got.shape == tuple(-(-n // 32) for n in shape)
    true = oracle.quantize_fp8(x, "bf16", "e4m3", 32, 32, 0.0, False)
    assert true.codes[0, 0] == 0xFE
    assert (true.codes[2, 39], true.codes[0, 33]) == (0x7E, 0x7F)
    assert true.scales.tolist() == [[float(np.float32(2) / 448), float(np.float32(7) / 448)]]
