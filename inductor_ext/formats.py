"""Format objects: what to quantize to, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .validation import FP8_DTYPES, check_dtype, check_eps

Granularity = Literal["tensor", "row"]


@dataclass(frozen=True, kw_only=True)
class FP8:
    """8-bit floating point, with one fp32 scale for the whole tensor or for each row.

    Args:
        dtype: ``torch.float8_e4m3fn`` (largest value 448) or ``torch.float8_e5m2`` (57344).
        granularity: "tensor", or "row" (the last dimension shares a scale).
        eps: smallest amax to scale for; 0 scales for any.
        pow2: round the scale down to a power of two.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = "row"
    eps: float = 0.0
    pow2: bool = False

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype, FP8_DTYPES)
        if self.granularity not in ("tensor", "row"):
            raise ValueError(f'`granularity` must be "tensor" or "row", got {self.granularity!r}')
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)):
            raise TypeError(f"`eps` must be a number, got {self.eps!r}")
        check_eps(self.eps)
        object.__setattr__(self, "eps", float(self.eps))
        if not isinstance(self.pow2, bool):
            raise TypeError(f"`pow2` must be a bool, got {self.pow2!r}")


class Quantized(NamedTuple):
    """A quantized tensor, as plain tensors.

    Attributes:
        codes: the low-precision values, shaped like the input.
        scale_inv: float32 dequantization multiplier, 0-d or (*, 1).
        amax: largest |x|, shaped like the scale; only where the scale was given, else None.
    """

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor | None = None
