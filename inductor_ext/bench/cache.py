"""RoPE, appends to a KV cache and attention over it, against a copy of the same run.

Bytes: what must be read and written once; for attention, the keys and values of all sequences and
their scales.  Attention runs by both routes and, over a plain contiguous cache, by PyTorch's SDPA.
On CUDA our kernel and SDPA are replayed as a graph, as in serving: no host time, caches warm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import inductor_ext as ixt

from .environment import environment
from .timing import copy_bandwidth, device_time, graph_time

FORMATS: dict[str, ixt.Format | None] = {
    "bf16": None,
    "FP8 given": ixt.FP8(granularity="tensor"),
    "FP8 row": ixt.FP8(granularity="row"),
    "INT8 row": ixt.INT8(granularity="row"),
}
PAGES = {"contiguous": 0, "pages of 16": 16}
REFERENCE_TOKENS = 1 << 16
"""Tokens up to which the reference route is timed: it makes fp32 copies of the cache."""


class Sizes(NamedTuple):
    """Heads and sizes of a model, and what is measured."""

    heads: int
    kv_heads: int
    head: int
    prompt: int
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    copied: int


SIZES = {
    "cuda": Sizes(32, 8, 128, 8192, (1, 16, 64), (1024, 8192, 32768), 1 << 27),
    "cpu": Sizes(4, 2, 64, 64, (1, 2), (64,), 1 << 16),
}


@dataclass(frozen=True)
class Row:
    """One measured case: percent of the speed of the copy."""

    case: str
    bytes: int
    us: float
    percent: float


class Case(NamedTuple):
    """One call, the bytes that it must move, and the route of attention to take."""

    name: str
    bytes: int
    call: Callable[[], Any]
    route: str = "auto"


def size_of(*tensors: Tensor | None) -> int:
    """Return the bytes of the tensors."""
    return sum(int(t.nbytes) for t in tensors if t is not None)


def random(*shape: int, device: torch.device) -> Tensor:
    """Return bf16 normal numbers."""
    return torch.randn(shape, device=device).bfloat16()


def rope_cases(s: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield RoPE of the queries of a prompt, as they are projected."""
    x = random(1, s.prompt, s.heads, s.head, device=device).transpose(1, 2)
    half = torch.randn(s.prompt, s.head // 2, device=device)
    full = random(1, s.prompt, s.head, device=device)
    positions = torch.arange(s.prompt, device=device)
    op, backward = torch.ops.inductor_ext.rope, torch.ops.inductor_ext.rope_backward
    for name, table in (("fp32 tables of half width", half), ("bf16 tables, full", full)):
        bytes_ = 2 * size_of(x) + 2 * size_of(table)
        yield Case(f"rope, {name}", bytes_, partial(op, x, table, table))
    size = 2 * size_of(x, half)
    yield Case("rope, interleaved", size, partial(op, x, half, half, interleaved=True))
    by_position = partial(op, x, half, half, positions)
    yield Case("rope, by position", size + size_of(positions), by_position)
    yield Case("rope, backward", size, partial(backward, x, half, half, token_major=True))
    compiled = torch.compile(lambda x, t: ixt.rope(x, t, t), fullgraph=True, dynamic=False)
    yield Case("rope, compiled", size, partial(compiled, x, half))


def empty_cache(s: Sizes, kind: str, page: int, batch: int, tokens: int, device: Any) -> Any:
    """Return an empty cache; the pages of a sequence lie in a random order."""
    shape = (batch, s.kv_heads, tokens, s.head)
    if not page:
        return ixt.KVCache.contiguous(*shape, FORMATS[kind], device=device)
    pages = batch * -(-tokens // page)
    table = torch.randperm(pages, device=device).view(batch, -1).int()
    return ixt.KVCache.paged(pages, s.kv_heads, page, s.head, table, FORMATS[kind])


def append_cases(s: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield the append of a prompt, and of one token of many sequences."""
    for (batch, new), kind, (layout, page) in (
        (size, kind, item)
        for size in ((1, s.prompt), (s.batches[-1], 1))
        for kind in FORMATS
        for item in PAGES.items()
    ):
        cache = empty_cache(s, kind, page, batch, max(new, 64), device)
        cache.lengths.fill_(new)
        k = random(batch, new, s.kv_heads, s.head, device=device).transpose(1, 2)
        scales = 2 * 4 * k.numel() // s.head if kind.endswith("row") else 0
        size = 2 * size_of(k) + 2 * k.numel() * cache.k.itemsize + scales
        name = f"append {batch} x {new}, {kind}, {layout}"
        yield Case(name, size, partial(ixt.append_kv_, cache, k, k))


def decode_cases(s: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield attention of one new token a sequence."""
    for batch, tokens, kind, (layout, page) in (
        (b, t, kind, item)
        for b in s.batches
        for t in s.tokens
        for kind in FORMATS
        for item in PAGES.items()
    ):
        cache = empty_cache(s, kind, page, batch, tokens, device)
        for start in range(0, tokens, s.prompt):  # filled in parts: the new tokens are bf16
            count = min(s.prompt, tokens - start)
            cache.lengths.fill_(start + count)
            k = random(batch, s.kv_heads, count, s.head, device=device)
            ixt.append_kv_(cache, k, k)
        q = random(batch, s.heads, 1, s.head, device=device)
        scales = (cache.k_scale, cache.v_scale) if kind.endswith("row") else ()
        size = size_of(cache.k, cache.v, *scales)
        name = f"decode {batch} x {tokens}, {kind}, {layout}"
        attend = partial(ixt.decode_attention, q, cache)
        if device.type == "cuda":
            yield Case(f"{name}, triton", size, attend, "triton")
        if batch * tokens <= REFERENCE_TOKENS:
            yield Case(f"{name}, reference", size, attend, "reference")
        if kind == "bf16" and not page:
            sdpa = partial(F.scaled_dot_product_attention, q, cache.k, cache.v, enable_gqa=True)
            yield Case(f"{name}, SDPA", size, sdpa)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, keep JSON; returns the exit code."""
    cuda = torch.cuda.is_available()
    device = torch.device(arguments.device or ("cuda" if cuda else "cpu"))
    s, about, console = SIZES[device.type], environment(device), Console(width=120)
    copy = copy_bandwidth(s.copied, device)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    console.print(f"copy {copy / 1e12:.3f} TB/s")
    report: dict[str, Any] = {"environment": about, "copy_bytes_per_second": copy, "cache": []}
    table = Table("case", "MB", "us", "% of the copy", title="RoPE, KV cache, decode attention")
    for cases in (rope_cases, append_cases, decode_cases):
        for case in cases(s, device):
            if arguments.only not in case.name:
                continue
            flags = ixt.config.patch(enabled=True, decode_attention=case.route)
            with torch.no_grad(), flags:
                if cuda and cases is decode_cases and case.route != "reference":
                    us = graph_time(case.call)
                else:
                    us = device_time(case.call, device, budget_ms=30)
            percent = 100 * case.bytes / copy / us * 1e6
            row = Row(case.name, case.bytes, round(us, 1), round(percent, 1))
            table.add_row(row.case, f"{row.bytes / 1e6:.2f}", f"{row.us}", f"{row.percent}")
            console.print(f"  {row.case}: {row.us} us, {row.percent} %")
            report["cache"].append(asdict(row))
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    console.print(table)
    console.print(f"numbers kept in {arguments.json}")
    return 0
