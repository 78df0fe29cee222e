"""The block formats next to their oracle: how to call an op, and the tensors it must return."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import calls
import cases
import numpy as np
import torch
from oracle import blocks as oracle
from oracle import fp8
from torch import Tensor

from inductor_ext import registry

GROUPS = (32, 64, 128)
MODES = ("ceil", "floor")
MX_BLOCKS = ((1, 32), (32, 1), (32, 32))


@functools.cache
def op_of(name: str) -> Callable[..., Any]:
    return registry.contract(f"inductor_ext::{name}").op


def reference_of(name: str) -> Callable[..., Any]:
    return registry.contract(f"inductor_ext::{name}").reference


class Call(calls.Call):
    """A call of a block op; scales for a GEMM are not contiguous."""

    contiguous = False


# ---- from the oracle's matrices to tensors ----


def _matrix(x: Tensor) -> np.ndarray:
    return cases.floats(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _codes(codes: np.ndarray, x: Tensor, target: str, transposed: bool) -> Tensor:
    bits = codes.T if transposed else codes.reshape(x.shape)
    return cases.from_raw(bits, cases.TARGETS[target])


def _tensor(scales: np.ndarray) -> Tensor:
    if scales.dtype == np.uint8:
        return cases.from_raw(scales, torch.uint8)
    return cases.f32(scales)


def _plain(scales: np.ndarray, x: Tensor, block_m: int, block_k: int, transposed: bool) -> Tensor:
    """Scales in the plain layout."""
    if transposed or block_m > 1:
        return _tensor(scales.T if transposed else scales)
    return _tensor(scales.reshape(*x.shape[:-1], -(-x.shape[-1] // block_k)))


# ---- FP8 ----


def block(
    x: Tensor,
    target: str,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
    layout: str = "plain",
    label: str = "",
) -> Call:
    true = oracle.quantize_fp8(
        _matrix(x), cases.NAMES[x.dtype], target, block_m, block_k, eps, pow2
    )
    codes = _codes(true.codes, x, target, transposed)
    if layout == "plain":
        scales = _plain(true.scales, x, block_m, block_k, transposed)
    elif block_m == block_k:
        scales = _tensor(oracle.padded_to_4(true.scales.T if transposed else true.scales))
    else:  # column-major
        scales = _tensor(true.scales if transposed else true.scales.T).t()
    args = (x, cases.TARGETS[target], block_m, block_k, transposed, eps, pow2, layout)
    return Call("quantize_fp8_block", args, (codes, scales), label)


def block_both(
    x: Tensor, target: str, size: int, square: bool, layout: str = "plain", label: str = ""
) -> Call:
    other = size if square else 1
    rows = block(x, target, other, size, False, 0.0, True, layout)
    columns = block(x, target, size, other, True, 0.0, True, layout)
    args = (x, cases.TARGETS[target], size, square, 0.0, True, layout)
    return Call("quantize_fp8_block_both", args, (*rows.want, *columns.want), label)


def dequantize_block(call: Call, dtype: torch.dtype) -> Call:
    """Dequantize what a call of `block` returns."""
    block_m, block_k, transposed = call.args[2:5]
    (codes, scales), x = call.want, call.args[0]
    if transposed:
        block_m, block_k = block_k, block_m
    rows, columns = math.prod(codes.shape[:-1]), codes.shape[-1]
    count = -(-rows // block_m), -(-columns // block_k)
    values = cases.floats(scales)
    values = values.reshape(count) if values.ndim != 2 else values[:, : count[1]]
    want = _dequantized(codes, values, block_m, block_k, dtype)
    args = (codes, scales, block_m, block_k, dtype, call.args[-1])
    return Call("dequantize_fp8_block", args, (want,), f"{call.label} of {tuple(x.shape)}")


def _dequantized(
    codes: Tensor, scales: np.ndarray, block_m: int, block_k: int, dtype: torch.dtype
) -> Tensor:
    q = cases.raw(codes).reshape(math.prod(codes.shape[:-1]), codes.shape[-1])
    source, name = cases.NAMES[codes.dtype], cases.NAMES[dtype]
    bits = oracle.dequantize(q, source, scales, block_m, block_k, name)
    return cases.from_raw(bits.reshape(codes.shape), dtype)


def static_both(x: Tensor, scale: Tensor, target: str, label: str = "") -> Call:
    true = fp8.quantize_static(cases.floats(x), cases.floats(scale), target)
    codes = true.codes.reshape(_matrix(x).shape)
    want = (
        _codes(codes, x, target, False),
        _codes(codes, x, target, True),
        cases.f32(true.scale_inv),
        cases.f32(true.amax),
    )
    return Call("quantize_fp8_static_both", (x, scale, cases.TARGETS[target]), want, label)


def tensor_both(x: Tensor, target: str, eps: float, pow2: bool, label: str = "") -> Call:
    name = cases.NAMES[x.dtype]
    true = fp8.quantize_current(cases.floats(x), name, target, row=False, eps=eps, pow2=pow2)
    codes = true.codes.reshape(_matrix(x).shape)
    both = _codes(codes, x, target, False), _codes(codes, x, target, True)
    args = (x, cases.TARGETS[target], eps, pow2)
    return Call("quantize_fp8_tensor_both", args, (*both, cases.f32(true.scale_inv)), label)


def column(
    x: Tensor, target: str, transposed: bool, eps: float, pow2: bool, label: str = ""
) -> Call:
    true = oracle.quantize_column(_matrix(x), cases.NAMES[x.dtype], target, eps, pow2)
    scales = _tensor(true.scales.T if transposed else true.scales)
    args = (x, cases.TARGETS[target], transposed, eps, pow2)
    want = _codes(true.codes, x, target, transposed), scales
    return Call("quantize_fp8_column", args, want, label)


# ---- MXFP8 ----


def mx(
    x: Tensor,
    target: str,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    mode: str = "ceil",
    layout: str = "plain",
    label: str = "",
) -> Call:
    matrix = _matrix(x)
    true = oracle.quantize_mxfp8(matrix, target, block_m, block_k, mode)
    if layout == "plain":
        scales = _plain(true.scales, x, block_m, block_k, transposed)
    else:
        operand = oracle.mx_operand(true.scales, block_m, block_k, transposed, matrix.shape)
        scales = _tensor(oracle.swizzled(operand))
    args = (x, cases.TARGETS[target], block_m, block_k, transposed, mode, layout)
    want = _codes(true.codes, x, target, transposed), scales
    return Call("quantize_mxfp8", args, want, label)


def mx_both(
    x: Tensor,
    target: str,
    square: bool,
    transposed: bool,
    mode: str = "ceil",
    layout: str = "plain",
    label: str = "",
) -> Call:
    other = 32 if square else 1
    along_k = mx(x, target, other, 32, False, mode, layout)
    along_m = mx(x, target, 32, other, transposed, mode, layout)
    args = (x, cases.TARGETS[target], square, transposed, mode, layout)
    return Call("quantize_mxfp8_both", args, (*along_k.want, *along_m.want), label)


def dequantize_mx(
    codes: Tensor,
    e: np.ndarray,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
    label: str = "",
) -> Call:
    """Dequantize (*, K) codes with the exponents (nM, nK)."""
    want = _dequantized(codes, oracle.e8m0_value(e), block_m, block_k, dtype)
    if layout == "plain":
        scales = _plain(e, codes, block_m, block_k, False)
    else:
        shape = math.prod(codes.shape[:-1]), codes.shape[-1]
        scales = _tensor(oracle.swizzled(oracle.mx_operand(e, block_m, block_k, False, shape)))
    args = (codes, scales, block_m, block_k, dtype, layout)
    return Call("dequantize_mxfp8", args, (want,), label)


# ---- every call on a tensor ----

OPTIONS: tuple[tuple[float, bool], ...] = ((0.0, False), (0.0, True), (1e-12, False), (1.5, True))
"""(eps, pow2)"""


def fp8_calls(x: Tensor, target: str, label: str = "", groups: Any = GROUPS) -> Iterator[Call]:
    """Every FP8 op of ours on a tensor; options and layouts take turns over the blocks."""
    for number, size in enumerate(groups):
        option = OPTIONS[number % 4], OPTIONS[(number + 1) % 4], OPTIONS[(number + 2) % 4]
        yield block(x, target, 1, size, False, *option[0], "plain", label)
        yield block(x, target, 1, size, False, *option[1], "gemm", label)
        yield block(x, target, 1, size, True, *option[2], ("gemm", "plain")[number % 2], label)
        yield block(x, target, size, 1, False, *option[0], "plain", label)
        yield block(x, target, size, 1, True, *option[1], ("plain", "gemm")[number % 2], label)
        yield block(x, target, size, size, False, *option[2], ("plain", "gemm")[number % 2], label)
        yield block(x, target, size, size, True, *option[0], ("gemm", "plain")[number % 2], label)
        layouts = ("plain", "gemm") if number % 2 else ("gemm", "plain")
        yield block_both(x, target, size, False, layouts[0], label)
        yield block_both(x, target, size, True, layouts[1], label)
    yield column(x, target, False, 0.0, True, label)
    yield column(x, target, True, 1e-12, False, label)
    yield static_both(x, cases.f32(0.3), target, label)
    yield tensor_both(x, target, 0.0, False, label)


def mx_calls(x: Tensor, target: str, label: str = "") -> Iterator[Call]:
    """Every MXFP8 op on a tensor, in both modes; layouts take turns."""
    for number, (block_m, block_k) in enumerate(MX_BLOCKS):
        for mode in MODES:
            layouts = ("plain", "gemm") if (mode == "ceil") == (number % 2 == 0) else None
            layouts = layouts or ("gemm", "plain")
            yield mx(x, target, block_m, block_k, False, mode, layouts[0], label)
            yield mx(x, target, block_m, block_k, True, mode, layouts[1], label)
    yield mx_both(x, target, False, True, "ceil", "gemm", label)
    yield mx_both(x, target, False, False, "floor", "gemm", label)
    yield mx_both(x, target, True, True, "floor", "plain", label)
    yield mx_both(x, target, True, False, "ceil", "gemm", label)
