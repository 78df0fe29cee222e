"""Triton functions that templates share: scales from an amax, codes, packing. Source text."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch


class Rule(NamedTuple):
    """How a block's amax becomes its scale and multiplier, and what its codes are.

    Attributes:
        kind: "mxfp8" (e8m0 scales), "fp8" or "int8" (fp32 scales); "static" where the scale is
            given and there is none to make.
        e5m2: whether codes are float8_e5m2 instead of float8_e4m3fn.
        floor: MXFP8's mode "floor" instead of "ceil".
        eps, limit, pow2: FP8's current scaling; ``limit`` replaces an infinite scale.
    """

    kind: str
    e5m2: bool
    floor: bool = False
    eps: float = 0.0
    limit: float = 0.0
    pow2: bool = False

    @property
    def name(self) -> str:
        """Return a word for kernel names."""
        if self.kind == "int8":
            return "int8"
        return f"{self.kind}_{'e5m2' if self.e5m2 else 'e4m3'}"

    @property
    def code_type(self) -> str:
        """Return Triton's name of the codes' type."""
        if self.kind == "int8":
            return "tl.int8"
        return "tl.float8e5" if self.e5m2 else "tl.float8e4nv"

    @property
    def codes(self) -> torch.dtype:
        """Return the codes' type."""
        if self.kind == "int8":
            return torch.int8
        return torch.float8_e5m2 if self.e5m2 else torch.float8_e4m3fn

    @property
    def scales(self) -> torch.dtype:
        """Return the stored scales' type."""
        return torch.uint8 if self.kind == "mxfp8" else torch.float32

    @property
    def scale_type(self) -> str:
        """Return Triton's name of the stored scales' type."""
        return "tl.uint8" if self.kind == "mxfp8" else "tl.float32"


def scale_text(rule: Rule) -> str:
    """Return the lines that make ``multiplier`` and the ``scale`` to store from ``amax``.

    INT8 divides by the scale itself.
    """
    if rule.kind == "static":
        return ""
    if rule.kind == "int8":
        return "scale = ixt_int8_scale(amax)"
    if rule.kind == "mxfp8":
        return (
            f"scale = ixt_e8m0(amax, {rule.e5m2}, {rule.floor})\n"
            "    multiplier = ixt_e8m0_inverse(scale)"
        )
    return (
        f"multiplier, scale = "
        f"ixt_scales(amax, {rule.e5m2}, {rule.eps!r}, {rule.limit!r}, {rule.pow2})"
    )


def _scales(rule: Rule, pack: int) -> str:
    """Return PTX of ``pack`` scales and their inverses from as many amax.

    For amax from 2^-100 to 2^100 there is no division.  A reciprocal within two ulp, one step of
    Newton and a fused remainder give the quotient; amax / largest and two such steps the inverse:
    right for all 2^23 mantissas, tried one by one.  The rest (0, NaN, infinity among it) divides,
    in one branch for all: a branch each would have the one wait for the other.
    """
    largest, inverse = (
        (57344.0, 1.743861685099546e-05) if rule.e5m2 else (448.0, 0.0022321429569274187)
    )
    words = {"LARGEST": _bits(largest), "INVERSE": _bits(inverse), "LIMIT": _bits(rule.limit)}
    mask = "and.b32 q#, q#, 0xFF800000;" if rule.pow2 else ""
    usual = (
        "sub.u32 x, $IN, 0x0D800000; max.u32 w, w, x;"
        " neg.f32 n, $IN; rcp.approx.ftz.f32 r, $IN;"
        " fma.rn.f32 e, n, r, 0f3F800000; fma.rn.f32 r, e, r, r;"
        " mul.rn.f32 q#, r, LARGEST; fma.rn.f32 e, n, q#, LARGEST; fma.rn.f32 q#, e, r, q#;"
    )
    if rule.pow2:
        usual += f" {mask} mov.b32 x, q#; sub.s32 x, 0x7F000000, x; mov.b32 i#, x;"
    else:
        usual += (
            " neg.f32 n, q#; mul.rn.f32 i#, $IN, INVERSE;"
            " fma.rn.f32 e, n, i#, 0f3F800000; fma.rn.f32 i#, e, i#, i#;"
            " fma.rn.f32 e, n, i#, 0f3F800000; fma.rn.f32 i#, e, i#, i#;"
        )
    rare = (
        "setp.gt.f32 p, $IN, 0f00000000; setp.lt.and.f32 p, $IN, 0f7F800000, p;"
        " div.rn.f32 q#, LARGEST, $IN;"
        f" setp.eq.f32 o, q#, 0f7F800000; @o mov.f32 q#, LIMIT; {mask}"
        " @!p mov.f32 q#, 0f3F800000; div.rn.f32 i#, 0f3F800000, q#;"
    )
    each = range(pack)
    text = "{ .reg .f32 r, e, n, q<8>, i<8>; .reg .b32 x, w; .reg .pred p, o; mov.b32 w, 0; "
    text += " ".join(_numbered(usual, j, pack) for j in each)
    text += " setp.le.u32 p, w, 0x64000000; @p bra DONE; "
    text += " ".join(_numbered(rare, j, pack) for j in each)
    text += " DONE:" + "".join(f" mov.f32 ${j}, q{j}; mov.f32 ${pack + j}, i{j};" for j in each)
    for word, value in words.items():
        text = text.replace(word, value)
    return text + " }"


def _numbered(text: str, number: int, pack: int) -> str:
    return text.replace("$IN", f"${2 * pack + number}").replace("#", str(number))


def _bits(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


def codes_text(rule: Rule, values: str, each: str) -> str:
    """Return the expression of the codes of ``values``, yet to be cast to their type.

    Args:
        each: the subscript that makes a scale one for each of its elements.
    """
    if rule.kind == "int8":
        return f"ixt_int8({values}, scale{each})"
    return f"{values} * multiplier{each}"


# The arithmetic is docs/formats.md's; kernels/common/{fp8,mxfp8}.h hold the same for C++ and CUDA.
_FUNCTIONS = """
@triton.jit
def ixt_div(a, b):
    return tl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)

@triton.jit
def ixt_amax(x, AXIS: tl.constexpr):
    # the maximum of a number and NaN is the number, that of NaNs alone becomes 0
    return tl.maximum(tl.max(tl.abs(x), AXIS), 0.0)

@triton.jit
def ixt_e8m0(amax, E5M2: tl.constexpr, FLOOR: tl.constexpr):
    if FLOOR:
        exponent = (amax.to(tl.int32, bitcast=True) >> 23) - (15 if E5M2 else 8)
        return tl.minimum(tl.maximum(exponent, 0), 254)
    inverse: tl.constexpr = 1.743861685099546e-05 if E5M2 else 0.0022321429569274187
    bits = (amax * inverse).to(tl.int32, bitcast=True)
    return tl.where(bits <= 0x400000, 0, tl.minimum((bits + 0x7FFFFF) >> 23, 254))

@triton.jit
def ixt_e8m0_inverse(e):
    return tl.maximum((254 - e) << 23, 0x400000).to(tl.float32, bitcast=True)

@triton.jit
def ixt_scales(
    amax, E5M2: tl.constexpr, EPS: tl.constexpr, LIMIT: tl.constexpr, POW2: tl.constexpr
):
    if EPS > 0.0:
        amax = tl.where(amax < EPS, EPS, amax)
    return tl.inline_asm_elementwise(
        "SCALES", "CONSTRAINTS", [amax], dtype=(tl.float32, tl.float32), is_pure=True, pack=PACK)

@triton.jit
def ixt_int8_scale(amax):
    largest = tl.minimum(amax, 3.4028234663852886e+38)
    return tl.maximum(ixt_div(largest, tl.full(amax.shape, 127.0, tl.float32)), 2.0**-126)

@triton.jit
def ixt_int8(x, scale):
    quotient = ixt_div(x, tl.broadcast_to(scale, x.shape))
    quotient = tl.minimum(tl.maximum(tl.where(x == x, quotient, 0.0), -127.0), 127.0)
    # to the nearest integer, half to even: the grid of fp32 at 1.5 * 2^23
    return (quotient + 12582912.0) - 12582912.0

@triton.jit
def ixt_pack4(a, b, c, d, E5M2: tl.constexpr):
    # four codes in a word, the first in the lowest byte
    if E5M2:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
"""


def functions(rule: Rule | None, pack: int = 1) -> str:
    """Return the functions' text.

    Args:
        rule: that of the kernel, None where it makes no scale.
        pack: how many FP8 scales a thread makes at once; where it has fewer, it makes up some.
    """
    words = {
        "SCALES": _scales(rule or Rule("fp8", False), pack),
        "CONSTRAINTS": ",".join(["=f"] * 2 * pack + ["f"] * pack),
        "PACK": str(pack),
    }
    text = _FUNCTIONS
    for word, value in words.items():
        text = text.replace(word, value)
    return text
