"""CUDA graphs made by torch.compile: nothing of ours keeps a function out of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat

pytestmark = pytest.mark.gpu


def _block(x: Tensor, weight: Tensor, codes: Tensor, scale_inv: Tensor) -> Tensor:
    q = ixt.quantize(F.rms_norm(x, weight.shape, weight), ixt.FP8())
    y = ixt.scaled_mm(q.codes, codes.t(), q.scale_inv, scale_inv.t())
    current = ixt.quantize(F.silu(y), ixt.FP8(granularity="tensor"))
    return ixt.dequantize(current, ixt.FP8())


@pytest.mark.parametrize("enabled", [True, False])
def test_reduce_overhead_skips_nothing(enabled: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    w = ixt.quantize(torch.randn(512, 256, device="cuda", dtype=torch.bfloat16), ixt.FP8())
    torch.compiler.reset()
    with ixt.config.patch(enabled=enabled), torch.no_grad():
        plain = torch.compile(_block, fullgraph=True)
        graphed = torch.compile(_block, fullgraph=True, mode="reduce-overhead")
        _compat.counters.clear()
        for _ in range(5):
            x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            got = graphed(x, weight, w.codes, w.scale_inv).clone()
            assert torch.equal(got, plain(x, weight, w.codes, w.scale_inv))
        assert _compat.counters["inductor"]["cudagraph_skips"] == 0
    assert torch.isfinite(got).all()
