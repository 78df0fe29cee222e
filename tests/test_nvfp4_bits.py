"""NVFP4, bit for bit against the oracle: reference and eager kernel. Compiled: test_nvfp4_compiled.

Every test runs on the CPU, and on CUDA where there is a card.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import cases
import numpy as np
import nvfp4_family as family
import pytest
import torch

from inductor_ext.testing import check_op

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
device_ = pytest.mark.parametrize("device", DEVICES)
dtype_ = pytest.mark.parametrize("dtype", list(cases.INPUTS))
SHAPES: tuple[tuple[int, ...], ...] = (
    (16,),
    (0,),
    (48,),
    (0, 16),
    (16, 0),
    (0, 5),
    (1, 16),
    (16, 1),
    (16, 7),
    (5, 48),
    (33, 16),
    (32, 33),
    (160, 80),
    (17, 1040),
    (272, 144),
    (144, 129),
    (4, 8, 48),
    (2, 3, 64),
    (2, 0, 16),
    (2, 4, 2, 5),
)


def _check(call: family.Call, device: str) -> None:
    args = call.on(device)
    call.check(family.REFERENCES[call.op](*args), f"reference, {device}")
    call.check(family.OPS[call.op](*args), f"eager, {device}")


@device_
@dtype_
def test_values(device: str, dtype: str) -> None:
    for kind in cases.VALUES:
        x = cases.values(kind, 48 * 144, cases.INPUTS[dtype]).view(48, 144)
        for call in family.quantizations(x, family.true_amax(x), kind):
            _check(call, device)


@device_
@dtype_
def test_shapes_and_layouts(device: str, dtype: str) -> None:
    flat = cases.values("wide", 40000, cases.INPUTS[dtype])
    for shape in SHAPES:
        for layout in cases.layouts_for(shape):
            x = cases.lay_out(flat, shape, layout)
            for call in family.quantizations(x, cases.f32(30.0), f"{shape} {layout}"):
                _check(call, device)


@device_
def test_alignments(device: str) -> None:
    """Vector loads: every start within 16 elements, and rows that start anywhere."""
    flat = cases.values("normal", 8192, torch.bfloat16)
    for start in range(9):
        for stride in (64, 65, 66, 72):
            x = flat.as_strided((48, 64), (stride, 1), start)
            for call in family.quantizations(x, cases.f32(3.0), f"start {start} stride {stride}"):
                call.check(family.OPS[call.op](*call.on(device)), f"eager, {device}")


@device_
@dtype_
def test_every_pattern(device: str, dtype: str) -> None:
    """All 65536 values of a 16-bit dtype in blocks of neighbours, and in blocks of everything."""
    x = cases.every_pattern(cases.INPUTS[dtype])
    finite = x.flatten()[torch.from_numpy(np.isfinite(cases.floats(x.flatten())))]
    finite = finite[: len(finite) // 4096 * 4096].view(-1, 256)
    for y, amax in itertools.product((x, x.t(), finite), (cases.f32(4.0), cases.f32(1e-20))):
        _check(family.quantize(y, amax, label="patterns"), device)
        _check(family.quantize(y, amax, (16, 1), True, label="patterns"), device)


@device_
@dtype_
def test_every_amax(device: str, dtype: str) -> None:
    for kind in ("normal", "wide", "subnormals", "near_max", "zeros"):
        x = cases.values(kind, 32 * 64, cases.INPUTS[dtype]).view(32, 64)
        for amax in family.amaxes():
            label = f"{kind}, amax {float(amax)}"
            _check(family.quantize(x, amax, label=label), device)
            _check(family.both(x, amax, amax, True, rng=family.RNG, label=label), device)


@device_
@dtype_
def test_ties(device: str, dtype: str) -> None:
    x = family.ties(cases.INPUTS[dtype])
    amax = cases.f32(2688.0)
    for rng in (None, (1, 2), (3, 4)):
        call = family.quantize(x, amax, rng=rng)
        assert set(cases.raw(call.want[1]).flatten()) == {0x38}  # every block is scaled by one
        _check(call, device)
        _check(family.both(x, amax, amax, False, rng=rng), device)


@device_
def test_random_offsets(device: str) -> None:
    """Seeds and offsets with every word in use, negative ones too."""
    x = cases.values("normal", 32 * 64, torch.bfloat16).view(32, 64)
    for rng in ((0, 0), (-1, -1), (1 << 40, 5), (7, 1 << 40), (1 << 63) - 1, -(1 << 63)):
        pair = rng if isinstance(rng, tuple) else (rng, ~rng)
        _check(family.both(x, cases.f32(3.0), cases.f32(3.0), False, rng=pair), device)


@device_
def test_amaxes_of_one_element(device: str) -> None:
    x = cases.values("normal", 16 * 32, torch.bfloat16)
    for shape in ((512,), (16, 32), (2, 8, 32)):
        for amax_shape in ((), (1,), (1, 1), (1, 1, 1)):
            amax = cases.f32(3.0).reshape(amax_shape)
            _check(family.quantize(x.view(shape), amax), device)


@device_
@dtype_
def test_dequantize_everything(device: str, dtype: str) -> None:
    """Every code byte with every scale and every amax."""
    out = cases.INPUTS[dtype]
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # (256, 256)
    scales = family.every_scale().repeat(1, 32)  # a scale a row
    for amax in family.amaxes():
        _check(family.dequantize(codes, scales, amax, False, out), device)
    rows = cases.f32(family.row_amaxes(256)).view(256, 1)
    for layout in ("plain", "gemm"):
        _check(family.dequantize(codes, scales, rows, False, out, layout), device)
        _check(family.dequantize(codes, scales[:16], rows, True, out, layout), device)


@device_
def test_dequantize_shapes_and_layouts(device: str) -> None:
    flat = torch.arange(256, dtype=torch.uint8).repeat(40)
    for shape in ((8,), (0,), (0, 8), (5, 0), (5, 24), (17, 16), (2, 3, 40), (33, 136), (2, 0, 8)):
        rows, blocks = int(np.prod(shape[:-1])), shape[-1] // 8
        for layout in cases.layouts_for(shape):
            codes = cases.lay_out(flat, shape, layout)
            for order in ("plain", "gemm"):
                every = cases.every_code(torch.float8_e4m3fn).repeat(10)
                scales = every[: rows * blocks].view(*shape[:-1], blocks)
                square = every[: (rows + 15) // 16 * blocks].view(-(-rows // 16), blocks)
                for dtype in cases.INPUTS.values():
                    amax = cases.f32(0.7)
                    _check(family.dequantize(codes, scales, amax, False, dtype, order), device)
                    _check(family.dequantize(codes, square, amax, True, dtype, order), device)
        if rows:
            by_row = cases.f32(family.row_amaxes(rows)).view(*shape[:-1], 1)
            codes = flat[: rows * shape[-1]].view(shape)
            _check(family.dequantize(codes, scales, by_row, False, torch.bfloat16), device)


def _stochastic(device: torch.device) -> Iterator[tuple[Any, ...]]:
    x = cases.values("normal", 3 * 16 * 48, torch.bfloat16).view(3, 16, 48).to(device)
    yield x, torch.tensor(4.0, device=device), 16, 1, True, "gemm", False, family.rng_tensor((1, 2))


def test_contract_of_stochastic_rounding() -> None:
    """The rest of the harness is in test_contracts.py, with the inputs that are registered.

    They have no `rng`: under dynamic sizes, a batch of 2 would be taken for its length.
    """
    checks = ("fake", "pure", "reference", "opcheck", "compiled_on", "compiled_off")
    check_op(family.OPS["quantize"], _stochastic, checks=checks)  # type: ignore[arg-type]
