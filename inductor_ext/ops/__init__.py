"""Schemas, fakes and contracts of the built-in ops, one file a family."""

from __future__ import annotations

from . import (
    activations,
    amax,
    decode_attention,
    fp8,
    fp8_block,
    fp8_both,
    int4,
    int8,
    kv_cache,
    modes,
    mxfp8,
    norms,
    nvfp4,
    rope,
    rounding,
    scaled_mm,
    scaling,
)

__all__ = [
    "activations", "amax", "decode_attention", "fp8", "fp8_block", "fp8_both", "int4", "int8",
    "kv_cache", "modes", "mxfp8", "norms", "nvfp4", "rope", "rounding", "scaled_mm", "scaling",
]  # fmt: skip
