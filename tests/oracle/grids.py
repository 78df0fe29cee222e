"""Binary floating-point formats as sorted tables of exact values.

A format is the list of its non-negative finite values, decoded from their bits with integers,
and rounding is a search in that list: no trick and no cast in common with the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
FLT_MAX = np.float32(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Grid:
    """One format of `1 + exponent + mantissa` bits, with `codes` non-negative finite codes.

    `nan` is the code of every NaN, `overflow` the code of what rounds past the largest value.
    """

    name: str
    exponent: int
    mantissa: int
    codes: int
    nan: int
    overflow: int
    values: F64 = field(init=False, repr=False, compare=False)
    midpoints: F64 = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        code = np.arange(
            self.codes + 1, dtype=np.int64
        )  # one more: the first value that is not there
        exponent, mantissa = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        bias = (1 << (self.exponent - 1)) - 1
        significand = np.where(exponent > 0, mantissa + (1 << self.mantissa), mantissa)
        power = np.maximum(exponent, 1) - bias - self.mantissa
        values = np.ldexp(significand.astype(np.float64), power)
        object.__setattr__(self, "values", values[:-1])
        object.__setattr__(self, "midpoints", (values[:-1] + values[1:]) / 2)  # exact in float64

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def max(self) -> float:
        return float(self.values[-1])

    def encode(self, v: NDArray[np.floating]) -> NDArray[np.uint16]:
        """Round to nearest, ties to the even code; a zero keeps its sign, a NaN does not."""
        with np.errstate(invalid="ignore"):  # widening a signalling NaN
            wide = np.asarray(v).astype(np.float64)
        mag = np.where(np.isnan(wide), 0.0, np.abs(wide))
        code = np.searchsorted(
            self.midpoints, mag, side="left"
        )  # midpoints strictly below the value
        tie = (code < self.codes) & (mag == self.midpoints[np.minimum(code, self.codes - 1)])
        code = np.where(tie & (code % 2 == 1), code + 1, code)
        code = np.where(code >= self.codes, self.overflow, code)
        code = code | (np.signbit(wide).astype(np.int64) << (self.bits - 1))
        return np.where(np.isnan(wide), self.nan, code).astype(np.uint16)

    def decode(self, code: NDArray[np.integer]) -> F32:
        """Exact value of each code; codes that are neither finite nor infinite are NaN."""
        wide = np.asarray(code).astype(np.int64)
        sign, mag = wide >> (self.bits - 1), wide & ((1 << (self.bits - 1)) - 1)
        table = np.full(1 << (self.bits - 1), np.nan)
        table[: self.codes] = self.values
        if (
            self.codes == self.overflow
        ):  # a format with infinities has one right after its last finite value
            table[self.codes] = np.inf
        value = table[mag]
        return np.where(sign == 1, -value, value).astype(np.float32)


E4M3 = Grid("e4m3", 4, 3, codes=0x7F, nan=0x7F, overflow=0x7E)
# The ops write 0x7F for a NaN in e5m2 too, although 0x7D and 0x7E decode to NaN as well.
E5M2 = Grid("e5m2", 5, 2, codes=0x7C, nan=0x7F, overflow=0x7C)
FP16 = Grid("fp16", 5, 10, codes=0x7C00, nan=0x7E00, overflow=0x7C00)
BF16 = Grid("bf16", 8, 7, codes=0x7F80, nan=0x7FC0, overflow=0x7F80)


def saturate(v: F32, grid: Grid) -> NDArray[np.uint8]:
    """Clamp to the largest finite value (a NaN passes), then round: the definitions' `sat`."""
    limit = np.float32(grid.max)
    clamped = np.where(v > limit, limit, np.where(v < -limit, -limit, v))
    return grid.encode(clamped).astype(np.uint8)


def largest_input(dtype: str) -> np.float32:
    """Largest finite value of an input dtype, as float32."""
    return {"bf16": np.float32(BF16.max), "fp16": np.float32(FP16.max), "fp32": FLT_MAX}[dtype]


def decode_bits(raw: NDArray[np.integer], dtype: str) -> F32:
    """float32 value of raw bits: bf16 and fp16 as uint16, fp32 as uint32, fp8 as uint8."""
    if dtype == "fp32":
        return np.asarray(raw).astype(np.uint32).view(np.float32)
    return {"bf16": BF16, "fp16": FP16, "e4m3": E4M3, "e5m2": E5M2}[dtype].decode(raw)


def encode_bits(v: F32, dtype: str) -> NDArray[np.unsignedinteger]:
    """Bits of float32 values rounded once to `bf16`, `fp16` or `fp32`."""
    if dtype == "fp32":
        return np.array(v, dtype=np.float32, order="C").view(np.uint32)
    return {"bf16": BF16, "fp16": FP16}[dtype].encode(v)
