"""CUDA graphs made by torch.compile: nothing of ours keeps a function out of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat

pytestmark = pytest.mark.gpu


def _block(x: Tensor, weight: Tensor, codes: Tensor, scale_inv: Tensor) -> Tensor:
    q = ixt.quantize(F.rms_norm(x, weight.shape, weight), ixt.FP8())
    y = ixt.scaled_mm(q, ixt.Quantized(codes, scale_inv), ixt.FP8())
    current = ixt.quantize(F.silu(y), ixt.FP8(granularity="tensor"))
    return ixt.dequantize(current, ixt.FP8())


@pytest.fixture
def graph_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often a CUDA graph is captured and replayed, whoever does it."""
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        original = getattr(torch.cuda.CUDAGraph, name)

        def counted(self: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.cuda.CUDAGraph, name, counted)

    count("capture_begin")
    count("replay")
    return counts


@pytest.mark.parametrize("enabled", [True, False])
def test_reduce_overhead_skips_nothing(enabled: bool, graph_calls: Counter[str]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    w = ixt.quantize(torch.randn(512, 256, device="cuda", dtype=torch.bfloat16), ixt.FP8())
    torch.compiler.reset()
    captures, replays = [], []
    with ixt.config.patch(enabled=enabled), torch.no_grad():
        plain = torch.compile(_block, fullgraph=True)
        graphed = torch.compile(_block, fullgraph=True, mode="reduce-overhead")
        _compat.counters.clear()
        for _ in range(6):
            x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            graph_calls.clear()
            got = graphed(x, weight, w.codes, w.scale_inv).clone()
            captures.append(graph_calls["capture_begin"])
            replays.append(graph_calls["replay"])
            assert torch.equal(got, plain(x, weight, w.codes, w.scale_inv))
        assert _compat.counters["inductor"]["cudagraph_skips"] == 0
    assert torch.isfinite(got).all()
    # Warm-up runs, then one call records; every later call is one replay of the whole function.
    assert sum(captures) >= 1, (captures, replays)
    assert (captures[-3:], replays[-3:]) == ([0, 0, 0], [1, 1, 1]), (captures, replays)
