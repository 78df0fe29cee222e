"""The FP8 ops next to their oracle: how to call one, and the tensors it must return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import numpy as np
import torch
from calls import Call
from oracle import fp8 as oracle
from torch import Tensor

from inductor_ext.decompositions import fp8 as decompositions
from inductor_ext.ops.fp8 import (
    dequantize_fp8,
    quantize_fp8_row,
    quantize_fp8_static,
    quantize_fp8_tensor,
)

OPS: dict[str, Callable[..., Any]] = {
    "static": quantize_fp8_static,
    "tensor": quantize_fp8_tensor,
    "row": quantize_fp8_row,
    "dequantize": dequantize_fp8,
}
REFERENCES: dict[str, Callable[..., Any]] = {
    "static": decompositions.quantize_fp8_static,
    "tensor": decompositions.quantize_fp8_tensor,
    "row": decompositions.quantize_fp8_row,
    "dequantize": decompositions.dequantize_fp8,
}
OPTIONS: tuple[tuple[float, bool], ...] = ((0.0, False), (0.0, True), (1e-12, False), (1.5, True))
"""(eps, pow2)"""


def static(x: Tensor, scale: Tensor, target: str, label: str = "") -> Call:
    true = oracle.quantize_static(cases.floats(x), cases.floats(scale), target)
    return Call("static", (x, scale, cases.TARGETS[target]), _tensors(true, target), label)


def tensor(x: Tensor, target: str, eps: float = 0.0, pow2: bool = False, label: str = "") -> Call:
    return _current("tensor", x, target, eps, pow2, label)


def row(x: Tensor, target: str, eps: float = 0.0, pow2: bool = False, label: str = "") -> Call:
    return _current("row", x, target, eps, pow2, label)


def _current(op: str, x: Tensor, target: str, eps: float, pow2: bool, label: str) -> Call:
    true = oracle.quantize_current(
        cases.floats(x), cases.NAMES[x.dtype], target, row=op == "row", eps=eps, pow2=pow2
    )
    want = _tensors(true, target)[:2]
    return Call(op, (x, cases.TARGETS[target], eps, pow2), want, label)


def dequantize(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, label: str = "") -> Call:
    bits = oracle.dequantize(
        cases.raw(codes), cases.NAMES[codes.dtype], cases.floats(scale_inv), cases.NAMES[dtype]
    )
    want = cases.from_raw(bits, dtype)
    return Call("dequantize", (codes, scale_inv, dtype), (want,), label)


def row_scales(x: Tensor, seed: int = 0) -> Tensor:
    """A scale a row, of the magnitudes that quantization uses and a few extreme ones."""
    count = int(np.prod(x.shape[:-1]))
    rng = np.random.default_rng(seed)
    values = np.exp2(rng.uniform(-20, 20, count)).astype(np.float32)
    values[::7] = cases.floats(torch.stack(cases.scales()))[np.arange(len(values[::7])) % 13]
    return cases.f32(values).view(*x.shape[:-1], 1)


def quantizations(x: Tensor, target: str, label: str = "") -> Iterator[Call]:
    """Every quantize op on one tensor, with default options."""
    yield static(x, cases.f32(0.3), target, label)
    yield tensor(x, target, label=label)
    if x.dim():
        yield static(x, row_scales(x), target, label)
        yield row(x, target, label=label)


def value_calls(x: Tensor, target: str, label: str = "") -> Iterator[Call]:
    """Every quantize op on one tensor, with every option."""
    yield static(x, cases.f32(0.3), target, label)
    yield static(x, row_scales(x), target, label)
    for eps, pow2 in OPTIONS:
        yield tensor(x, target, eps, pow2, label)
        yield row(x, target, eps, pow2, label)


def _tensors(true: oracle.Quantized, target: str) -> tuple[Tensor, Tensor, Tensor]:
    return (
        cases.from_raw(true.codes, cases.TARGETS[target]),
        cases.f32(true.scale_inv),
        cases.f32(true.amax),
    )
