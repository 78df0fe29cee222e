"""``python -m inductor_ext bench``: our kernels and chains against plain Inductor and a copy."""

from __future__ import annotations

import argparse

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inductor_ext bench", description=__doc__)
    parser.add_argument("suite", choices=["chains"], help="what to measure")
    parser.add_argument("--rows", type=int, default=None, help="rows (default 16384; CPU 2048)")
    parser.add_argument(
        "--columns", type=int, default=None, help="columns (default 8192; CPU 1024)"
    )
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda if present)")
    parser.add_argument("--only", default="", help="only chains whose name contains this")
    parser.add_argument(
        "--json",
        metavar="FILE",
        default="bench-chains.json",
        help="where to keep the numbers (default: %(default)s)",
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the bandwidth chart")
    arguments = parser.parse_args(argv)
    from .chains import run

    return run(arguments)
