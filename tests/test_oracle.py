"""The oracle itself, against hand-written codes and PyTorch's own casts."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import torch
from oracle import fp8, grids
from oracle.grids import BF16, E4M3, E5M2, FP16


@pytest.mark.parametrize(
    ("grid", "value", "code"),
    [
        (E4M3, 0.0, 0x00),
        (E4M3, -0.0, 0x80),
        (E4M3, 1.0, 0x38),
        (E4M3, -1.0, 0xB8),
        (E4M3, 448.0, 0x7E),
        (E4M3, 2.0**-6, 0x08),  # smallest normal
        (E4M3, 2.0**-9, 0x01),  # smallest subnormal
        (E4M3, 7 * 2.0**-9, 0x07),  # largest subnormal
        (E4M3, 2.0**-10, 0x00),  # tie between 0 and the smallest subnormal: even
        (E4M3, 3 * 2.0**-10, 0x02),  # tie between codes 1 and 2
        (E4M3, np.nextafter(np.float32(2.0**-10), np.float32(1)), 0x01),
        (E4M3, 1.0625, 0x38),  # tie between 1 and 1.125
        (E4M3, 1.1875, 0x3A),  # tie between 1.125 and 1.25
        (E4M3, 432.0, 0x7E),  # tie between 416 (odd) and 448
        (E4M3, 431.99, 0x7D),
        (E5M2, 57344.0, 0x7B),
        (E5M2, 49152.0, 0x7A),
        (E5M2, 53248.0, 0x7A),  # tie between 0x7A and 0x7B
        (E5M2, 2.0**-14, 0x04),
        (E5M2, 2.0**-16, 0x01),
        (E5M2, 2.0**-17, 0x00),
        (E5M2, 3 * 2.0**-17, 0x02),
        (E5M2, -1.5, 0xBE),
        (FP16, 65504.0, 0x7BFF),
        (FP16, 65519.99, 0x7BFF),
        (FP16, 65520.0, 0x7C00),  # rounds past the last finite value
        (FP16, 2.0**-25, 0x0000),
        (BF16, 1.0 + 2.0**-8, 0x3F80),
        (BF16, 1.0 + 3 * 2.0**-8, 0x3F82),
        (BF16, float(grids.FLT_MAX), 0x7F80),
    ],
)
def test_golden_codes(grid: grids.Grid, value: float, code: int) -> None:
    assert grid.encode(np.array([value]))[0] == code


@pytest.mark.parametrize(
    ("value", "target", "code"),
    [
        (448.01, "e4m3", 0x7E),
        (1e30, "e4m3", 0x7E),
        (-np.inf, "e4m3", 0xFE),
        (np.inf, "e5m2", 0x7B),
        (-60000.0, "e5m2", 0xFB),
        (np.nan, "e4m3", 0x7F),
        (-np.nan, "e4m3", 0x7F),
        (np.nan, "e5m2", 0x7F),
        (-np.nan, "e5m2", 0x7F),
    ],
)
def test_golden_saturation(value: float, target: str, code: int) -> None:
    assert grids.saturate(np.array([value], np.float32), fp8.GRIDS[target])[0] == code


def test_constants() -> None:
    assert (E4M3.max, E5M2.max, FP16.max) == (448.0, 57344.0, 65504.0)
    assert np.float32(BF16.max).view(np.uint32) == 0x7F7F0000
    assert E4M3.values[1] == 2.0**-9
    assert E5M2.values[1] == 2.0**-16
    assert all(np.all(np.diff(g.values) > 0) for g in (E4M3, E5M2, FP16, BF16))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16]
)
def test_decode_is_torchs(dtype: torch.dtype) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    codes = cases.from_raw(np.arange(1 << (8 * size)), dtype)
    theirs, ours = (
        codes.float().numpy(),
        (
            cases.floats(codes)
            if size == 2
            else grids.decode_bits(cases.raw(codes), cases.NAMES[dtype])
        ),
    )
    np.testing.assert_array_equal(ours, theirs)  # NaN equals NaN here
    finite = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours[finite].view(np.uint32), theirs[finite].view(np.uint32))


@pytest.mark.parametrize(
    ("source", "target"),
    [(s, t) for s in ("bf16", "fp16", "fp32") for t in ("e4m3", "e5m2", "fp16", "bf16") if s != t],
)
def test_encode_is_torchs_cast(source: str, target: str) -> None:
    """Every in-range pattern; out of range PyTorch's cast depends on its version."""
    x = cases.every_pattern(cases.INPUTS[source]).flatten()
    grid = {"e4m3": E4M3, "e5m2": E5M2, "fp16": FP16, "bf16": BF16}[target]
    v = cases.floats(x)
    inside = np.abs(v) <= (grid.max if grid in (E4M3, E5M2) else np.inf)
    assert inside.sum() > 20000
    theirs = cases.raw(x.to((cases.TARGETS | cases.INPUTS)[target]))
    np.testing.assert_array_equal(grid.encode(v)[inside], theirs[inside])


def test_current_scaling_by_hand() -> None:
    """One number for each step of the definition."""

    def scale(
        amax: float, eps: float = 0.0, pow2: bool = False, row: bool = False, dtype: str = "bf16"
    ) -> float:
        ceiling = grids.largest_input(dtype) if row else grids.FLT_MAX
        return float(fp8.current_scale(np.array([amax], np.float32), E4M3, eps, pow2, ceiling)[0])

    assert scale(448.0) == 1.0
    assert scale(0.0) == scale(np.inf) == 1.0
    assert scale(0.0, eps=1.0) == 448.0
    assert scale(2.0, eps=4.0) == 112.0
    assert (
        np.float32(scale(3.0)).view(np.uint32) == 0x43155555
    )  # 149.33333: division, correctly rounded
    assert scale(3.0, pow2=True) == 128.0
    assert scale(1e-38) == float(grids.FLT_MAX)
    assert scale(1e-38, pow2=True) == 2.0**127
    assert np.float32(scale(1e-38, row=True)).view(np.uint32) == 0x7F7F0000
    assert scale(1e-38, row=True, dtype="fp32") == float(grids.FLT_MAX)
    assert scale(1e-38, row=True, dtype="fp32", pow2=True) == 2.0**127


def test_quantize_by_hand() -> None:
    x = np.array([[1.0, -2.0, np.nan], [0.0, -0.0, 0.0]], np.float32)
    row = fp8.quantize_current(x, "fp32", "e4m3", row=True)
    assert row.codes.tolist() == [
        [0x76, 0xFE, 0x7F],
        [0x00, 0x80, 0x00],
    ]  # scale 224; a NaN leaves amax alone
    assert row.scale_inv.shape == (2, 1)
    assert row.scale_inv[1, 0] == 1.0
    whole = fp8.quantize_static(x, np.float32(0.5), "e5m2")
    assert whole.codes.tolist() == [[0x38, 0xBC, 0x7F], [0x00, 0x80, 0x00]]
    assert (float(whole.scale_inv), float(whole.amax)) == (2.0, 2.0)
    empty = fp8.quantize_current(np.zeros((0, 5), np.float32), "fp32", "e4m3", row=False)
    assert float(empty.amax) == 0.0
    assert float(empty.scale_inv) == 1.0
    by_row = fp8.quantize_static(x, np.array([[1.0], [2.0]], np.float32), "e4m3")
    assert by_row.amax.tolist() == [[2.0], [0.0]]
    assert by_row.scale_inv.tolist() == [[1.0], [0.5]]


def test_subnormals_survive_numpy() -> None:
    """A process that flushes subnormals would make every later comparison meaningless."""
    tiny = np.array([1], np.uint32).view(np.float32)
    assert np.multiply(tiny, np.float32(4))[0] == np.float32(4) * tiny[0] != 0
    assert fp8.quantize_static(tiny, grids.FLT_MAX, "e4m3").scale_inv.view(np.uint32) == 0x00200000


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts_hold_the_values(layout: str) -> None:
    flat = cases.values("nans", 60, torch.bfloat16)
    t = cases.lay_out(flat, (3, 4, 5), layout)
    expected = cases.raw(flat).reshape(3, 4, 5)
    np.testing.assert_array_equal(
        cases.raw(t), np.broadcast_to(expected[:1], (3, 4, 5)) if layout == "expanded" else expected
    )
    assert t.is_contiguous() == (layout in ("contiguous", "offset"))


@pytest.mark.parametrize("dtype", cases.INPUTS.values(), ids=cases.INPUTS)
def test_values_are_what_they_say(dtype: torch.dtype) -> None:
    def of(kind: str) -> np.ndarray:
        return cases.floats(cases.values(kind, 4096, dtype))

    assert np.isnan(of("nans")).any()
    assert np.isnan(of("only_nans")).all()
    assert np.isinf(of("infinities")).sum() > 1
    smallest_normal = {"bf16": 2.0**-126, "fp16": 2.0**-14, "fp32": 2.0**-126}[cases.NAMES[dtype]]
    assert np.abs(of("subnormals")).max() < smallest_normal
    assert (of("subnormals") != 0).any()
    assert np.signbit(of("zeros")).any()
    assert not of("zeros").any()
    assert np.nanmax(np.abs(of("ties_e4m3"))) == 448.0
    assert np.isin(E4M3.midpoints[64:-1], of("ties_e4m3")).all()
    assert len(np.unique(cases.raw(cases.every_pattern(dtype)))) == 65536
