"""scaled_mm: exact where exactness is possible, within the rounding bound elsewhere."""

from __future__ import annotations

import itertools

import cases
import numpy as np
import pytest
import torch
from oracle import fp8 as oracle
from oracle.grids import encode_bits
from torch import Tensor

from inductor_ext.ops.scaled_mm import scaled_mm
from inductor_ext.testing import require_equal

device_ = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
dtype_ = pytest.mark.parametrize("dtype", list(cases.INPUTS))
SHAPES = ((16, 32, 48), (1, 16, 16), (5, 33, 7), (128, 256, 64), (3, 1, 1), (130, 100, 129))
EMPTY = ((0, 16, 16), (16, 0, 16), (16, 16, 0), (0, 0, 0), (3, 0, 5))
# Half a unit in the last place of the result, and what accumulation may lose of the magnitudes:
# fp32 roundings on the CPU; Hopper's tensor cores keep about 13 bits below the largest term.
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
ACCUMULATION = {"cpu": 4 * 2.0**-24, "cuda": 2.0**-12}


def _integers(rng: np.random.Generator, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(rng.integers(-2, 3, (rows, columns)).astype(np.float32)).to(dtype)


def _powers(rng: np.random.Generator, *shape: int) -> Tensor:
    return cases.f32(np.exp2(rng.integers(-2, 3, shape)).astype(np.float32))


def _column_major(b: Tensor) -> Tensor:
    return b.t().contiguous().t()


def _exact(args: tuple[Tensor, ...], bias: Tensor | None, dtype: str) -> Tensor:
    added = None if bias is None else cases.floats(bias)
    value, _ = oracle.scaled_mm_bounds(*(cases.floats(t) for t in args), added)
    with np.errstate(over="ignore"):
        return cases.from_raw(encode_bits(value.astype(np.float32), dtype), cases.INPUTS[dtype])


@device_
@dtype_
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensor", "row"])
def test_integer_products_are_exact(device: str, dtype: str, rowwise: bool) -> None:
    """Sums of small integers and powers of two fit any accumulator: one rounding, at the end."""
    rng = np.random.default_rng(0)
    codes = (torch.float8_e4m3fn, torch.float8_e5m2)
    pairs = [(codes[0], codes[0]), (codes[0], codes[1]), (codes[1], codes[0])]
    for (m, k, n), pair, with_bias in itertools.product(SHAPES + EMPTY, pairs, (False, True)):
        a, b = _integers(rng, m, k, pair[0]), _integers(rng, k, n, pair[1])
        scale_a = _powers(rng, m, 1) if rowwise else _powers(rng)
        scale_b = _powers(rng, 1, n) if rowwise else _powers(rng)
        bias = None
        if with_bias:
            bias = torch.from_numpy(rng.integers(-9, 10, n) / 4).to(cases.INPUTS[dtype])
        args = (a, b, scale_a, scale_b)
        want = _exact(args, bias, dtype)
        for layout in (_column_major(b), b):
            here = [t.to(device) for t in (a, layout, scale_a, scale_b)]
            got = scaled_mm(*here, None if bias is None else bias.to(device), want.dtype)
            label = f"{(m, k, n)} {pair} bias {with_bias}"
            require_equal("scaled_mm", "exact", got, want, sample=label, same_device=False)


@device_
@dtype_
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_rounding_bound(device: str, dtype: str, rowwise: bool, fast: bool) -> None:
    rng = np.random.default_rng(1)
    for m, k, n in SHAPES:
        a = torch.from_numpy(rng.standard_normal((m, k), np.float32) * 20).to(torch.float8_e4m3fn)
        b = torch.from_numpy(rng.standard_normal((k, n), np.float32) * 20).to(torch.float8_e4m3fn)
        shapes = ((m, 1), (1, n)) if rowwise else ((), ())
        scale_a, scale_b = (
            cases.f32(rng.uniform(0.001, 0.02, s).astype(np.float32)) for s in shapes
        )
        bias = torch.from_numpy(rng.standard_normal(n)).to(cases.INPUTS[dtype])
        value, magnitude = oracle.scaled_mm_bounds(
            *(cases.floats(t) for t in (a, b, scale_a, scale_b)), cases.floats(bias)
        )
        here = [t.to(device) for t in (a, _column_major(b), scale_a, scale_b, bias)]
        got = cases.floats(scaled_mm(*here, cases.INPUTS[dtype], fast)).astype(np.float64)
        # a rounded accumulation is rounded again to the result's dtype
        bound = (1 + HALF_ULP[dtype]) * ACCUMULATION[device] * magnitude
        bound += HALF_ULP[dtype] * np.abs(value) + 2.0**-25
        assert (np.abs(got - value) <= bound).all(), (m, k, n)


@device_
def test_nan_and_extremes(device: str) -> None:
    """A NaN code spoils its row or column alone; the largest codes overflow nothing in fp32."""
    a = torch.ones(4, 16).to(torch.float8_e4m3fn)
    b = torch.ones(16, 16).to(torch.float8_e4m3fn)
    a.view(torch.uint8)[1, 3] = 0x7F
    b.view(torch.uint8)[2, 5] = 0xFF
    one = torch.ones(()).to(device)
    got = scaled_mm(a.to(device), b.to(device), one, one, None, torch.float32).cpu()
    nan = torch.zeros(4, 16, dtype=torch.bool)
    nan[1], nan[:, 5] = True, True
    assert torch.equal(got.isnan(), nan)
    assert (got[~nan] == 16).all()
    top = torch.full((16, 64), 448.0).to(torch.float8_e4m3fn).to(device)
    assert (scaled_mm(top, top.t(), one, one, None, torch.float32) == 448.0**2 * 64).all()
    assert (scaled_mm(top, top.t(), one, one, None, torch.float16) == torch.inf).all()


@device_
def test_strided_operands(device: str) -> None:
    rng = np.random.default_rng(2)
    a, b = (_integers(rng, 40, 40, torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(())
    for x, y in ((a.t(), b), (a[::2, 1:33], b[1:33, ::3]), (a[3:4].expand(5, 40), b[:, 7:])):
        want = _exact((x, y, one, one), None, "bf16")
        here = [t.to(device) for t in (a, b)]
        x_here = here[0].as_strided(x.shape, x.stride(), x.storage_offset())
        y_here = here[1].as_strided(y.shape, y.stride(), y.storage_offset())
        got = scaled_mm(x_here, y_here, one.to(device), one.to(device), None, torch.bfloat16)
        require_equal("scaled_mm", "strided", got, want, same_device=False)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"a": torch.zeros(4, 16)}, TypeError, "`a` must be float8"),
        ({"b": torch.zeros(8, 8).to(torch.float8_e4m3fn)}, ValueError, "`b` must"),
        ({"a": torch.zeros(16).to(torch.float8_e4m3fn)}, ValueError, "`a` must have 2 dim"),
        ({"scale_a": torch.ones(3, 1)}, ValueError, "`scale_a` must"),
        ({"scale_b": torch.ones(8, 1)}, ValueError, "`scale_b` must"),
        ({"scale_b": torch.ones((), dtype=torch.float64)}, TypeError, "`scale_b` must"),
        ({"bias": torch.ones(3, dtype=torch.bfloat16)}, ValueError, "`bias` must"),
        ({"bias": torch.ones(8)}, TypeError, "`bias` must"),
        ({"dtype": torch.int8}, TypeError, "`dtype` must"),
    ],
    ids=str,
)
def test_refusals(change: dict[str, object], error: type[Exception], words: str) -> None:
    good = {
        "a": torch.zeros(4, 16).to(torch.float8_e4m3fn),
        "b": torch.zeros(16, 8).to(torch.float8_e4m3fn),
        "scale_a": torch.ones(()),
        "scale_b": torch.ones(()),
        "bias": None,
        "dtype": torch.bfloat16,
    }
    assert scaled_mm(**good).shape == (4, 8)
    with pytest.raises(error, match=words):
        scaled_mm(**(good | change))


def test_both_e5m2_is_refused() -> None:
    a = torch.zeros(16, 16).to(torch.float8_e5m2)
    with pytest.raises(TypeError, match="must not both be float8_e5m2"):
        scaled_mm(a, a, torch.ones(()), torch.ones(()), None, torch.bfloat16)
