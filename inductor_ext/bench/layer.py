"""A Llama layer with FP8 linears: what compiling it costs, cold and warm, and how fast it runs.

Each rival runs in a process of its own with a cache directory of its own: the first such process
compiles everything, the second finds it in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import inductor_ext as ixt

from . import llama_layer as llama
from .environment import environment
from .timing import device_time

RIVALS = ("plain", "ours")
ALLOWED = 1.25
"""How many times as long as plain Inductor's a cold compilation may take."""
CHILD = "import sys; from inductor_ext.bench.layer import child; child(*sys.argv[1:])"


def child(rival: str, device_name: str, tokens: str) -> None:
    """Compile and time the layer, and print one line of JSON."""
    device = torch.device(device_name)
    sizes = llama.LLAMA_8B if device.type == "cuda" else llama.Sizes(256, 4, 2, 512)
    linear = llama.fp8_linear if rival == "ours" else llama.plain_linear
    p = llama.parameters(sizes, device)
    rotary = llama.rotary(int(tokens), sizes.head, device)
    x = torch.randn(1, int(tokens), sizes.width, device=device).bfloat16()
    torch.compile(lambda t: t + 1)(x)  # PyTorch's own start
    function = torch.compile(llama.layer, fullgraph=True, dynamic=False)
    with torch.no_grad(), ixt.config.patch(enabled=rival == "ours"):
        call = partial(function, x, *rotary, p, sizes, linear)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        compiled = time.perf_counter() - start
        print(json.dumps({"compile_s": compiled, "us": device_time(call, device)}))


def _measure(rival: str, device: torch.device, tokens: int, cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, rival, str(device), str(tokens)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(arguments: argparse.Namespace) -> int:
    """Measure both rivals, print the table, keep JSON; 1 if compiling takes too long."""
    from rich.console import Console
    from rich.table import Table

    if not torch.cuda.is_available():
        print("bench layer needs a GPU: PyTorch multiplies rows in FP8 on no other device")
        return 2
    device, tokens = torch.device(arguments.device or "cuda"), arguments.rows or 8192
    report: dict[str, Any] = {"environment": environment(device), "tokens": tokens}
    table = Table("Llama layer", "cold compile", "warm compile", "a call")
    for rival in RIVALS:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (_measure(rival, device, tokens, cache) for _ in range(2))
        report[rival] = {"cold_s": cold["compile_s"], "warm_s": warm["compile_s"], "us": warm["us"]}
        table.add_row(
            rival,
            f"{cold['compile_s']:.1f} s",
            f"{warm['compile_s']:.1f} s",
            f"{warm['us']:.0f} us",
        )
    ratio = report["ours"]["cold_s"] / report["plain"]["cold_s"]
    console = Console(width=100)
    console.print(table, f"cold: {ratio:.2f} times plain Inductor's (at most {ALLOWED})")
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return int(ratio > ALLOWED)
