"""``python -m inductor_ext bench``: our kernels and chains against plain Inductor and a copy."""

from __future__ import annotations

import argparse

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inductor_ext bench", description=__doc__)
    parser.add_argument(
        "suite",
        choices=["chains", "cpu"],
        help="what to measure: producers and quantize ops as one graph, or the CPU kernels",
    )
    parser.add_argument("--rows", type=int, help="rows (chains: 16384, on a CPU 2048; cpu: 4096)")
    parser.add_argument(
        "--columns", type=int, help="columns (chains: 8192, on a CPU 1024; cpu: 4096)"
    )
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda if present)")
    parser.add_argument("--only", default="", help="only lines whose name contains this")
    parser.add_argument(
        "--json", metavar="FILE", help="where to keep the numbers (default: bench-SUITE.json)"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the bandwidth chart (chains)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (cpu; default: its own)")
    parser.add_argument("--rounds", type=int, default=50, help="turns of each rival (cpu)")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most for a line (cpu)")
    arguments = parser.parse_args(argv)
    if arguments.suite == "cpu":
        from .cpu import run
    else:
        from .chains import run
    arguments.json = arguments.json or f"bench-{arguments.suite}.json"
    return run(arguments)
