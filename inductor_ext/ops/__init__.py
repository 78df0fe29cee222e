"""Schemas, fakes and contracts of the built-in ops, one file a family."""

from __future__ import annotations

from . import (
    activations,
    amax,
    attention,
    attention_fp8,
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
    scaled_grouped_mm,
    scaled_mm,
    scaled_mm_fp8_block,
    scaled_mm_int8,
    scaled_mm_mxfp8,
    scaled_mm_nvfp4,
    scaling,
    weight_only,
)

__all__ = [
    "activations", "amax", "attention", "attention_fp8", "decode_attention", "fp8", "fp8_block",
    "fp8_both", "int4", "int8", "kv_cache", "modes", "mxfp8", "norms", "nvfp4", "rope",
    "rounding", "scaled_grouped_mm", "scaled_mm", "scaled_mm_fp8_block", "scaled_mm_int8",
    "scaled_mm_mxfp8", "scaled_mm_nvfp4", "scaling", "weight_only",
]  # fmt: skip
