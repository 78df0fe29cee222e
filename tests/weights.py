"""Quantized weights of every kind, what they are worth in float64, and how far a product may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import torch
from oracle import blocks, fp8, ints, nvfp4
from oracle.grids import decode_bits
from torch import Tensor

import inductor_ext as ixt

E5M2 = torch.float8_e5m2
FORMATS: dict[str, ixt.Format] = {
    "int8 row": ixt.INT8(),
    "int8 tensor": ixt.INT8(granularity="tensor"),
    **{f"int8 {g}": ixt.INT8(granularity="group", group=g) for g in (32, 64, 128, 256)},
    **{f"int4 {g}": ixt.INT4(group=g) for g in (32, 64, 128, 256)},
    **{f"int4 asymmetric {g}": ixt.INT4(group=g, symmetric=False) for g in (32, 64, 128, 256)},
    "fp8 tensor": ixt.FP8(granularity="tensor"),
    "fp8 row": ixt.FP8(),
    "fp8 1x128": ixt.FP8(granularity="block"),
    "fp8 1x32": ixt.FP8(granularity="block", block=32),
    "fp8 128x128": ixt.FP8(granularity="square"),
    "fp8 64x64": ixt.FP8(granularity="square", block=64),
    "e5m2 row": ixt.FP8(dtype=E5M2),
    "e5m2 1x128": ixt.FP8(dtype=E5M2, granularity="block"),
    "mxfp8": ixt.MXFP8(),
    "mxfp8 32x32": ixt.MXFP8(square=True),
    "mxfp8 e5m2": ixt.MXFP8(dtype=E5M2),
    "nvfp4": ixt.NVFP4(),
    "nvfp4 16x16": ixt.NVFP4(square=True),
    "nvfp4 row": ixt.NVFP4(granularity="row"),
}
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""The most by which rounding to a dtype changes a number, relative to it."""
CPU_SUM = 2 * 2.0**-24
"""The exact sum is rounded to fp32 once, and once more when the bias is added."""


def kernel_sum(k: int) -> float:
    """Return what the CUDA kernel's sums may lose of the sum of magnitudes.

    An instruction adds 16 products, exact, to a sum, cutting each addend below 2^-23 of the
    largest: 17 * 2^-23.  Up to 8 of them make the sum of a stage of 64 or 128 elements.  Then fp32
    roundings of 2^-24: the scale, the addition of each stage of a warp (twice as many where a stage
    has two groups, four times for four), eight warps, two factors of the whole, the bias.
    """
    stages = 4 * -(-k // (64 * 8))
    return 8 * 17 * 2.0**-23 + (stages + 1 + 8 + 2 + 1) * 2.0**-24


def multiple(format: ixt.Format) -> int:
    """Return what K must be a multiple of, so that it quantizes and the CUDA kernel reads it."""
    if isinstance(format, ixt.INT4):
        return format.group
    return 32 if isinstance(format, ixt.NVFP4) else 16


def value(q: ixt.Quantized, format: ixt.Format) -> np.ndarray:
    """Return the weight in float64, by the oracle of its format."""
    codes, scale, _, zero = (None if t is None else cases.raw(t) for t in q)
    f32 = cases.floats(q.scale_inv) if q.scale_inv.dtype == torch.float32 else None
    if isinstance(format, ixt.INT8):
        group = format.group if format.granularity == "group" else 0
        bits = ints.dequantize_int8(codes.view(np.int8), f32, group, "fp32")
    elif isinstance(format, ixt.INT4):
        bits = ints.dequantize_int4(codes, f32, zero, format.group, "fp32")
    elif isinstance(format, ixt.NVFP4):
        bits = nvfp4.dequantize(codes, scale, cases.floats(q.amax), format.square, "fp32")
    else:
        target = cases.NAMES[q.codes.dtype]
        if isinstance(format, ixt.MXFP8):
            block = (32 if format.square else 1, 32)
            bits = blocks.dequantize(codes, target, blocks.e8m0_value(scale), *block, "fp32")
        elif format.granularity in ("tensor", "row"):
            bits = fp8.dequantize(codes, target, f32, "fp32")
        else:
            block = (format.block if format.granularity == "square" else 1, format.block)
            bits = blocks.dequantize(codes, target, f32, *block, "fp32")
    return decode_bits(bits, "fp32").astype(np.float64)


@dataclass(frozen=True)
class Case:
    """A product: x (M, K), a weight (N, K) quantized to a format, perhaps a bias."""

    x: Tensor
    q: ixt.Quantized
    format: ixt.Format
    bias: Tensor | None

    def on(self, device: str) -> Case:
        moved = ixt.Quantized(*(None if t is None else t.to(device) for t in self.q))
        bias = None if self.bias is None else self.bias.to(device)
        return Case(self.x.to(device), moved, self.format, bias)

    def run(self) -> Tensor:
        return ixt.weight_only_mm(self.x, self.q, self.format, bias=self.bias)

    def require(self, got: Tensor, of_sum: float) -> None:
        """Hold a result to ``of_sum`` of the sum of magnitudes, and a rounding to its dtype."""
        weight = value(self.q, self.format)
        x = cases.floats(self.x).astype(np.float64)
        exact, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
        if self.bias is not None:
            added = cases.floats(self.bias).astype(np.float64)
            exact, size = exact + added, size + np.abs(added)
        unit = UNIT[got.dtype]
        # a number that is off by of_sum * size is rounded; below the normal numbers, by 2^-25
        bound = (1 + unit) * of_sum * size + unit * np.abs(exact) + 2.0**-25
        off = np.abs(cases.floats(got).astype(np.float64) - exact)
        assert got.shape == exact.shape
        assert got.dtype == self.x.dtype
        assert (off <= bound).all(), f"{self.format}: {(off / bound).max():.3g} of the bound"


def case(
    name: str, m: int, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, seed: int = 0
) -> Case:
    """Rows of the weight differ by powers of two, so that a scale of another row is seen."""
    format = FORMATS[name]
    rng = np.random.default_rng(seed)
    rows = np.exp2(rng.integers(-3, 4, (n, 1)))
    w = torch.from_numpy((rng.standard_normal((n, k)) * rows).astype(np.float32))
    x = torch.from_numpy(rng.standard_normal((m, k)).astype(np.float32)).to(dtype)
    added = torch.from_numpy(rng.standard_normal(n)).to(dtype) if bias else None
    return Case(x, ixt.quantize(w.to(dtype), format), format, added)


def from_decode_arguments(family: Any, weight: tuple[Any, ...]) -> np.ndarray:
    """Return the weight that the arguments of the CUDA kernel stand for, in float64."""
    kind, scale, packed, last, group, rows = family.decode(weight)
    codes = cases.raw(weight[0])
    n, k = len(codes), codes.shape[1] * 8 // family.bits
    at = np.ix_(np.arange(n) // rows, np.arange(k) // group) if group else None
    if kind in ("int4", "e2m1"):
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(n, k)
    if kind == "int8":
        values = codes.view(np.int8).astype(np.float64)
    elif kind == "int4":
        zero = 8 if packed is None else cases.raw(packed)[at].astype(int)
        values = (codes ^ (8 if packed is None else 0)).astype(np.float64) - zero
    elif kind == "e2m1":
        values = nvfp4.E2M1.decode(codes).astype(np.float64)
        values = values * nvfp4.E4M3.decode(cases.raw(packed))[at] / 2688
    else:
        values = decode_bits(codes, kind).astype(np.float64)
        if packed is not None:
            values = values * blocks.e8m0_value(cases.raw(packed))[at]
    if scale is not None:
        values = values * cases.floats(scale)[at]
    if last is not None:
        values = values * cases.floats(last).reshape(-1, 1)
    return values
