"""MXFP8 as Inductor IR; the arithmetic is ``decompositions/mxfp8.py``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext._compat import FloorDiv, ModularIndexing, ops

from . import templates
from .blocks import (
    Blocks,
    divides,
    elements,
    load_within,
    reshaped,
    round_up,
    scattered,
    transposed_matrix,
)
from .vocabulary import F32, Expression, f32, i32, pointwise, stored

INVERSE_MAX = {torch.float8_e4m3fn: 1 / 448, torch.float8_e5m2: 1 / 57344}
MAX_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_TINY = 0x00400000  # 2^-127, a subnormal
_NAN = 0x7FC00000


def quantize_mxfp8(
    x: Any,
    dtype: torch.dtype,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    mode: str = "ceil",
    layout: str = "plain",
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_mxfp8``."""
    along_k = (block_m, block_k, transposed) == (1, 32, False)
    along_m = (block_m, block_k, transposed) == (32, 1, True)
    fused = templates.quantize(x, _rule(dtype, mode), 32, layout, along_k=along_k, along_m=along_m)
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    blocks = Blocks(x, block_m, block_k, matrix=transposed or layout == "gemm")
    value = elements(blocks.x)
    amax = blocks.amax(value)
    scales = stored(
        pointwise(x, torch.uint8, blocks.size, lambda i: _e8m0(amax.load(i), dtype, mode))
    )
    load = scales.make_loader()
    codes = blocks.codes(value, lambda i: _inverse(load(i)), dtype, transpose=transposed)
    if layout == "gemm":
        return codes, _swizzled(scales, blocks, transposed)
    return codes, transposed_matrix(scales) if transposed else scales


def quantize_mxfp8_both(
    x: Any,
    dtype: torch.dtype,
    square: bool,
    transposed: bool = True,
    mode: str = "ceil",
    layout: str = "plain",
) -> tuple[Any, Any, Any, Any]:
    """Lower ``inductor_ext::quantize_mxfp8_both``."""
    both = transposed and not square
    fused = templates.quantize(x, _rule(dtype, mode), 32, layout, along_k=both, along_m=both)
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    other = 32 if square else 1
    along_k = quantize_mxfp8(x, dtype, other, 32, False, mode, layout)
    along_m = quantize_mxfp8(x, dtype, 32, other, transposed, mode, layout)
    return (*along_k, *along_m)


def _rule(dtype: torch.dtype, mode: str) -> templates.Rule:
    return templates.Rule("mxfp8", dtype == torch.float8_e5m2, floor=mode == "floor")


def dequantize_mxfp8(
    codes: Any,
    scales: Any,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Any:
    """Lower ``inductor_ext::dequantize_mxfp8``."""
    blocks = Blocks(codes, block_m, block_k, matrix=layout == "gemm")
    load_codes, load = blocks.x.make_loader(), scales.make_loader()
    if layout == "gemm":
        load = _unswizzled(scales, along_m=block_k == 1, repeat=block_m if block_k > 1 else 1)
    return blocks.values(
        lambda i: ops.to_dtype(load_codes(i), F32), lambda i: _value(load(i)), dtype
    )


# ---- scales ----


def _e8m0(amax: Any, dtype: torch.dtype, mode: str) -> Any:
    """Return the biased exponent of a block's scale, uint8."""
    if mode == "floor":
        exponent = ops.sub(_exponent(_bits(amax)), i32(MAX_EXPONENT[dtype]))
        return ops.to_dtype(ops.minimum(ops.maximum(exponent, i32(0)), i32(254)), torch.uint8)
    inverse_max = torch.tensor(INVERSE_MAX[dtype], dtype=F32).item()
    d = _bits(ops.mul(amax, f32(inverse_max)))
    exponent, mantissa = _exponent(d), ops.bitwise_and(d, i32(0x7FFFFF))
    # An infinity has the exponent 255 and becomes 254, which never rounds up; d up to 2^-127 is
    # the code 0, and a larger subnormal the code 1.
    fraction = ops.where(ops.eq(exponent, i32(0)), ops.gt(d, i32(_TINY)), ops.gt(mantissa, i32(0)))
    up = ops.logical_and(fraction, ops.lt(exponent, i32(254)))
    rounded_up = ops.where(up, ops.add(exponent, i32(1)), exponent)
    return ops.to_dtype(ops.minimum(rounded_up, i32(254)), torch.uint8)


def _bits(value: Any) -> Any:
    return ops.to_dtype_bitcast(value, torch.int32, F32)


def _exponent(bits: Any) -> Any:
    return ops.bitwise_right_shift(bits, i32(23))


def _inverse(scale: Any) -> Any:
    """Return what an element is multiplied by, 2^(127 - e); quantizing gives no NaN scale."""
    e = ops.to_dtype(scale, torch.int32)
    shifted = ops.bitwise_left_shift(ops.sub(i32(254), e), i32(23))
    bits = ops.where(ops.eq(e, i32(254)), i32(_TINY), shifted)
    return ops.to_dtype_bitcast(bits, F32, torch.int32)


def _value(scale: Any) -> Any:
    """Return what a code is multiplied by, 2^(e - 127), or NaN."""
    e = ops.to_dtype(scale, torch.int32)
    bits = ops.where(ops.eq(e, i32(0)), i32(_TINY), ops.bitwise_left_shift(e, i32(23)))
    bits = ops.where(ops.eq(e, i32(255)), i32(_NAN), bits)
    return ops.to_dtype_bitcast(bits, F32, torch.int32)


# ---- the swizzle of cuBLASLt ----


def _swizzled(scales: Any, blocks: Blocks, transposed: bool) -> Any:
    """Bring (nM, nK) scales into the layout of the GEMM operand (``decompositions/mxfp8.py``)."""
    along_m = blocks.block_k == 1 or (blocks.block_m == blocks.block_k and transposed)
    rows, columns, repeat = blocks.rows[0], blocks.size[1], blocks.block_m
    if along_m:
        rows, columns, repeat = blocks.columns, blocks.size[0], blocks.block_k
    load = scales.make_loader()

    def scale(index: Sequence[Any]) -> Any:
        row, column = index[0] if repeat == 1 else FloorDiv(index[0], repeat), index[1]
        return load([column, row] if along_m else [row, column])

    size = round_up(rows, 128), round_up(columns, 4)
    row_tiles, column_tiles = FloorDiv(size[0], 128), FloorDiv(size[1], 4)
    if divides(128, rows) and divides(4, columns):
        # In the order in which the scales are computed, so that their kernel stores them.
        row_loops, row_strides = [row_tiles, 4, 32], [columns * 128, 4, 16]
        column_loops, column_strides = [column_tiles, 4], [512, 1]
        if along_m:
            loops, strides = column_loops + row_loops, column_strides + row_strides
        else:
            loops, strides = row_loops + column_loops, row_strides + column_strides

        def in_place(index: Sequence[Any]) -> Any:
            r, c = (index[2:], index[:2]) if along_m else (index[:3], index[3:])
            return scale([r[0] * 128 + r[1] * 32 + r[2], c[0] * 4 + c[1]])

        return scattered(scales, loops, strides, in_place, size)
    bounds = None if divides(128, rows) else rows, None if divides(4, columns) else columns

    def element(index: Sequence[Any]) -> Any:
        row_tile, column_tile, row, quarter, column = index
        place = row_tile * 128 + quarter * 32 + row, column_tile * 4 + column
        return load_within(scale, place, bounds, 0)

    tiles = [row_tiles, column_tiles, 32, 4, 4]
    return reshaped(pointwise(scales, torch.uint8, tiles, element), size)


def _unswizzled(scales: Any, *, along_m: bool, repeat: int) -> Expression:
    """Return the loads of swizzled scales by (block of M, block of K).

    Args:
        repeat: how many rows of the layout have the scale of one block.
    """
    rows, columns = scales.get_size()
    tiles = [FloorDiv(rows, 128), FloorDiv(columns, 4), 32, 4, 4]
    load = reshaped(scales, tiles).make_loader()

    def element(index: Sequence[Any]) -> Any:
        row, column = (index[1], index[0]) if along_m else (index[0] * repeat, index[1])
        quarter, within_tile = ModularIndexing(row, 32, 4), ModularIndexing(row, 1, 32)
        place = [FloorDiv(row, 128), FloorDiv(column, 4), within_tile, quarter]
        return load([*place, ModularIndexing(column, 1, 4)])

    return element
