"""Schemas, fakes and contracts of the built-in ops, one file a family."""

from __future__ import annotations

from . import amax, fp8, int4, int8, modes, scaled_mm, scaling

__all__ = ["amax", "fp8", "int4", "int8", "modes", "scaled_mm", "scaling"]
