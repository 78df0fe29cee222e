"""Scaled products of every pair of formats, against float64, at sizes that no library likes."""

from __future__ import annotations

import itertools
from typing import Any

import gemm_cases as g
import pytest
import torch

import inductor_ext as ixt
from inductor_ext import config

DTYPES = ("bf16", "fp16", "fp32")
# Hopper's FP8 tensor cores keep about 13 bits below the largest term of a sum; other accumulations
# are fp32, which loses less over the K of these sizes (257 additions of 2^-24 each at most).
LOSS = 2.0**-12
device_ = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
pair_ = pytest.mark.parametrize("pair", g.PAIRS, ids=g.name_of)


def products(seed: int, count: int) -> Any:
    """Yield sizes with what else varies: the result's dtype, and whether there is a bias."""
    choices = itertools.cycle(itertools.product(DTYPES, (False, True)))
    return zip(g.sizes(count, seed), choices, strict=False)


@pair_
def test_against_float64(pair: Any) -> None:
    """60 sizes in all for every kind of scale, 4 for each pair and the empty ones."""
    seed = g.PAIRS.index(pair)
    for (m, n, k), (dtype, with_bias) in [*products(seed, 4), ((3, 5, 0), ("bf16", True))]:
        size = (m, n, g.k_for(pair, k))
        q = g.operands(pair, size, seed)
        bias = g.random_bias(n, dtype, seed) if with_bias else None
        wide = g.cases.INPUTS[dtype]
        got = ixt.scaled_mm(*q, *pair, bias=bias, dtype=wide)
        g.check(pair, q, bias, dtype, got)
        out = torch.full((n, m), torch.nan, dtype=wide).t()  # not contiguous
        assert ixt.scaled_mm(*q, *pair, bias=bias, dtype=wide, out=out) is out
        assert torch.equal(out, got)


@pytest.mark.gpu
@pair_
@pytest.mark.parametrize("route", ["auto", "dequantize"])
def test_against_float64_on_a_card(pair: Any, route: str) -> None:
    """200 sizes in all; what a tensor core's accumulation may lose is in ``LOSS``."""
    seed = 100 + g.PAIRS.index(pair)
    for (m, n, k), (dtype, with_bias) in products(seed, 8):
        size = (m, n, g.k_for(pair, k))
        q = g.operands(pair, size, seed, "cuda")
        bias = g.random_bias(n, dtype, seed, "cuda") if with_bias else None
        for fast in (False, True):
            with config.patch(gemm=route):
                got = ixt.scaled_mm(
                    *q, *pair, bias=bias, dtype=g.cases.INPUTS[dtype], fast_accum=fast
                )
            rounded = g.rounds_operands(pair, dtype)
            g.check(pair, q, bias, dtype, got, accumulation=LOSS, rounded=rounded)


@pytest.mark.gpu
@pair_
def test_in_a_cuda_graph(pair: Any) -> None:
    """Nothing waits for the host: the call is captured, and replayed on other numbers."""
    size = (33, 20, g.k_for(pair, 200))
    q, other = (g.operands(pair, size, seed, "cuda") for seed in (0, 1))
    bias = g.random_bias(20, "bf16", 0, "cuda")
    want = ixt.scaled_mm(*other, *pair, bias=bias)
    ixt.scaled_mm(*q, *pair, bias=bias)  # once before: libraries set themselves up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ixt.scaled_mm(*q, *pair, bias=bias)
    for mine, new in zip([*q[0], *q[1]], [*other[0], *other[1]], strict=True):
        if mine is not None:
            mine.copy_(new)
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:torch's GEMM refuses")
@pytest.mark.parametrize("kind", [ixt.FP8(), ixt.FP8(granularity="block"), ixt.INT8()], ids=str)
def test_large_k_and_small_m(kind: Any) -> None:
    """cuBLASLt had no kernel for this size of FP8 rows on an H100 (pytorch/ao#4582)."""
    q = g.operands((kind, kind), (127, 3072, 9216), 0, "cuda")
    g.check((kind, kind), q, None, "bf16", ixt.scaled_mm(*q, kind), accumulation=LOSS)


@device_
@pair_
def test_accumulates(pair: Any, device: str) -> None:
    seed = g.PAIRS.index(pair)
    size = (5, 7, g.k_for(pair, 130))
    q = g.operands(pair, size, seed, device)
    product = ixt.scaled_mm(*q, *pair, dtype=torch.float32)
    start = torch.randn(7, 5).t().to(device)
    out = start.clone()
    assert ixt.scaled_mm_accumulate_(out, *q, *pair) is out
    assert torch.equal(out, start + product)


def test_leading_dimensions() -> None:
    """A (*, K) gives (*, N), whatever shares a scale."""
    x, w = torch.randn(2, 3, 64), torch.randn(5, 64)
    whole = ixt.FP8(granularity="tensor")
    for f in (whole, ixt.FP8(), ixt.FP8(granularity="block"), ixt.MXFP8(), ixt.NVFP4(), ixt.INT8()):
        a, b = ixt.quantize(x, f), ixt.quantize(w, f)
        flat = ixt.quantize(x.view(6, 64), f)
        got = ixt.scaled_mm(a, b, f)
        assert got.shape == (2, 3, 5)
        assert torch.equal(got.view(6, 5), ixt.scaled_mm(flat, b, f))
        out = torch.empty(2, 3, 5, dtype=torch.bfloat16)
        assert torch.equal(ixt.scaled_mm(a, b, f, out=out), got)
    vector = ixt.Quantized(a.codes[0, 0], a.scale_inv[0, 0])
    assert torch.equal(ixt.scaled_mm(vector, b, f), got[0, 0])


@device_
def test_strided_and_misaligned_operands(device: str) -> None:
    """Slices, transposes, rows that are one row, and addresses off a 16-byte boundary."""
    f = ixt.FP8()
    x, y = (ixt.quantize(torch.randn(40, 40), f).codes.to(device) for _ in range(2))
    flat = torch.zeros(40 * 40 + 3, dtype=torch.uint8, device=device)
    flat[3:] = x.view(torch.uint8).flatten()
    off = flat.view(g.E4M3)[3:].view(40, 40)
    views = [
        (x.t(), y),
        (x[::2, 1:33], y[:, 7:39]),
        (x[3:4].expand(5, 40), y[5:6]),
        (off, off[:32]),
        (x[:1, :16].as_strided((1, 16), (1, 1)), y[:32, :16]),
    ]
    for a, b in views:
        scales = [torch.rand(t.shape[0] + 1, 1, device=device)[1:] for t in (a, b)]
        q = ixt.Quantized(a, scales[0]), ixt.Quantized(b, scales[1])
        loss = LOSS if device == "cuda" else 0.0
        g.check((f, f), q, None, "bf16", ixt.scaled_mm(*q, f), accumulation=loss)


def test_column_orientation() -> None:
    """A weight's gradient, dY^T X: both operands from the column orientation."""
    x, dy = torch.randn(96, 48), torch.randn(96, 32)
    for f in (ixt.FP8(granularity="tensor"), ixt.FP8(), ixt.FP8(granularity="block"),
              ixt.FP8(granularity="square", layout="gemm"), ixt.MXFP8(layout="gemm"),
              ixt.NVFP4(), ixt.INT8()):  # fmt: skip
        q = [ixt.quantize(t, f, orientation="column") for t in (dy, x)]
        got = ixt.scaled_mm(*q, f, dtype=torch.float32)
        g.check((f, f), (q[0], q[1]), None, "fp32", got)


def test_scales_of_any_rank() -> None:
    f = ixt.FP8(granularity="tensor")
    a, b = (ixt.quantize(torch.randn(n, 32), f) for n in (6, 4))
    want = ixt.scaled_mm(a, b, f)
    for shape in ((1,), (1, 1), (1, 1, 1)):
        other = a._replace(scale_inv=a.scale_inv.view(shape))
        assert torch.equal(ixt.scaled_mm(other, b, f), want)
        other = b._replace(scale_inv=b.scale_inv.view(shape))
        assert torch.equal(ixt.scaled_mm(a, other, f), want)


def test_long_sums_of_int8() -> None:
    """K beyond what int32 holds of the largest codes."""
    k, f = 140_000, ixt.INT8(granularity="tensor")
    codes = torch.full((2, k), 127, dtype=torch.int8)
    q = ixt.Quantized(codes, torch.tensor(0.5))
    got = ixt.scaled_mm(q, q, f, dtype=torch.float32)
    assert (got == float(torch.tensor(k * 127**2).float()) / 4).all()
