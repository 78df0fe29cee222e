"""Schemas, fakes and contracts of the built-in ops, one file a family."""

from __future__ import annotations

from . import fp8, rounding, scaled_mm

__all__ = ["fp8", "rounding", "scaled_mm"]
