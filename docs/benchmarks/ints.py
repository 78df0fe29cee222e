"""Bandwidth of the integer, amax and scaling ops: `python ints.py [out.json] [--compiled]`.

Every byte that must move is counted once (the whole-tensor op reads its input twice: 5n), and
compared with the copy of the same tensor in the same run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import inductor_ext as ixt
from inductor_ext.bench.timing import device_time, host_time

SHAPES = ((16384, 8192), (8192, 4096), (4096, 14336))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = torch.ops.inductor_ext
COMPILED = ("int8 row", "int8 tensor", "int8 1x128", "int4 symmetric 128", "dequantize int8 row",
            "dequantize int4 symmetric")  # fmt: skip


def cases(x: torch.Tensor) -> dict[str, tuple[Any, tuple[Any, ...], float]]:
    """Name -> op, arguments, bytes that must move."""
    n, size, rows = x.numel(), x.element_size(), len(x)
    row, group = OPS.quantize_int8_row(x), OPS.quantize_int8_group(x, 128)
    symmetric = OPS.quantize_int4_symmetric(x, 128)
    asymmetric = OPS.quantize_int4_asymmetric(x, 128)
    byte, nibble, per_group = n * (size + 1), n * (size + 0.5), n / 128
    return {
        "int8 row": (OPS.quantize_int8_row, (x,), byte + 4 * rows),
        "int8 tensor": (OPS.quantize_int8_tensor, (x,), byte + n * size),
        "int8 1x128": (OPS.quantize_int8_group, (x, 128), byte + 4 * per_group),
        "int8 1x32": (OPS.quantize_int8_group, (x, 32), byte + 16 * per_group),
        "int4 symmetric 128": (OPS.quantize_int4_symmetric, (x, 128), nibble + 4 * per_group),
        "int4 symmetric 32": (OPS.quantize_int4_symmetric, (x, 32), nibble + 16 * per_group),
        "int4 asymmetric 128": (OPS.quantize_int4_asymmetric, (x, 128), nibble + 5 * per_group),
        "amax": (OPS.amax, (x,), n * size),
        "amax row": (OPS.amax_row, (x,), n * size + 4 * rows),
        "dequantize int8 row": (OPS.dequantize_int8, (*row, 0, x.dtype), byte + 4 * rows),
        "dequantize int8 1x128": (
            OPS.dequantize_int8, (*group, 128, x.dtype), byte + 4 * per_group
        ),
        "dequantize int4 symmetric": (
            OPS.dequantize_int4, (*symmetric, None, 128, x.dtype), nibble + 4 * per_group
        ),
        "dequantize int4 asymmetric": (
            OPS.dequantize_int4, (*asymmetric, 128, x.dtype), nibble + 5 * per_group
        ),
    }  # fmt: skip


def lowered(op: Any) -> Callable[..., Any]:
    """The op compiled alone, by its lowering."""

    def call(*args: Any) -> Any:
        return op(*args)

    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, dynamic=False)


def copy_bandwidth(x: torch.Tensor) -> float:
    """Bytes a second, read plus written, of a copy of ``x``."""
    y = torch.empty_like(x)
    return 2 * x.nbytes / (device_time(lambda: y.copy_(x), x.device) * 1e-6)


def measure(compiled: bool) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(), flush=True)
    results = []
    for shape in SHAPES[: 1 if compiled else None]:
        for dtype in DTYPES[: 1 if compiled else None]:
            x = torch.randn(shape, device=device).to(dtype)
            copy = copy_bandwidth(x)
            read = device_time(lambda x=x: x.view(torch.int32).amax(), device)
            told = f"{shape[0]} x {shape[1]} {str(dtype).removeprefix('torch.')}"
            print(f"{told}: copy {copy / 1e12:.2f} TB/s, int32 amax {read:.1f} us", flush=True)
            for name, (op, args, moved) in cases(x).items():
                if compiled and name not in COMPILED:
                    continue
                call = lowered(op) if compiled else op
                call(*args)
                us = device_time(lambda call=call, args=args: call(*args), device)
                percent = 100 * moved / (us * 1e-6) / copy
                entry = {"op": name, "shape": shape, "dtype": str(dtype), "us": us}
                results.append(entry | {"percent of copy": percent, "compiled": compiled})
                print(f"{told:24s} {name:28s} {us:8.1f} us {percent:6.1f} %", flush=True)
    return results


def updates() -> None:
    """Time of the scale update, of one tensor and of 300."""
    device = torch.device("cuda")
    for shape in ((1024,), (1024, 300), (16, 300)):
        history, scale = torch.rand(shape, device=device), torch.rand(shape[1:], device=device)
        args = (history, scale, torch.float8_e4m3fn)
        us = device_time(lambda args=args: OPS.update_fp8_scale_(*args), device)
        host = host_time(lambda args=args: OPS.update_fp8_scale_(*args), device)
        told = f"{us:8.1f} us on the device, {host:5.1f} on the host"
        print(f"update_fp8_scale_ {shape!s:14s} {told}")
    x = torch.randn(16, 4096, device=device, dtype=torch.bfloat16)
    host = host_time(lambda: OPS.quantize_int8_row(x), device)
    print(f"quantize_int8_row 16 x 4096 {host:5.1f} us on the host")


def main() -> None:
    compiled = "--compiled" in sys.argv
    with ixt.config.patch(enabled=compiled):
        results = measure(compiled)
    if not compiled:
        updates()
    for path in (a for a in sys.argv[1:] if not a.startswith("--")):
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
