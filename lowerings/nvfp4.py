"""NVFP4 as Inductor IR; the arithmetic is ``decompositions/nvfp4.py``'s.

Two codes share a byte, so everything runs over pairs: a block's amax is a reduction over its pairs,
and its codes are a loop over the same pairs, which Inductor puts into one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext import config
from inductor_ext._compat import FloorDiv, ModularIndexing, ReductionHint, ops
from inductor_ext.decompositions.nvfp4 import BLOCK, FLOAT32_MAX, HADAMARD_SIGNS, SCALE_RANGE, SIXTH

from .blocks import (
    as_matrix,
    ceil_div,
    divides,
    elements,
    load_within,
    reshaped,
    round_up,
    scattered,
)
from .e2m1 import code_of, stochastic, to_nearest, value_of
from .vocabulary import (
    F32,
    Expression,
    abs_ignoring_nan,
    amax_of_all,
    amax_of_groups,
    div_rn,
    f32,
    i32,
    known_equal,
    pointwise,
    rounded,
    stored,
)

PAIRS = BLOCK // 2
_SCALE = torch.float8_e4m3fn


def quantize_nvfp4(
    x: Any,
    amax: Any,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    layout: str = "plain",
    hadamard: bool = False,
    rng: Any = None,
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_nvfp4``."""
    outer = [x.get_size()[-1]] if transposed else list(x.get_size()[:-1])
    source, swapped = as_matrix(x), transposed
    if hadamard:
        source, swapped = stored(_transformed(source, transposed)), False
    result = _Result(source, swapped, block_m == block_k)
    scale, multiplier = _scales(result, amax)
    codes = result.codes(multiplier, int(transposed), rng)
    if layout == "gemm":
        grid = pointwise(x, _SCALE, result.grid, lambda i: ops.to_dtype(scale(i), _SCALE))
        ordered = _swizzled(stored(grid), result)
    else:
        size = result.grid[::-1] if swapped else result.grid
        ordered = pointwise(
            x, _SCALE, size, lambda i: ops.to_dtype(scale(i[::-1] if swapped else i), _SCALE)
        )
        if not result.square:
            ordered = reshaped(ordered, [*outer, result.blocks])
    return reshaped(codes, [*outer, FloorDiv(result.length, 2)]), ordered


def quantize_nvfp4_both(
    x: Any,
    amax: Any,
    amax_t: Any,
    square: bool,
    layout: str = "plain",
    hadamard: bool = False,
    rng: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Lower ``inductor_ext::quantize_nvfp4_both``."""
    block = BLOCK if square else 1
    rowwise = quantize_nvfp4(x, amax, block, BLOCK, False, layout, False, rng)
    return (*rowwise, *quantize_nvfp4(x, amax_t, BLOCK, block, True, layout, hadamard, rng))


def amax_hadamard(x: Any, transposed: bool) -> Any:
    """Lower ``inductor_ext::amax_hadamard``."""
    amax = amax_of_all(_transformed(as_matrix(x), transposed), with_codes=False)
    return pointwise(x, F32, (), amax.load)


def dequantize_nvfp4(
    codes: Any,
    scales: Any,
    amax: Any,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Any:
    """Lower ``inductor_ext::dequantize_nvfp4``."""
    matrix, device = as_matrix(codes), codes.get_device()
    rows, columns = matrix.get_size()
    load, whole = matrix.make_loader(), _amax_of_row(amax, rows)
    if layout == "gemm":
        load_scale = _unswizzled(scales)
    else:
        load_scale = as_matrix(scales).make_loader()
    height = BLOCK if layout == "plain" and block_m == BLOCK else 1

    def element(index: Sequence[Any]) -> Any:
        row, block, pair, odd = index
        byte = ops.to_dtype(load([row, block * PAIRS + pair]), torch.int32)
        shift = ops.mul(ops.index_expr(odd, torch.int32), i32(4))
        code = ops.bitwise_and(ops.bitwise_right_shift(byte, shift), i32(15))
        at = row if height == 1 else FloorDiv(row, height)
        scale = ops.mul(ops.to_dtype(load_scale([at, block]), F32), whole(row))
        value = ops.mul(value_of(code), ops.mul(scale, f32(1 / SCALE_RANGE)))
        if dtype == F32 or config.numerics == "fast":
            return ops.to_dtype(value, dtype)
        return ops.to_dtype(rounded(value, dtype, device), dtype)

    made = pointwise(codes, dtype, [rows, FloorDiv(columns, PAIRS), PAIRS, 2], element)
    return reshaped(made, [*codes.get_size()[:-1], 2 * columns])


class _Result:
    """The codes of a matrix, or of its transpose, by pairs of elements.

    Attributes:
        rows, length, blocks: the result has ``rows`` rows of ``length`` elements.
        grid: one number a block, in the order of the matrix: (rows or ceil(rows / 16), blocks),
            swapped for the transpose.
    """

    def __init__(self, x: Any, swapped: bool, square: bool) -> None:
        self.x, self.swapped, self.square = x, swapped, square
        self.rows, self.length = x.get_size()[::-1] if swapped else x.get_size()
        self.blocks, self.height = FloorDiv(self.length, BLOCK), BLOCK if square else 1
        self.value, self.device = elements(x), x.get_device()
        self.grid = self._ordered(ceil_div(self.rows, self.height), self.blocks)
        self.fits = not square or divides(BLOCK, self.rows)

    def _ordered(self, row: Any, column: Any) -> list[Any]:
        return [column, row] if self.swapped else [row, column]

    def block_of(self, row: Any, block: Any) -> list[Any]:
        """Return the place in the grid, given a row of the result."""
        return self._ordered(FloorDiv(row, self.height) if self.square else row, block)

    def element(self, row: Any, column: Any) -> Any:
        """Return an fp32 element of the result's matrix, 0 beyond its last row."""
        bounds = self._ordered(None if self.fits else self.rows, None)
        return load_within(self.value, self._ordered(row, column), bounds, 0.0)

    def amax(self) -> Any:
        """Return the amax of each block, over the grid."""

        def pair(index: Sequence[Any], inside: Sequence[Any]) -> Any:
            row, block = self._ordered(*index)
            if self.square:
                inner, pair = self._ordered(*inside)
                row = row * BLOCK + inner
            else:
                (pair,) = inside
            at = block * BLOCK + 2 * pair
            low, high = (self.element(row, at + odd) for odd in (0, 1))
            low, high = (abs_ignoring_nan(v, self.device) for v in (low, high))
            return ops.maximum(low, high)

        group = self._ordered(BLOCK, PAIRS) if self.square else [PAIRS]
        hint = ReductionHint.OUTER if self.swapped else ReductionHint.INNER
        return amax_of_groups(self.x, pair, self.grid, group, hint)

    def codes(self, multiplier: Expression, stream: int, rng: Any) -> Any:
        """Return the packed codes (rows, length / 2); ``multiplier`` is over the grid."""
        half = FloorDiv(self.length, 2)
        load_rng = rng.make_loader() if rng is not None else None

        def byte(row: Any, grid: Sequence[Any], block: Any, pair: Any) -> Any:
            factor, at = multiplier(grid), block * BLOCK + 2 * pair
            scaled = [ops.mul(self.element(row, at + odd), factor) for odd in (0, 1)]
            if load_rng is None:
                low, high = (code_of(v, to_nearest) for v in scaled)
            else:
                number = ops.index_expr(row * self.blocks + block, torch.int64)
                low, high = stochastic(scaled, pair, number, stream, load_rng, self.device)
            packed = ops.bitwise_or(low, ops.bitwise_left_shift(high, i32(4)))
            return ops.to_dtype(packed, torch.uint8)

        if self.square and self.fits:
            loops = [FloorDiv(self.rows, BLOCK), BLOCK, self.blocks, PAIRS]

            def of_square(i: Sequence[Any]) -> Any:
                return byte(i[0] * BLOCK + i[1], self._ordered(i[0], i[2]), i[2], i[3])

            made = pointwise(self.x, torch.uint8, loops, of_square)
        elif self.swapped and not self.square:
            loops = [self.blocks, self.rows, PAIRS]

            def of_column(i: Sequence[Any]) -> Any:
                return byte(i[1], [i[0], i[1]], i[0], i[2])

            strides = [PAIRS, half, 1]
            return scattered(
                self.x, loops, strides, of_column, [self.rows, half], dtype=torch.uint8
            )
        else:
            loops = [self.rows, self.blocks, PAIRS]
            made = pointwise(
                self.x,
                torch.uint8,
                loops,
                lambda i: byte(i[0], self.block_of(i[0], i[1]), i[1], i[2]),
            )
        return reshaped(made, [self.rows, half])


# ---- scales ----


def _amax_of_row(amax: Any, rows: Any) -> Callable[[Any], Any]:
    """Return the global amax that belongs to a row of the result."""
    if all(known_equal(size, 1) for size in amax.get_size()):
        load, zeros = amax.make_loader(), [0] * len(amax.get_size())
        return lambda row: load(zeros)
    load_row = reshaped(amax, [rows]).make_loader()
    return lambda row: load_row([row])


def _scales(result: _Result, amax: Any) -> tuple[Expression, Expression]:
    """Return the scale of each block of the grid and what its elements are multiplied by, fp32."""
    device, largest = result.device, result.amax()
    whole = _amax_of_row(amax, result.rows)

    def shared(index: Sequence[Any]) -> Any:
        """The global encode scale: that of a row, or of everything."""
        value = whole(index[1] if result.swapped else index[0])
        encode = _min(div_rn(f32(SCALE_RANGE), value, device))
        zero = ops.logical_or(ops.eq(value, f32(0.0)), ops.eq(encode, f32(0.0)))
        return ops.where(zero, f32(1.0), encode)

    def scale(index: Sequence[Any]) -> Any:
        folded = ops.mul(shared(index), f32(SIXTH_F32))
        return _rounded_to_e4m3(_min(ops.mul(largest.load(index), folded)))

    def multiplier(index: Sequence[Any]) -> Any:
        decode = div_rn(f32(1.0), shared(index), device)
        return _min(div_rn(f32(1.0), ops.mul(scale(index), decode), device))

    if device.type != "cpu":
        return scale, multiplier
    made = [stored(pointwise(result.x, F32, result.grid, f)) for f in (scale, multiplier)]
    return made[0].make_loader(), made[1].make_loader()


SIXTH_F32 = torch.tensor(SIXTH, dtype=F32).item()


def _min(value: Any) -> Any:
    """Return min(value, FLT_MAX), and FLT_MAX for NaN."""
    return ops.where(ops.lt(value, f32(FLOAT32_MAX)), value, f32(FLOAT32_MAX))


def _rounded_to_e4m3(value: Any) -> Any:
    """Round a number that is not negative to e4m3fn, as fp32; saturates."""
    value = ops.minimum(value, f32(448.0))
    bits = ops.to_dtype_bitcast(value, torch.int32, F32)
    odd = ops.bitwise_and(ops.bitwise_right_shift(bits, i32(20)), i32(1))
    bits = ops.bitwise_and(ops.add(ops.add(bits, i32(0x7FFFF)), odd), i32(-0x100000))
    normal = ops.to_dtype_bitcast(bits, F32, torch.int32)
    small = ops.sub(ops.add(value, f32(2.0**14)), f32(2.0**14))  # the grid of subnormals, 2^-9
    return ops.where(ops.lt(value, f32(2.0**-6)), small, normal)


def _swizzled(scales: Any, result: _Result) -> Any:
    """Return the scales of the grid in the GEMM's order, a scale for each row of the result."""
    load, rows, columns = scales.make_loader(), result.rows, result.blocks
    size = [round_up(rows, 128), round_up(columns, 4)]
    bounds = [None if divides(by, n) else n for by, n in ((128, rows), (4, columns))]

    def scale(index: Sequence[Any]) -> Any:
        return ops.to_dtype(load(result.block_of(*index)), F32)  # exact, and back

    def element(index: Sequence[Any]) -> Any:
        row_tile, column_tile, row, quarter, column = index
        place = [row_tile * 128 + quarter * 32 + row, column_tile * 4 + column]
        return ops.to_dtype(load_within(scale, place, bounds, 0.0), _SCALE)

    if all(isinstance(n, int) or n.is_number for n in size):
        tiles = [FloorDiv(size[0], 128), FloorDiv(size[1], 4), 32, 4, 4]
        return reshaped(pointwise(scales, _SCALE, tiles, element), size)

    def in_order(index: Sequence[Any]) -> Any:
        """The same by row and column: to reshape symbolic sizes can tie them to their values."""
        row, column = index
        within = ModularIndexing(row, 1, 128) * size[1] + column  # the tiles of 128 rows
        split = ModularIndexing(within, 16, 32), ModularIndexing(within, 4, 4)
        return element(
            [FloorDiv(row, 128), FloorDiv(within, 512), *split, ModularIndexing(within, 1, 4)]
        )

    return pointwise(scales, _SCALE, size, in_order)


def _unswizzled(scales: Any) -> Expression:
    """Return the loads of scales in the GEMM's order by row and block."""
    rows, columns = scales.get_size()
    tiles = [FloorDiv(rows, 128), FloorDiv(columns, 4), 32, 4, 4]
    load = reshaped(scales, tiles).make_loader()

    def element(index: Sequence[Any]) -> Any:
        row, column = index
        quarter, within_tile = ModularIndexing(row, 32, 4), ModularIndexing(row, 1, 32)
        place = [FloorDiv(row, 128), FloorDiv(column, 4), within_tile, quarter]
        return load([*place, ModularIndexing(column, 1, 4)])

    return element


# ---- the Hadamard transform ----


def _transformed(x: Any, transposed: bool) -> Any:
    """Return the transform along the rows of a matrix, or of its transpose: bf16, contiguous.

    An element of the result is a tree of sums over its block, in the order of the butterflies.
    """
    value, device = elements(x), x.get_device()
    rows, length = x.get_size()[::-1] if transposed else x.get_size()

    def element(index: Sequence[Any]) -> Any:
        row, block, place = index
        level = []
        for i, sign in enumerate(HADAMARD_SIGNS):
            at = block * BLOCK + i
            loaded = value([at, row] if transposed else [row, at])
            level.append(loaded if sign > 0 else ops.neg(loaded))
        for h in (1, 2, 4, 8):
            bit = ops.index_expr(ModularIndexing(place, h, 2), torch.int32)
            sign = ops.sub(f32(1.0), ops.mul(ops.to_dtype(bit, F32), f32(2.0)))
            pairs = zip(level[0::2], level[1::2], strict=True)
            level = [ops.add(low, ops.mul(sign, high)) for low, high in pairs]
        quarter = ops.mul(level[0], f32(0.25))
        return ops.to_dtype(rounded(quarter, torch.bfloat16, device), torch.bfloat16)

    made = pointwise(x, torch.bfloat16, [rows, FloorDiv(length, BLOCK), BLOCK], element)
    return reshaped(made, [rows, length])
