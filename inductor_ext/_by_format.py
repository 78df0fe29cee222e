"""Which op quantizes to which format, in which orientation: called by :mod:`inductor_ext.api`.

The column orientation gives the transposed matrix, as GEMMs want it.  Where a format has no op of
its own for it, the rows of the transposed view are quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._call import call
from .formats import FP8, INT4, INT8, MXFP8, NVFP4, BothWays, Format, Quantized

_ops = torch.ops.inductor_ext


def matrix_t(x: Tensor) -> Tensor:
    """Return (K, M), a view where strides allow it, of ``x`` (*, K)."""
    return x.reshape(-1, x.shape[-1]).t()


def row(x: Tensor, f: Format, scale: Any, amax: Any, rng: Any) -> Quantized:
    """Quantize along the last dimension."""
    if isinstance(f, FP8):
        if scale is not None:
            return Quantized(*call(_ops.quantize_fp8_static.default, x, scale, f.dtype))
        if f.granularity in ("tensor", "row"):
            by_row = f.granularity == "row"
            op = (_ops.quantize_fp8_row if by_row else _ops.quantize_fp8_tensor).default
            return Quantized(*call(op, x, f.dtype, f.eps, f.pow2))
        return _fp8_block(x, f, _height(f), f.block, False)
    if isinstance(f, MXFP8):
        return _mxfp8(x, f, 32 if f.square else 1, 32, False)
    if isinstance(f, NVFP4):
        return _nvfp4(x, f, amax, rng, 16 if f.square else 1, 16, False)
    if isinstance(f, INT8):
        if f.granularity == "group":
            return Quantized(*call(_ops.quantize_int8_group.default, x, f.group))
        op = _ops.quantize_int8_row if f.granularity == "row" else _ops.quantize_int8_tensor
        return Quantized(*call(op.default, x))
    assert isinstance(f, INT4)
    if f.symmetric:
        return Quantized(*call(_ops.quantize_int4_symmetric.default, x, f.group))
    codes, scale, zero = call(_ops.quantize_int4_asymmetric.default, x, f.group)
    return Quantized(codes, scale, None, zero)


def column(x: Tensor, f: Format, scale: Any, amax: Any, rng: Any, transposed: bool) -> Quantized:
    """Quantize along the rows of the flattened matrix, and transpose unless told otherwise."""
    if isinstance(f, FP8) and scale is None:
        if f.granularity in ("block", "square"):
            width = f.block if f.granularity == "square" else 1
            return _fp8_block(x, f, f.block, width, transposed)
        if f.granularity == "row":
            op = _ops.quantize_fp8_column.default
            return Quantized(*call(op, x, f.dtype, transposed, f.eps, f.pow2))
    if isinstance(f, MXFP8):
        return _mxfp8(x, f, 32, 32 if f.square else 1, transposed)
    if not transposed:
        raise ValueError(f"`transposed` must be True for {f} in the column orientation, got False")
    if isinstance(f, NVFP4):
        return _nvfp4(x, f, amax, rng, 16, 16 if f.square else 1, True)
    return row(matrix_t(x), f, scale, amax, rng)


def both(x: Tensor, f: Format, scale: Any, amax: Any, rng: Any, transposed: bool) -> BothWays:
    """Quantize in both orientations, from one read of ``x`` where a kernel does that.

    While compiling, the orientations of blocks are ops of their own: one that nobody uses
    disappears, and the partitioner may recompute one of them (see ``_pairs.py``).
    """
    one_pass = _one_pass(x, f, scale, amax, rng)
    split = torch.compiler.is_compiling() and not (isinstance(f, FP8) and f.granularity == "tensor")
    if one_pass is None or split or (not transposed and not isinstance(f, MXFP8)):
        halves = row(x, f, scale, amax, rng), column(x, f, scale, amax, rng, transposed)
        return BothWays(*halves)
    return one_pass(transposed)


def _one_pass(
    x: Tensor, f: Format, scale: Any, amax: Any, rng: Any
) -> Callable[[bool], BothWays] | None:
    if isinstance(f, FP8) and f.granularity == "tensor":
        return lambda _: _fp8_tensor_both(x, f, scale)
    if isinstance(f, FP8) and f.granularity in ("block", "square"):
        square = f.granularity == "square"
        args = (x, f.dtype, f.block, square, f.eps, f.pow2, f.layout)
        return lambda _: _pair(call(_ops.quantize_fp8_block_both.default, *args))
    if isinstance(f, MXFP8):
        op = _ops.quantize_mxfp8_both.default
        return lambda t: _pair(call(op, x, f.dtype, f.square, t, f.mode, f.layout))
    if isinstance(f, NVFP4):
        return lambda _: _nvfp4_both(x, f, amax, rng)
    return None


def dequantize(q: tuple[Any, ...], f: Format, dtype: torch.dtype, along_columns: bool) -> Tensor:
    """Return the values of codes that are seen as a matrix of their own."""
    codes, scale, amax, zero = (*q, None, None)[:4]
    if isinstance(f, FP8) and f.granularity in ("tensor", "row"):
        return call(_ops.dequantize_fp8.default, codes, scale, dtype)
    if isinstance(f, INT8):
        group = f.group if f.granularity == "group" else 0
        return call(_ops.dequantize_int8.default, codes, scale, group, dtype)
    if isinstance(f, INT4):
        return call(_ops.dequantize_int4.default, codes, scale, zero, f.group, dtype)
    if isinstance(f, FP8):
        size, square, op = f.block, f.granularity == "square", _ops.dequantize_fp8_block.default
    elif isinstance(f, MXFP8):
        size, square, op = 32, f.square, _ops.dequantize_mxfp8.default
    else:
        assert isinstance(f, NVFP4)
        block = (16 if f.square else 1, 16)
        op = _ops.dequantize_nvfp4.default
        return call(op, codes, scale, amax, *block, dtype, f.layout)
    block = (size, size) if square else (size, 1) if along_columns else (1, size)
    return call(op, codes, scale, *block, dtype, f.layout)


def _height(f: FP8) -> int:
    return f.block if f.granularity == "square" else 1


def _fp8_block(x: Tensor, f: FP8, m: int, k: int, transposed: bool) -> Quantized:
    args = (x, f.dtype, m, k, transposed, f.eps, f.pow2, f.layout)
    return Quantized(*call(_ops.quantize_fp8_block.default, *args))


def _fp8_tensor_both(x: Tensor, f: FP8, scale: Tensor | None) -> BothWays:
    if scale is None:
        op = _ops.quantize_fp8_tensor_both.default
        codes, codes_t, scale_inv = call(op, x, f.dtype, f.eps, f.pow2)
        return BothWays(Quantized(codes, scale_inv), Quantized(codes_t, scale_inv))
    op = _ops.quantize_fp8_static_both.default
    codes, codes_t, scale_inv, amax = call(op, x, scale, f.dtype)
    return BothWays(Quantized(codes, scale_inv, amax), Quantized(codes_t, scale_inv, amax))


def _mxfp8(x: Tensor, f: MXFP8, m: int, k: int, transposed: bool) -> Quantized:
    args = (x, f.dtype, m, k, transposed, f.mode, f.layout)
    return Quantized(*call(_ops.quantize_mxfp8.default, *args))


def _nvfp4_amax(x: Tensor, f: NVFP4, along_columns: bool) -> Tensor:
    if f.granularity == "row":
        return call(_ops.amax_row.default, matrix_t(x) if along_columns else x)
    if f.hadamard and along_columns:
        return call(_ops.amax_hadamard.default, x, True)
    return call(_ops.amax.default, x)


def _nvfp4(
    x: Tensor, f: NVFP4, amax: Tensor | None, rng: Any, m: int, k: int, transposed: bool
) -> Quantized:
    amax = _nvfp4_amax(x, f, transposed) if amax is None else amax
    hadamard = f.hadamard and transposed
    args = (x, amax, m, k, transposed, f.layout, hadamard, rng)
    codes, scales = call(_ops.quantize_nvfp4.default, *args)
    return Quantized(codes, scales, amax)


def _nvfp4_both(x: Tensor, f: NVFP4, amax: Tensor | None, rng: Any) -> BothWays:
    by_row = _nvfp4_amax(x, f, False) if amax is None else amax
    same = amax is not None or not (f.hadamard or f.granularity == "row")
    by_column = by_row if same else _nvfp4_amax(x, f, True)
    op = _ops.quantize_nvfp4_both.default
    codes, scales, codes_t, scales_t = call(
        op, x, by_row, by_column, f.square, f.layout, f.hadamard, rng
    )
    return BothWays(Quantized(codes, scales, by_row), Quantized(codes_t, scales_t, by_column))


def _pair(results: tuple[Tensor, ...]) -> BothWays:
    codes, scales, codes_t, scales_t = results
    return BothWays(Quantized(codes, scales), Quantized(codes_t, scales_t))
