"""``python -m inductor_ext bench``: our kernels and chains against plain Inductor and a copy."""

from __future__ import annotations

import argparse
from importlib import import_module

__all__ = ["main"]

SUITES = {
    "chains": "producers and quantize ops as one graph",
    "shapes": "60 of those at other shapes",
    "layer": "a Llama layer, compile time included",
    "llama": "four Llama-like layers, eager and compiled, in bf16 and FP8",
    "kernels": "every eager quantize kernel against a copy",
    "cpu": "the CPU kernels against their formula",
    "gemm": "matrix products against the library's, grouped ones against a loop",
    "decode": "products with quantized weights, for few rows",
    "attention": "attention in bf16 and FP8",
    "cache": "RoPE, the KV cache, and attention over it",
}


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inductor_ext bench", description=__doc__)
    said = "; ".join(f"{name}: {what}" for name, what in SUITES.items())
    parser.add_argument("suite", choices=SUITES, metavar="SUITE", help=said)
    parser.add_argument("--rows", type=int, help="rows (chains: 16384, on a CPU 2048; cpu: 4096)")
    parser.add_argument(
        "--columns", type=int, help="columns (chains: 8192, on a CPU 1024; cpu: 4096)"
    )
    parser.add_argument(
        "--shape", type=shape_of, action="append", metavar="MxK",
        help="kernels, decode (NxK); may be repeated (default: 16384x8192, 8192x4096 and"
        " 4096x14336; decode: 4096x4096, 14336x4096, 4096x14336 and 8192x28672)",
    )  # fmt: skip
    parser.add_argument(
        "--compiled", action="store_true",
        help="kernels: also each op compiled alone, by default and lowered (seconds a case)",
    )  # fmt: skip
    parser.add_argument(
        "--rotate", action="store_true",
        help="kernels: also over several tensors in turn, caches as the calls before left them",
    )  # fmt: skip
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda if present)")
    parser.add_argument("--only", default="", help="only lines whose name contains this")
    parser.add_argument(
        "--json", metavar="FILE", help="where to keep the numbers (default: bench-SUITE.json)"
    )
    parser.add_argument("--samples", type=int, default=200, help="random sizes (gemm)")
    parser.add_argument("--svg", metavar="FILE", help="draw the bandwidth chart (chains)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile (shapes)")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (cpu; default: its own)")
    parser.add_argument("--rounds", type=int, default=50, help="turns of each rival (cpu)")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most for a line (cpu)")
    arguments = parser.parse_args(argv)
    arguments.json = arguments.json or f"bench-{arguments.suite}.json"
    return int(import_module(f".{arguments.suite}", __name__).run(arguments))


def shape_of(text: str) -> tuple[int, int]:
    """Return (rows, columns) of text like "16384x8192"."""
    rows, by, columns = text.partition("x")
    if not (by and rows.isdecimal() and columns.isdecimal() and int(rows) * int(columns)):
        raise argparse.ArgumentTypeError(f"must be like 16384x8192, got {text!r}")
    return int(rows), int(columns)
