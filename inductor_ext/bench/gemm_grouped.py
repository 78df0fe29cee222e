"""Grouped products against a loop over experts, for ``bench gemm``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

import inductor_ext as ixt

from .gemm_cases import BF16, BUDGET_MS, Experts
from .timing import device_time, host_time


@dataclass(frozen=True)
class GroupedRow:
    """One grouped product; times in microseconds, the loop's None where none can be written."""

    experts: str
    form: str
    scales: str
    pin: str
    us: float
    tflops: float
    loop_us: float | None
    times: float | None
    host_us: float


Slices = list[slice]
ROW = ixt.FP8(granularity="row")
BLOCK, SQUARE = (ixt.FP8(granularity=g) for g in ("block", "square"))


def grouped(
    experts: Experts, device: torch.device
) -> Iterator[tuple[str, Callable[[], GroupedRow]]]:
    """Yield both forms, of rows' and of blocks' scales, where torch serves also by our kernel."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=BF16)

    counts = experts.counts()
    ends = list(itertools.accumulate(counts))
    slices = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    x, dy = random(experts.tokens, experts.k), random(experts.tokens, experts.n)
    weights = random(experts.count, experts.n, experts.k)

    def forward(f: ixt.FP8, g: ixt.FP8, name: str, pin: str) -> GroupedRow:
        a, b = ixt.quantize(x, f), ixt.quantize(weights, g)
        call, loop = _call(a, b, offsets, f, g), _loop(a, b, slices, f, g)
        with ixt.config.patch(grouped_gemm=pin):
            return _time(experts, "forward", name, call, loop, device, pin)

    def gradient(f: ixt.FP8, name: str) -> GroupedRow:
        a, b = (ixt.quantize(t, f, orientation="column") for t in (dy, x))
        # a block may hold tokens of two experts, so that no expert's share is an operand of its own
        loop = _loop_of_columns(a, b, slices) if f is ROW else None
        call = _call(a, b, offsets, f, f)
        return _time(experts, "weights' gradient", name, call, loop, device, "auto")

    for f, g, name in ((ROW, ROW, "row"), (BLOCK, SQUARE, "1x128 x 128x128")):
        pins = ("auto", "triton") if f is ROW and device.type == "cuda" else ("auto",)
        for pin in pins:
            yield f"{experts.name}, {name}, {pin}", partial(forward, f, g, name, pin)
        yield f"{experts.name}, {name}, weights' gradient", partial(gradient, f, name)


def tiles(experts: Experts, device: torch.device) -> Iterator[tuple[str, Callable[[], GroupedRow]]]:
    """Yield the forward product by our kernel, with each of its tiles."""
    from inductor_ext.kernels.triton import scaled_grouped_mm as kernel

    counts = torch.tensor(experts.counts(), device=device)
    offsets = counts.cumsum(0).to(torch.int32)
    x = torch.randn(experts.tokens, experts.k, device=device, dtype=BF16)
    weights = torch.randn(experts.count, experts.n, experts.k, device=device, dtype=BF16)
    out = torch.empty(experts.tokens, experts.n, device=device, dtype=BF16)

    def one(f: ixt.FP8, g: ixt.FP8, name: str, tile: kernel.Tiles) -> GroupedRow:
        a, b = ixt.quantize(x, f), ixt.quantize(weights, g)
        scale_b = b.scale_inv.view(experts.count, -1, b.scale_inv.shape[-1])
        blocks, operands = f is BLOCK, (a.codes, b.codes, a.scale_inv, scale_b, offsets, out)
        height = 128 if blocks else 1
        call = partial(kernel.rows_product, *operands, height, blocks, False, tile)
        return _time(experts, "forward", name, call, None, device, str(tuple(tile)))

    for f, g, name in ((ROW, ROW, "row"), (BLOCK, SQUARE, "1x128 x 128x128")):
        for tile in kernel.CANDIDATES:
            yield f"{experts.name}, {name}, {tile}", partial(one, f, g, name, tile)


def _call(
    a: ixt.Quantized, b: ixt.Quantized, offsets: Tensor, f: ixt.FP8, g: ixt.FP8
) -> Callable[[], Tensor]:
    return lambda: ixt.scaled_grouped_mm(a, b, offsets, f, g)


def _loop(
    a: ixt.Quantized, b: ixt.Quantized, slices: Slices, f: ixt.FP8, g: ixt.FP8
) -> Callable[[], None]:
    """Return a loop over the experts that have tokens, each into its rows of the result."""
    experts, n, _ = b.codes.shape
    scales = b.scale_inv.view(experts, -1, b.scale_inv.shape[-1])
    out = a.codes.new_empty((a.codes.shape[0], n), dtype=BF16)
    parts = [
        (out[s], (a.codes[s], a.scale_inv[s]), (b.codes[e], scales[e]))
        for e, s in enumerate(slices)
        if s.start < s.stop
    ]

    def loop() -> None:
        for mine, left, right in parts:
            ixt.scaled_mm(ixt.Quantized(*left), ixt.Quantized(*right), f, g, out=mine)

    return loop


def _loop_of_columns(a: ixt.Quantized, b: ixt.Quantized, slices: Slices) -> Callable[[], None]:
    """Return the loop for the weights' gradient; the shares are contiguous before it starts."""
    parts = [
        [ixt.Quantized(q.codes[:, s].contiguous(), q.scale_inv) for q in (a, b)]
        for s in slices
        if s.start < s.stop
    ]

    def loop() -> None:
        for left, right in parts:
            ixt.scaled_mm(left, right, ROW)

    return loop


def _time(
    experts: Experts,
    form: str,
    scales: str,
    call: Callable[[], Tensor],
    loop: Callable[[], None] | None,
    device: torch.device,
    pin: str,
) -> GroupedRow:
    budget = BUDGET_MS[device.type]
    us = device_time(call, device, budget_ms=budget)
    loop_us = device_time(loop, device, budget_ms=budget) if loop else None
    return GroupedRow(
        experts.name, form, scales, pin, round(us, 1),
        round(2 * experts.tokens * experts.n * experts.k / us / 1e6, 3),
        loop_us and round(loop_us, 1), loop_us and round(loop_us / us, 2),
        round(host_time(call, device, calls=50), 1),
    )  # fmt: skip


def grouped_table(rows: list[GroupedRow]) -> Table:
    """Return the table; red where the loop is faster."""
    head = ("experts", "product", "scales", "pin or tile", "us", "TFLOP/s", "loop us",
            "times the loop's speed", "host us")  # fmt: skip
    drawn = Table(*head, title="scaled_grouped_mm against a loop of scaled_mm")
    for row in rows:
        cells = (row.experts, row.form, row.scales, row.pin, row.us, row.tflops, row.loop_us,
                 row.times, row.host_us)  # fmt: skip
        slow = row.times is not None and row.times < 1
        told = ("-" if cell is None else str(cell) for cell in cells)
        drawn.add_row(*told, style="bold red" if slow else None)
    return drawn
