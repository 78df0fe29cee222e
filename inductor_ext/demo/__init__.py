"""A real model, six ways, one table: ``python -m inductor_ext demo``; see docs/demo.md."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with these command-line arguments; return its exit code."""
    from .cli import main as run_cli

    return run_cli(argv)
