"""The NVFP4 ops next to their oracle: how to call one, and the tensors it must return."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import calls
import cases
import numpy as np
import torch
from oracle import nvfp4 as oracle
from oracle.grids import FLT_MAX
from torch import Tensor

from inductor_ext.decompositions import nvfp4 as decompositions
from inductor_ext.ops import nvfp4 as ops

OPS: dict[str, Callable[..., Any]] = {
    "quantize": ops.quantize_nvfp4,
    "both": ops.quantize_nvfp4_both,
    "amax": ops.amax_hadamard,
    "dequantize": ops.dequantize_nvfp4,
}
REFERENCES: dict[str, Callable[..., Any]] = {
    "quantize": decompositions.quantize_nvfp4,
    "both": decompositions.quantize_nvfp4_both,
    "amax": decompositions.amax_hadamard,
    "dequantize": decompositions.dequantize_nvfp4,
}
RNG = (-0x123456789ABCDEF, 0x7EDCBA9876543210)
"""A seed and an offset whose four words are all different."""


class Call(calls.Call):
    """A call of an NVFP4 op; only values that are given can be NaN."""

    def nan_equal(self) -> bool:
        return self.op == "dequantize"


def matrix(x: Tensor, transposed: bool) -> np.ndarray:
    flat = cases.floats(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return np.ascontiguousarray(flat.T) if transposed else flat


def rng_tensor(rng: tuple[int, int] | None) -> Tensor | None:
    return None if rng is None else torch.tensor(rng)


def _want(
    x: Tensor,
    amax: Tensor,
    block: tuple[int, int],
    transposed: bool,
    layout: str,
    hadamard: bool,
    rng: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    m = matrix(x, transposed)
    whole = cases.floats(amax).reshape(() if amax.numel() == 1 else (len(m), 1))
    square = block == (16, 16)
    true = oracle.quantize(m, whole, square, hadamard, layout, int(transposed), rng)
    outer = (len(m),) if transposed else x.shape[:-1]
    codes = torch.from_numpy(true.codes).reshape(*outer, m.shape[1] // 2)
    scales = cases.from_raw(true.scales, torch.float8_e4m3fn)
    if layout == "plain" and not square:
        scales = scales.reshape(*outer, m.shape[1] // 16)
    return codes.contiguous(), scales


def quantize(
    x: Tensor,
    amax: Tensor,
    block: tuple[int, int] = (1, 16),
    transposed: bool = False,
    layout: str = "plain",
    hadamard: bool = False,
    rng: tuple[int, int] | None = None,
    label: str = "",
) -> Call:
    want = _want(x, amax, block, transposed, layout, hadamard, rng)
    args = (x, amax, *block, transposed, layout, hadamard, rng_tensor(rng))
    return Call("quantize", args, want, label)


def both(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    square: bool,
    layout: str = "plain",
    hadamard: bool = False,
    rng: tuple[int, int] | None = None,
    label: str = "",
) -> Call:
    block = 16 if square else 1
    rows = _want(x, amax, (block, 16), False, layout, False, rng)
    columns = _want(x, amax_t, (16, block), True, layout, hadamard, rng)
    args = (x, amax, amax_t, square, layout, hadamard, rng_tensor(rng))
    return Call("both", args, rows + columns, label)


def amax_hadamard(x: Tensor, transposed: bool, label: str = "") -> Call:
    want = cases.f32(oracle.amax_hadamard(matrix(x, transposed)))
    return Call("amax", (x, transposed), (want,), label)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    square: bool,
    dtype: torch.dtype,
    layout: str = "plain",
    label: str = "",
) -> Call:
    """`scales` are plain; the op gets them in `layout`."""
    flat = cases.raw(codes).reshape(math.prod(codes.shape[:-1]), codes.shape[-1])
    height = -(-len(flat) // 16) if square else len(flat)
    plain = cases.raw(scales).reshape(height, flat.shape[1] // 8)
    whole = cases.floats(amax).reshape(() if amax.numel() == 1 else (len(flat), 1))
    bits = oracle.dequantize(flat, plain, whole, square, cases.NAMES[dtype])
    want = cases.from_raw(bits, dtype).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    if layout == "gemm":
        rows = plain.repeat(16, 0)[: len(flat)] if square else plain
        scales = cases.from_raw(oracle.swizzle(rows), torch.float8_e4m3fn)
    args = (codes, scales, amax, 16 if square else 1, 16, dtype, layout)
    return Call("dequantize", args, (want,), label)


def true_amax(x: Tensor) -> Tensor:
    v = cases.floats(x)
    magnitude = np.where(np.isnan(v), np.float32(0), np.abs(v))
    return cases.f32(magnitude.max(initial=np.float32(0)))


def amaxes() -> list[Tensor]:
    """Global amaxes that are worth a call: ordinary ones, and the ends of every branch."""
    edge = np.float32(2688) / FLT_MAX
    numbers = [1.0, 3.7, 2688.0, 0.0, -0.0, 1e-45, edge, edge * 0.9, 1e-37, 1e30, FLT_MAX]
    return [cases.f32(np.float32(v)) for v in (*numbers, np.inf, np.nan)]


def row_amaxes(count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    values = np.exp2(rng.uniform(-10, 12, count)).astype(np.float32)
    ends = cases.floats(torch.stack(amaxes()))
    values[::5] = ends[np.arange(len(values[::5])) % len(ends)]
    return values


def ties(dtype: torch.dtype) -> Tensor:
    """(16, 112): ties of e2m1, their neighbours and the grid; with an amax of 2688, scaled by 1."""
    mid = oracle.E2M1.midpoints[:-1].astype(np.float32)
    near = [mid, np.nextafter(mid, np.float32(0)), np.nextafter(mid, FLT_MAX)]
    values = np.concatenate([*near, oracle.E2M1.values.astype(np.float32)])
    values = np.concatenate([values, -values])
    rows = np.resize(values, (16, 7, 16))
    rows[..., 15] = 6.0
    return cases.f32(rows.reshape(16, 112)).to(dtype)


def quantizations(x: Tensor, amax: Tensor, label: str = "") -> Iterator[Call]:
    """Every kind of quantization that the shape of `x` allows."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    by_row = cases.f32(row_amaxes(rows)).reshape(*x.shape[:-1], 1)
    by_column = cases.f32(row_amaxes(columns)).reshape(columns, 1)
    if columns % 16 == 0:
        yield quantize(x, amax, label=label)
        yield quantize(x, by_row, layout="gemm", rng=RNG, label=label)
        yield quantize(x, amax, hadamard=True, label=label)
        yield quantize(x, amax, (16, 16), layout="gemm", rng=RNG, label=label)
        yield quantize(x, amax, (16, 16), label=label)
        yield amax_hadamard(x, False, label)
    if rows % 16 == 0:
        yield quantize(x, by_column, (16, 1), True, rng=RNG, label=label)
        yield quantize(x, amax, (16, 1), True, "gemm", True, label=label)
        yield quantize(x, amax, (16, 16), True, "gemm", label=label)
        yield quantize(x, amax, (16, 16), True, rng=RNG, label=label)
        yield amax_hadamard(x, True, label)
    if rows % 16 == 0 and columns % 16 == 0:
        yield both(x, by_row, by_column, False, "plain", rng=RNG, label=label)
        yield both(x, amax, amax, False, "gemm", True, label=label)
        yield both(x, amax, amax, True, "gemm", rng=RNG, label=label)
        yield both(x, amax, amax, True, label=label)


def every_scale() -> Tensor:
    """(256, 1): all codes of e4m3fn."""
    return cases.every_code(torch.float8_e4m3fn).view(256, 1)
