"""Format objects: what to quantize to, as plain data that compares, prints and goes to JSON.

A format says how numbers are stored.  Along which axis they share scales is said by the call
(``orientation``), since one tensor is often wanted both ways.  Arithmetic: docs/formats.md.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .validation import FP8_DTYPES, check_dtype, check_eps, name_of

Layout = Literal["plain", "gemm"]
_KINDS: dict[str, type[Format]] = {}


@dataclass(frozen=True, kw_only=True)
class Format:
    """What all formats have: validation on construction, and a JSON form."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def to_json(self) -> str:
        """Return the format as JSON; :func:`format_from_json` reads it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: name_of(v) if isinstance(v, torch.dtype) else v for k, v in fields.items()}
        return json.dumps({"format": type(self).__name__, **plain})

    def _one_of(self, name: str, *allowed: object) -> None:
        value = getattr(self, name)
        if not any(type(value) is type(a) and value == a for a in allowed):
            said = [f'"{a}"' if isinstance(a, str) else str(a) for a in allowed]
            expected = ", ".join(said[:-1]) + " or " + said[-1]
            raise ValueError(f"`{name}` must be {expected}, got {value!r}")

    def _flag(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise TypeError(f"`{name}` must be a bool, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class FP8(Format):
    """8-bit floating point with fp32 scales.

    Args:
        dtype: ``torch.float8_e4m3fn`` (largest value 448) or ``torch.float8_e5m2`` (57344).
        granularity: what shares a scale: "tensor", "row" (all of the last dimension), "block"
            (``block`` elements along it) or "square" (``block`` x ``block`` elements).
        block: 32, 64 or 128; only for "block" and "square".
        eps: smallest amax to scale for; 0 scales for any.
        pow2: round the scale down to a power of two.
        layout: of the scales of blocks: "plain", or "gemm" as the block-scaled GEMM takes them.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Literal["tensor", "row", "block", "square"] = "row"
    block: int = 128
    eps: float = 0.0
    pow2: bool = False
    layout: Layout = "plain"

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype, FP8_DTYPES)
        self._one_of("granularity", "tensor", "row", "block", "square")
        self._one_of("block", 32, 64, 128)
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)):
            raise TypeError(f"`eps` must be a number, got {self.eps!r}")
        check_eps(self.eps)
        object.__setattr__(self, "eps", float(self.eps))
        self._flag("pow2")
        self._one_of("layout", "plain", "gemm")
        if self.layout == "gemm" and self.granularity in ("tensor", "row"):
            raise ValueError(
                '`layout` must be "plain" for granularity "tensor" and "row", which have only one,'
                ' got "gemm"'
            )


@dataclass(frozen=True, kw_only=True)
class MXFP8(Format):
    """8-bit floating point with a power-of-two scale (e8m0, one byte) per 32 elements.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        square: one scale per 32 x 32 elements instead.
        mode: how the scale is rounded: "ceil" (nothing saturates) or "floor" (OCP's text).
        layout: of the scales: "plain", or "gemm" (swizzled, zero-padded).
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    square: bool = False
    mode: Literal["ceil", "floor"] = "ceil"
    layout: Layout = "plain"

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype, FP8_DTYPES)
        self._flag("square")
        self._one_of("mode", "ceil", "floor")
        self._one_of("layout", "plain", "gemm")


@dataclass(frozen=True, kw_only=True)
class NVFP4(Format):
    """4-bit floating point (e2m1, two a byte), an e4m3 scale per 16 elements, an fp32 amax above.

    Args:
        granularity: of the fp32 amax: "tensor" or "row".
        square: one e4m3 scale per 16 x 16 elements (weights).
        hadamard: transform 16 elements by a random Hadamard matrix first; only of the column
            orientation, the operand of a weight gradient.
        layout: of the scales: "plain", or "gemm" (swizzled, zero-padded).
    """

    granularity: Literal["tensor", "row"] = "tensor"
    square: bool = False
    hadamard: bool = False
    layout: Layout = "plain"

    def __post_init__(self) -> None:
        self._one_of("granularity", "tensor", "row")
        self._flag("square")
        self._flag("hadamard")
        self._one_of("layout", "plain", "gemm")
        if self.square and (self.hadamard or self.granularity == "row"):
            other = "`hadamard`" if self.hadamard else '`granularity` "row"'
            raise ValueError(f"`square` must be False together with {other}, got True")


@dataclass(frozen=True, kw_only=True)
class INT8(Format):
    """Symmetric 8-bit integers with fp32 scales.

    Args:
        granularity: what shares a scale: "tensor", "row", or "group" (``group`` elements of a row).
        group: 32, 64, 128 or 256; only for "group".
    """

    granularity: Literal["tensor", "row", "group"] = "row"
    group: int = 128

    def __post_init__(self) -> None:
        self._one_of("granularity", "tensor", "row", "group")
        self._one_of("group", 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class INT4(Format):
    """4-bit integers, two a byte, with an fp32 scale per group of a row; for weights.

    Args:
        group: 32, 64, 128 or 256 elements.
        symmetric: codes -8..7 around zero; otherwise 0..15 with a zero point per group.
    """

    group: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        self._one_of("group", 32, 64, 128, 256)
        self._flag("symmetric")


class Quantized(NamedTuple):
    """A quantized tensor, as plain tensors.

    Attributes:
        codes: the low-precision values.
        scale_inv: what codes are multiplied by: float32, e8m0 as uint8 (MXFP8), e4m3 (NVFP4).
        amax: float32 largest |x|: where a scale was given, and for NVFP4; else None.
        zero: uint8 zero points (asymmetric INT4), else None.
    """

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor | None = None
    zero: Tensor | None = None


class BothWays(NamedTuple):
    """A tensor quantized in both orientations.

    Attributes:
        row: scales shared along the last dimension.
        column: scales shared along the rows, of the transposed matrix.
    """

    row: Quantized
    column: Quantized


def format_from_json(text: str) -> Format:
    """Return the format that :meth:`Format.to_json` wrote.

    Raises:
        ValueError: on text that is not such JSON, an unknown format or a field that it lacks.
    """
    try:
        fields: dict[str, Any] = dict(json.loads(text))
        kind = _KINDS[fields.pop("format")]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"`text` must be the JSON of a format, got {text!r}") from error
    known = {f.name for f in dataclasses.fields(kind)}
    if not fields.keys() <= known:
        odd = ", ".join(sorted(fields.keys() - known))
        raise ValueError(f"`text` must hold fields of {kind.__name__}, got also {odd}")
    if "dtype" in fields:
        fields["dtype"] = getattr(torch, str(fields["dtype"]), fields["dtype"])
    return kind(**fields)
