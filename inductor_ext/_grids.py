"""A launch of no blocks: a mend of PyTorch 2.11 and 2.12 that dynamic shapes of ours run into.

A kernel over a plane with a symbolic number of rows divides by that number to find its grid, and
raises ZeroDivisionError for no rows.  PyTorch 2.13 mended it the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _compat


def wrap_grid_of_planes() -> Callable[[], None]:
    """Give kernels over planes a grid of no blocks where there are no rows; return the undo."""
    grid = _compat.Grid2DWithYZOverflow
    if _compat.torch_release() not in ("2.11", "2.12"):
        return lambda: None
    original = grid.generate

    def generate(self: Any, meta: dict[str, int]) -> None:
        original(self, meta)
        if self.mode == "python":
            self.y_grid = f"({self.y_grid} if {self.z_grid} else 0)"

    grid.generate = generate

    def undo() -> None:
        if grid.generate is generate:
            grid.generate = original

    return undo
