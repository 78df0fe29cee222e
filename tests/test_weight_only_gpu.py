"""The CUDA kernels of weight_only_mm: exact where sums are, within the bound elsewhere.

docs/weight_only.md derives the bounds; contracts and compute-sanitizer are in other files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import weights
from card import captured

import inductor_ext as ixt
from inductor_ext.ops.weight_only import FAMILIES
from inductor_ext.testing import require_equal

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
name_ = pytest.mark.parametrize("name", list(weights.FORMATS))
dtype_ = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    with ixt.config.patch(weight_only="kernel"):
        yield


@name_
@dtype_
def test_every_number_of_rows(name: str, dtype: torch.dtype) -> None:
    k = 2 * max(128, weights.multiple(weights.FORMATS[name]))
    for m in range(1, 17):
        case = weights.case(name, m, 50, k, dtype, bias=m % 2 == 0, seed=m)
        case.require(case.on("cuda").run().cpu(), weights.kernel_sum(k))


@name_
@dtype_
def test_ragged(name: str, dtype: torch.dtype) -> None:
    """N of no multiple of 16, K that ends within a stage; blocks of one tile to several passes."""
    step = weights.multiple(weights.FORMATS[name])
    sizes = (1, 1, step), (5, 17, 5 * step), (16, 4111, 9 * step), (12, 19013, 2 * step)
    for m, n, k in sizes:
        case = weights.case(name, m, n, k, dtype, bias=True, seed=n)
        case.require(case.on("cuda").run().cpu(), weights.kernel_sum(k))


@name_
def test_long_rows(name: str) -> None:
    """Several stages a warp, and the ring goes round."""
    for m in (3, 16):
        case = weights.case(name, m, 70, 256 * 45, BF16, seed=m)
        case.require(case.on("cuda").run().cpu(), weights.kernel_sum(256 * 45))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_integers_are_exact(family: str) -> None:
    """Small integers: any order of the sums gives the reference's bits."""
    op = getattr(torch.ops.inductor_ext, f"weight_only_mm_{family}").default
    contract = ixt.registry.contract(op)
    assert callable(contract.inputs)
    for number, args in enumerate(contract.inputs(torch.device("cpu"))):
        x = args[0].reshape(-1, args[0].shape[-1])[:16].to((BF16, F16)[number % 2])
        bias = None if args[-1] is None else args[-1].to(x.dtype)
        call = (x, *args[1:-1], bias)
        here = [a.cuda() if isinstance(a, torch.Tensor) else a for a in call]
        require_equal(op.name(), "exact", op(*here), op(*call), same_device=False)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_scales_of_other_rows(name: str) -> None:
    """K ends within a stage: NaN among the next row's scales stays in that row."""
    case = weights.case(name, 3, 20, 160, BF16)
    scales = case.q.scale_inv.view(torch.uint8).clone()
    scales[1::2] = 0x7F if name == "nvfp4" else 0xFF  # NaN
    spoiled = case.q._replace(scale_inv=scales.view(case.q.scale_inv.dtype))
    got = dataclasses.replace(case, q=spoiled).on("cuda").run()
    assert bool(got[:, 1::2].isnan().all())
    assert torch.equal(got[:, ::2], case.on("cuda").run()[:, ::2])


@name_
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    case = weights.case(name, 16, 100, 1024, BF16).on("cuda")
    whole = case.run()
    for m in (1, 3, 8, 9):
        part = ixt.weight_only_mm(case.x[:m], case.q, case.format)
        assert torch.equal(part, whole[:m]), m


def test_misaligned_and_strided_x() -> None:
    case = weights.case("int4 128", 4, 40, 512, BF16).on("cuda")
    want = case.run()
    wide = torch.empty(4, 600, dtype=BF16, device="cuda")
    for offset in (1, 3, 8):
        wide[:, offset : offset + 512] = case.x
        moved = wide[:, offset : offset + 512]
        assert torch.equal(ixt.weight_only_mm(moved, case.q, case.format), want)
    line = torch.empty(4 * 512 + 1, dtype=BF16, device="cuda")[1:].view(4, 512)
    line.copy_(case.x)
    assert torch.equal(ixt.weight_only_mm(line, case.q, case.format), want)
    assert torch.equal(ixt.weight_only_mm(case.x.t().contiguous().t(), case.q, case.format), want)
    folded = ixt.weight_only_mm(case.x.view(2, 2, 512), case.q, case.format)
    assert torch.equal(folded, want.view(2, 2, 40))


def test_misaligned_weight() -> None:
    case = weights.case("fp8 row", 4, 40, 512, BF16).on("cuda")
    want = case.run()
    line = torch.empty(40 * 512 + 3, dtype=torch.uint8, device="cuda")[3:].view(40, 512)
    codes = line.view(torch.float8_e4m3fn)
    codes.copy_(case.q.codes)
    assert torch.equal(ixt.weight_only_mm(case.x, case.q._replace(codes=codes), case.format), want)


def test_nan_stays_where_it_is() -> None:
    """A NaN code and a NaN of x spoil their row or column alone, next to padding too."""
    for name in ("fp8 row", "fp8 1x32", "mxfp8", "e5m2 row"):
        case = weights.case(name, 5, 33, 272, BF16)
        case.q.codes.view(torch.uint8)[2, 271] = 0x7F
        case.x[3, 1] = torch.nan
        got = case.on("cuda").run().cpu()
        want = torch.zeros(5, 33, dtype=torch.bool)
        want[3], want[:, 2] = True, True
        assert torch.equal(got.isnan(), want), name


@pytest.mark.parametrize("m", [17, 64])
def test_more_rows_are_refused_or_dequantized(m: int) -> None:
    case = weights.case("int8 row", m, 64, 256, BF16).on("cuda")
    with pytest.raises(ValueError, match="the kernel takes 16"):
        case.run()
    with ixt.config.patch(weight_only="dequantize"):
        # the weight's rounding, and cuBLAS may round partial sums to bf16
        case.on("cpu").require(case.run().cpu(), 3 * 2.0**-8 + 2.0**-12)


@name_
def test_dequantized(name: str) -> None:
    case = weights.case(name, 4, 48, 1024, BF16, bias=True)
    with ixt.config.patch(weight_only="dequantize"):
        case.require(case.on("cuda").run().cpu(), 3 * 2.0**-8 + 2.0**-12)


def test_graph_and_streams() -> None:
    case = weights.case("nvfp4", 7, 200, 2048, BF16).on("cuda")
    want = case.run()
    graph, result = captured(case.run)
    result.zero_()
    graph.replay()
    assert torch.equal(result, want)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            results.append(case.run())
    torch.cuda.synchronize()
    assert all(torch.equal(r, want) for r in results)


def test_bits_are_those_of_the_last_run() -> None:
    rng = np.random.default_rng(0)
    for name in weights.FORMATS:
        case = weights.case(name, int(rng.integers(1, 17)), 300, 2304, F16).on("cuda")
        if 2304 % weights.multiple(case.format) == 0:
            assert torch.equal(case.run(), case.run()), name
