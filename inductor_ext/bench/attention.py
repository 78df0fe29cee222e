"""Attention: every back end forward and backward, FP8, and how far each is from float64.

The operands lie in memory as a projection leaves them, (B, S, H, D).  An error is the norm of the
difference from float64 over the norm of the true result, of the last 64 queries of the first head;
that of FP8 counts the rounding of q, k and v to codes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext.decompositions.attention import attention as definition
from inductor_ext.decompositions.attention import dequantize
from inductor_ext.ops._routes_attention import SDPA

from .environment import environment
from .timing import device_time

_ops = torch.ops.inductor_ext
ROWS = 64
"""Queries whose results are compared with float64."""
SCALE = 100.0
"""Of results in e4m3, whose largest are about 4."""
FP8, WHOLE = ixt.FP8(granularity="row"), ixt.FP8(granularity="tensor")


class Case(NamedTuple):
    """A shape: tokens, heads of queries and of keys, head dimension."""

    tokens: int
    heads: int
    kv: int
    dim: int

    @property
    def name(self) -> str:
        """Return for instance "8192 tokens, 32/8 heads of 128"."""
        heads = str(self.heads) if self.heads == self.kv else f"{self.heads}/{self.kv}"
        return f"{self.tokens} tokens, {heads} heads of {self.dim}"

    @property
    def flops(self) -> float:
        """Return the operations of a causal forward."""
        return 2.0 * self.heads * self.tokens**2 * self.dim


CASES = (
    Case(8192, 32, 32, 128),
    Case(2048, 32, 32, 128),
    Case(16384, 32, 32, 128),
    Case(8192, 32, 8, 128),
    Case(8192, 32, 32, 64),
    Case(8192, 16, 16, 256),
)
TILES = (
    (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3),
    (64, 128, 4, 3), (64, 64, 4, 4), (128, 256, 8, 2), (128, 32, 8, 4),
)  # fmt: skip
"""Queries, keys, warps and stages to try for our kernel."""
TINY = (Case(256, 4, 4, 64), Case(200, 4, 2, 128))
"""What a CPU can do in seconds."""


class Line(NamedTuple):
    """One measurement; ``error`` is relative, NaN for a backward."""

    case: str
    what: str
    us: float
    tflops: float
    error: float


def operands(case: Case, device: torch.device, outliers: bool = False) -> list[Tensor]:
    """Return q, k and v in float32: N(0, 1), with 0.1 % of N(0, 100) added as outliers."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for heads in (case.heads, case.kv, case.kv):
        x = torch.randn(1, case.tokens, heads, case.dim, generator=generator, device=device)
        if outliers:
            rare = torch.rand(x.shape, generator=generator, device=device) < 0.001
            x += rare * 10 * torch.randn(x.shape, generator=generator, device=device)
        made.append(x.transpose(1, 2))
    return made


def _true(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the last queries' result of the first head in float64; (1, 1, ROWS, D)."""
    last = q[:, :1, -ROWS:]
    return definition(
        last, k[:, :1], v[:, :1], None, None, q.shape[3] ** -0.5, -1, 0, dtype=torch.float64
    )[0]


def _error(out: Tensor | ixt.Quantized, true: Tensor) -> float:
    if isinstance(out, ixt.Quantized):
        out = out.codes.double() / SCALE
    return float((out[:, :1, -ROWS:].double() - true).norm() / true.norm())


def codes_of(x: Tensor, whole: bool = False) -> ixt.Quantized:
    """Return ``x`` quantized with a scale a head, or with one for all."""
    if whole:
        codes, scale = ixt.quantize(x, WHOLE)[:2]
        return ixt.Quantized(codes, scale.reshape(1))
    rows = ixt.quantize(x.reshape(x.shape[0] * x.shape[1], -1), FP8)
    return ixt.Quantized(rows.codes.view(x.shape), rows.scale_inv.view(x.shape[:2]))


def _forwards(
    case: Case, device: torch.device
) -> Iterator[tuple[str, str, float, Callable[[], Any]]]:
    """Yield what to measure: a name, ``config.attention``, operations, and the call."""
    q, k, v = (x.bfloat16() for x in operands(case, device))
    plain = partial(ixt.attention, q, k, v, causal=True)
    for pin in ("auto", *SDPA):
        if pin != "math" or case.tokens <= 4096:  # it keeps the scores
            yield f"bf16 {pin}", pin, 1.0, plain
    codes = [codes_of(x) for x in (q, k, v)]
    natural = partial(ixt.attention, *codes, causal=True, format=FP8)
    codes[2] = codes[2]._replace(codes=codes[2].codes.mT.contiguous().mT)
    quantized = partial(ixt.attention, *codes, causal=True, format=FP8)
    for pin in ("auto", "triton", "dequantize"):
        yield f"FP8 {pin}", pin, 1.0, quantized
    yield "FP8 triton, V as (B, H, S, D)", "triton", 1.0, natural
    one = partial(ixt.attention, *(codes_of(x, True) for x in (q, k, v)), causal=True, format=WHOLE)
    for pin in ("auto", "cudnn_frontend", "triton"):
        yield f"FP8 {pin}, one scale, V as (B, H, S, D)", pin, 1.0, one
    coded = partial(one, out_scale=torch.tensor(SCALE, device=device))
    for pin in ("auto", "cudnn_frontend", "triton"):
        yield f"FP8 {pin}, one scale, result in e4m3, V as (B, H, S, D)", pin, 1.0, coded
    for name, format in (("a scale a head", FP8), ("one scale", WHOLE)):
        call = partial(plain, format=format)
        yield f"FP8 auto, {name}, quantization included", "auto", 1.0, call
    rest = (None, None, case.dim**-0.5, -1, 0)
    out, lse = _ops.attention(q, k, v, *rest)
    backward = partial(_ops.attention_backward, out, q, k, v, out, lse, *rest)
    for pin in ("auto", *SDPA[:3]):
        yield f"bf16 {pin}, backward", pin, 2.5, backward


def measure(case: Case, device: torch.device, only: str) -> Iterator[Line]:
    """Yield the lines of a case; a back end that refuses it has none."""
    true = _true(*operands(case, device))
    for name, pin, share, call in _forwards(case, device):
        if only not in name:
            continue
        with ixt.config.patch(attention=pin):
            try:
                made = call()
            except ValueError:
                continue
            us = device_time(call, device)
        error = math.nan if "backward" in name else _error(made, true)
        yield Line(case.name, name, us, share * case.flops / us / 1e6, error)


def tiles(case: Case, device: torch.device, only: str) -> Iterator[Line]:
    """Yield our kernel with other tiles, and with sums of its products in fp32 and by Hopper."""
    if device.type != "cuda":
        return
    from inductor_ext.kernels.triton import attention_fp8 as kernel

    true = _true(*operands(case, device))
    codes = [codes_of(x.bfloat16()) for x in operands(case, device)]
    codes[2] = codes[2]._replace(codes=codes[2].codes.mT.contiguous().mT)
    call = partial(ixt.attention, *codes, causal=True, format=FP8)
    for tile, sums in itertools.product(TILES, (0, case.dim)):
        name = f"tile {'x'.join(map(str, tile))}, {'fp32' if sums else 'own'} sums"
        if only not in name:
            continue
        with (
            mock.patch.dict(kernel.TILES, {case.dim: (tile, tile)}),
            mock.patch.object(kernel, "FP32_SUMS_UP_TO", sums),
            ixt.config.patch(attention="triton"),
        ):
            error = _error(call(), true)
            us = device_time(call, device)
        yield Line(case.name, name, us, case.flops / us / 1e6, error)


def hadamard(dim: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix that spreads outliers: Hadamard's, columns signed at random."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    return matrix * signs.to(device) * dim**-0.5


def accuracy(case: Case, device: torch.device, only: str) -> Iterator[Line]:
    """Yield errors of FP8 with a scale a head: the definition, and each route that takes it."""
    for outliers in (False, True):
        q, k, v = operands(case, device, outliers)
        true = _true(q, k, v)
        for rotated in (False, True):
            matrix = hadamard(case.dim, device) if rotated else torch.eye(case.dim, device=device)
            codes = [codes_of(x.bfloat16()) for x in (q @ matrix, k @ matrix, v)]
            kind = "outliers" if outliers else "Gaussian"
            name = f"{kind}{', q and k rotated' if rotated else ''}"
            exact = _true(*(dequantize(*c[:2], torch.float64) for c in codes))
            rows = [(f"{name}: definition", exact)]
            for pin in ("triton", "dequantize"):
                with ixt.config.patch(attention=pin), contextlib.suppress(ValueError):
                    out = ixt.attention(*codes, causal=True, format=FP8)
                    rows.append((f"{name}: {pin}", out))
            for what, out in rows:
                if only in what:
                    yield Line(case.name, what, math.nan, math.nan, _error(out, true))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, keep JSON; returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cases = CASES if device.type == "cuda" else TINY
    lines: list[Line] = []
    with torch.no_grad():
        for case in cases:
            lines += measure(case, device, arguments.only)
        lines += tiles(cases[0], device, arguments.only)
        lines += accuracy(cases[1], device, arguments.only)
    if not lines:
        print(f"no line of bench attention contains {arguments.only!r}")
        return 2
    table = Table("case (causal)", "what", "us", "TFLOP/s", "relative error")
    for line in lines:
        numbers = (f"{line.us:.0f}", f"{line.tflops:.0f}", f"{line.error:.2g}")
        table.add_row(line.case, line.what, *("" if n == "nan" else n for n in numbers))
    about = environment(device)
    console = Console(width=120)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), table)
    report = {"environment": about, "attention": [line._asdict() for line in lines]}
    Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0
