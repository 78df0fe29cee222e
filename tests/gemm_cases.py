"""Pairs of formats, random awkward sizes, and the bounds that products must keep."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import torch
from oracle import gemm as oracle
from torch import Tensor

import inductor_ext as ixt
from inductor_ext.formats import FP8, INT8, MXFP8, NVFP4, Format, Quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _fp8(granularity: Any, **more: Any) -> FP8:
    return FP8(granularity=granularity, **more)


PAIRS: list[tuple[Format, Format]] = [
    (_fp8("tensor"), _fp8("tensor")),
    (_fp8("row"), _fp8("row")),
    (_fp8("tensor"), _fp8("row")),
    (_fp8("row", dtype=E5M2), _fp8("row")),
    (_fp8("row"), _fp8("tensor", dtype=E5M2)),
    (_fp8("row"), _fp8("row", dtype=E5M2)),
    (_fp8("block"), _fp8("square", layout="gemm")),
    (_fp8("block", layout="gemm"), _fp8("block", layout="gemm")),
    (_fp8("block", dtype=E5M2), _fp8("block", layout="gemm")),
    (_fp8("square"), _fp8("block")),
    (_fp8("square", layout="gemm"), _fp8("square")),
    (_fp8("block", block=32), _fp8("square", block=32)),
    (_fp8("block", block=64, layout="gemm"), _fp8("square", block=64, layout="gemm")),
    (MXFP8(), MXFP8()),
    (MXFP8(layout="gemm"), MXFP8(layout="gemm")),
    (MXFP8(dtype=E5M2), MXFP8(square=True)),
    (MXFP8(square=True, layout="gemm"), MXFP8(layout="gemm", mode="floor")),
    (NVFP4(), NVFP4()),
    (NVFP4(layout="gemm"), NVFP4(square=True, layout="gemm")),
    (NVFP4(granularity="row"), NVFP4(square=True)),
    (NVFP4(granularity="row", layout="gemm"), NVFP4(granularity="row")),
    (INT8(granularity="tensor"), INT8(granularity="row")),
    (INT8(), INT8(granularity="tensor")),
    (INT8(), INT8()),
    (INT8(granularity="group", group=32), INT8()),
    (INT8(), INT8(granularity="group")),
    (INT8(granularity="group", group=64), INT8(granularity="group", group=256)),
]
SIDES = (0, 1, 2, 5, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 160, 257)
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Half a unit in the last place, of a number: what one rounding may be off, relatively."""
SMALLEST = {"bf16": 0.0, "fp16": 2.0**-25, "fp32": 0.0}
"""Half a step of fp16's subnormals, which results here can reach."""


def name_of(pair: tuple[Format, Format]) -> str:
    """Return a test's id."""
    return "-".join(
        "_".join(str(v) for v in (type(f).__name__, *vars(f).values()) if v not in (False, 0.0))
        for f in pair
    ).replace("torch.float8_", "")


def sizes(count: int, seed: int, sides: tuple[int, ...] = SIDES) -> list[tuple[int, int, int]]:
    """Return random (M, N, K), mostly what no library likes."""
    rng = np.random.default_rng(seed)
    return [tuple(int(rng.choice(sides)) for _ in range(3)) for _ in range(count)]  # type: ignore[misc]


def k_for(pair: tuple[Format, Format], k: int) -> int:
    """Return K, a multiple of 16 for NVFP4, which has no other."""
    return -(-k // 16) * 16 if isinstance(pair[0], NVFP4) else k


def operands(
    pair: tuple[Format, Format], size: tuple[int, int, int], seed: int, device: str = "cpu"
) -> tuple[Quantized, Quantized]:
    """Return A (M, K) and B (N, K), quantized, of rows that differ in magnitude."""
    m, n, k = size
    rng = np.random.default_rng(seed)
    made = []
    for rows, f in ((m, pair[0]), (n, pair[1])):
        x = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-3, 4, (rows, 1)))
        made.append(ixt.quantize(torch.from_numpy(x.astype(np.float32)).to(device), f))
    return made[0], made[1]


def elements(q: Quantized, f: Format) -> np.ndarray:
    """Return the float64 values of a quantized matrix, from its bits."""
    codes = cases.raw(q.codes)
    rows, k = codes.shape
    if isinstance(f, NVFP4):
        value = oracle.e2m1(codes)
        k = value.shape[1]
        scale = _tiled_or_plain(cases.floats(q.scale_inv), rows, k, 16, f.square, f.layout)
        assert q.amax is not None
        return value * scale * (cases.floats(q.amax).astype(np.float64) / 2688)
    if isinstance(f, INT8):
        scale = cases.floats(q.scale_inv)
        if f.granularity == "group":
            scale = oracle.of_blocks(scale, rows, k, 1, f.group)
        return q.codes.cpu().numpy().astype(np.float64) * scale
    assert isinstance(f, (FP8, MXFP8))
    value = oracle.fp8(codes, cases.NAMES[f.dtype])
    if isinstance(f, MXFP8):
        scale = oracle.e8m0(cases.raw(q.scale_inv))
        return value * _tiled_or_plain(scale, rows, k, 32, f.square, f.layout)
    scale = cases.floats(q.scale_inv)
    if f.granularity in ("tensor", "row"):
        return value * scale
    height = f.block if f.granularity == "square" else 1
    return value * oracle.of_blocks(scale, rows, k, height, f.block)


def _tiled_or_plain(
    scale: np.ndarray, rows: int, k: int, width: int, square: bool, layout: str
) -> np.ndarray:
    if layout == "gemm":  # a scale for every row, also of squares
        return oracle.of_blocks(oracle.of_tiles(scale, rows, k, width), rows, k, 1, width)
    return oracle.of_blocks(scale, rows, k, width if square else 1, width)


def random_bias(n: int, dtype: str, seed: int, device: str = "cpu") -> Tensor:
    """Return (N,) of a dtype."""
    values = np.random.default_rng(seed).standard_normal(n)
    return torch.from_numpy(values).to(cases.INPUTS[dtype]).to(device)


def rounds_operands(pair: tuple[Format, Format], dtype: str) -> float:
    """Return to what the route "dequantize" rounds elements: the unit of bf16 or fp32, or 0.

    docs/gemm.md: code times scale has more bits than bf16 where the scale is any fp32 number.
    """
    blocks = isinstance(pair[0], FP8) and pair[0].granularity in ("block", "square")
    groups = any(isinstance(f, INT8) and f.granularity == "group" for f in pair)
    return UNIT["fp32" if dtype == "fp32" else "bf16"] if blocks or groups else 0.0


def check(
    pair: tuple[Format, Format],
    q: tuple[Quantized, Quantized],
    bias: Tensor | None,
    dtype: str,
    got: Tensor,
    *,
    accumulation: float = 0.0,
    rounded: float = 0.0,
) -> None:
    """Require a product within the bound of its roundings.

    After the sum there are at most 8 roundings to fp32 (of the sum, of each factor that is made
    and multiplied, 2 + 2 + 2 for NVFP4, and of the addition of the bias), each relative to a number
    that is no larger than ``|product| + |bias|``, and one to the result's dtype.

    Args:
        accumulation: what the sum of products loses, relative to the sum of magnitudes; float64
            loses K * 2^-53 at most.
        rounded: u where the elements of both operands were rounded first: each product is off by
            (1 + u)^2 - 1.
    """
    a, b = (elements(each, f) for each, f in zip(q, pair, strict=True))
    exact, magnitude = oracle.product(a, b)
    added = 0.0 if bias is None else cases.floats(bias).astype(np.float64)
    value, u = exact + added, UNIT[dtype]
    loss = accumulation + a.shape[1] * 2.0**-53 + (1 + rounded) ** 2 - 1
    before_cast = (1 + 8 * 2.0**-24) * loss * magnitude
    before_cast += 8 * 2.0**-24 * (np.abs(exact) + np.abs(added))
    bound = (1 + u) * before_cast + u * np.abs(value) + SMALLEST[dtype]
    result = cases.floats(got).astype(np.float64)
    assert got.dtype == cases.INPUTS[dtype]
    assert result.shape == value.shape
    off = np.abs(result - value) - bound
    where = np.unravel_index(off.argmax(), off.shape) if off.size else ()
    assert (off <= 0).all(), f"{name_of(pair)} {dtype} {where}: {result[where]} {value[where]}"
