"""How long a call takes, on the device and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def device_time(call: Callable[[], Any], device: torch.device, *, budget_ms: float = 100) -> float:
    """Return the median time of a call in microseconds, caches cold, device time on CUDA."""
    if device.type == "cuda":
        from triton.testing import do_bench

        warmup = min(25, budget_ms)
        return float(do_bench(call, warmup=warmup, rep=budget_ms, return_mode="median")) * 1e3
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < budget_ms / 1e3 * 3 or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def times_in_turns(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, rounds: int, budget_ms: float
) -> list[float]:
    """Return each call's :func:`device_time`, the median of several taken in turns.

    A card that warms up slows down: of two equal calls the second would look slower.
    """
    times = [
        [device_time(call, device, budget_ms=budget_ms / rounds) for call in calls]
        for _ in range(rounds)
    ]
    return [statistics.median(of_call) for of_call in zip(*times, strict=True)]


def graph_time(call: Callable[[], Any]) -> float:
    """Return the median microseconds of a call inside a CUDA graph: no host time, caches warm."""
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(call, rep=30, return_mode="median")) * 1e3


def rotating_time(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the median microseconds a call, inside a CUDA graph of calls that follow each other.

    Each call has data of its own, and results that stay; together they should be several times the
    L2 cache.  What a call finds there is then what calls like it left.  :func:`device_time` fills
    the cache with zeros instead, and a short call also pays for their way to memory.
    """
    return graph_time(lambda: [call() for call in calls]) / len(calls)


def host_time(call: Callable[[], Any], device: torch.device, calls: int = 2000) -> float:
    """Return the host's microseconds a call, the device kept free of a backlog.

    The median over batches of 50 calls, each batch synchronized outside the timed region.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(50):
        call()
    batches = []
    for _ in range(max(1, calls // 50)):
        synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        batches.append((time.perf_counter() - start) / 50)
    synchronize()
    return statistics.median(batches) * 1e6


def copy_bandwidth(elements: int, device: torch.device) -> float:
    """Return the bytes a second, read plus written, of a copy of ``elements`` bf16 numbers."""
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    microseconds = device_time(lambda: target.copy_(source), device)
    return 4 * elements / (microseconds * 1e-6)
