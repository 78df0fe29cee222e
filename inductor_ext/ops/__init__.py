"""Schemas, fakes and contracts of the built-in ops, one file a family."""

from __future__ import annotations

from . import fp8, fp8_block, fp8_both, mxfp8, scaled_mm

__all__ = ["fp8", "fp8_block", "fp8_both", "mxfp8", "scaled_mm"]
