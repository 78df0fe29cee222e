"""Schemas, fakes and contracts of the built-in ops, one file a family."""

from __future__ import annotations

from . import (
    activations,
    amax,
    attention,
    attention_fp8,
    fp8,
    fp8_block,
    fp8_both,
    int4,
    int8,
    modes,
    mxfp8,
    norms,
    nvfp4,
    rounding,
    scaled_mm,
    scaling,
)

__all__ = [
    "activations",
    "amax",
    "attention",
    "attention_fp8",
    "fp8",
    "fp8_block",
    "fp8_both",
    "int4",
    "int8",
    "modes",
    "mxfp8",
    "norms",
    "nvfp4",
    "rounding",
    "scaled_mm",
    "scaling",
]  # fmt: skip
