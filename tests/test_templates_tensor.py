"""One scale a tensor behind a producer: its amax and its codes in one kernel, and a fill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from test_templates import NORMS, generate, plain_tensors, product, same_bits, used, values
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu

E5M2 = ixt.FP8(granularity="tensor", dtype=torch.float8_e5m2, pow2=True, eps=1e-3)
TENSOR, INT8 = ixt.FP8(granularity="tensor"), ixt.INT8(granularity="tensor")
FORMATS = [TENSOR, E5M2, INT8]


@pytest.fixture(autouse=True)
def templates() -> Iterator[None]:
    with ixt.config.patch(enabled=True, templates=True, strict=True):
        yield


def names(graph: fake_gpu.GeneratedGraph) -> list[str]:
    """Return what each kernel is: the template, a fill, or other loops."""
    return [
        "template" if "_tem_" in k.name else "fill" if "tl.load" not in k.source else "loops"
        for k in graph.kernels.values()
    ]


@pytest.mark.parametrize("shape", [(1, 64), (5, 200), (2, 3, 1024), (7, 14336)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_a_pointwise_producer(fmt: ixt.Format, shape: tuple[int, ...]) -> None:
    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(product(x, y), fmt)

    x, y = values(*shape), values(*shape, seed=1).nan_to_num(1, 1, 1)
    x[x.isinf()] = 2.0**100  # an infinite amax would leave nothing to compare
    graph = generate(chain, x, y)
    assert names(graph) == ["fill", "template"]
    got = interpreter.run(graph.source, x, y)
    assert all(map(same_bits, got, plain_tensors(chain(x, y))))


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf"), 2.0**-121])
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_rare_amax(fmt: ixt.Format, fill: float) -> None:
    def chain(x: Tensor) -> Any:
        return ixt.quantize(-x, fmt)

    x = torch.full((3, 96), fill).bfloat16()
    (got, want) = interpreter.run(generate(chain, x).source, x), plain_tensors(chain(x))
    assert all(map(same_bits, got, want))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fmt", [TENSOR, INT8], ids=repr)
def test_a_norm(fmt: ixt.Format, norm: str) -> None:
    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return ixt.quantize(NORMS[norm](x, r, w), fmt)

    x, r = (torch.randn(9, 640).bfloat16() for _ in range(2))
    w = torch.randn(640).bfloat16()
    graph = generate(chain, x, r, w)
    assert names(graph) == ["fill", "template"]
    got = [t.float() for t in interpreter.run(graph.source, *used(graph, x, r, w))]
    want = [t.float() for t in plain_tensors(chain(x, r, w))]
    # The interpreter sums rows in another order: the last bit of a statistic moves a few codes.
    for a, b in zip(got, want, strict=True):
        assert float((a != b).float().mean()) < 2e-3 or a.numel() == 1
        torch.testing.assert_close(a, b, rtol=0.126, atol=1.0 if fmt is INT8 else 2.0**-9)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_a_sum_and_a_statistic_that_others_need(fmt: ixt.Format) -> None:
    """Both are stored by the programs that take the amax; the sum is read by the others."""

    def chain(x: Tensor, r: Tensor) -> list[Tensor]:
        h = x + r
        mean = h.float().mean(-1, keepdim=True)
        return [h, mean, *ixt.quantize((h.float() - mean).bfloat16(), fmt)[:2]]

    # Small integers: their mean does not depend on an order.
    x, r = (torch.randint(-8, 9, (11, 256)).bfloat16() for _ in range(2))
    graph = generate(chain, x, r)
    assert names(graph) == ["fill", "template"]
    assert "tl.load(KEPT_0" in graph.kernels[list(graph.kernels)[-1]].source
    got = interpreter.run(graph.source, x, r)
    assert all(map(same_bits, got, chain(x, r)))


def test_any_number_of_rows() -> None:
    """No rows have a scale, too."""

    def chain(x: Tensor) -> Any:
        assert x.shape[-1] == 384
        return ixt.quantize(-x, TENSOR)[:2]

    (graph,) = fake_gpu.capture(chain, (values(40, 384),), "sm_90", dynamic=True)
    assert names(graph) == ["fill", "template"]
    given = [values(rows, 384).nan_to_num(1, 1, 1) for rows in (40, 1, 0, 133)]
    results = interpreter.run_each(graph.source, [(len(x), x) for x in given])
    for x, got in zip(given, results, strict=True):
        assert all(map(same_bits, got, chain(x)))


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("norm", [False, True], ids=["pointwise", "norm"])
def test_no_rows_at_all(norm: bool, granularity: Any) -> None:
    """What Inductor makes of an empty producer is no code of an element."""
    fmt = ixt.FP8(granularity=granularity)

    def chain(x: Tensor, w: Tensor) -> Any:
        return ixt.quantize(F.rms_norm(x, w.shape, w) if norm else x * w, fmt)[:2]

    graph = generate(chain, torch.zeros(0, 384).bfloat16(), torch.ones(384).bfloat16())
    assert "template" not in names(graph)
    assert not graph.externs


@pytest.mark.parametrize("fmt", [TENSOR, INT8], ids=repr)
def test_codes_that_go_on_keep_the_loops(fmt: ixt.Format) -> None:
    """Behind a template nothing fuses; behind a norm one takes the amax all the same."""

    def chain(x: Tensor, w: Tensor) -> Tensor:
        q = ixt.quantize(F.rms_norm(x, w.shape, w), fmt)
        return ixt.dequantize(q, fmt).relu()

    graph = generate(chain, torch.randn(64, 5120).bfloat16(), torch.randn(5120).bfloat16())
    assert names(graph) == ["template", "loops", "loops"]


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "sum kept"])
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_ptxas_takes_it(fmt: ixt.Format, kept: bool) -> None:
    """Only where programs read what others stored besides their amax are numbers ordered."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        h = x + r
        return [*[h] * kept, *ixt.quantize(F.rms_norm(h, w.shape, w), fmt)[:2]]

    x, r = (torch.randn(64, 1024).bfloat16() for _ in range(2))
    (graph,) = fake_gpu.capture(chain, (x, r, torch.randn(1024).bfloat16()), "sm_90", asm=True)
    kernel = graph.kernels[list(graph.kernels)[-1]]
    assert "_tem_" in kernel.name
    for compiled in kernel.asm:
        assert compiled["cubin"]
        ptx = compiled["ptx"]
        assert ("ld.acquire.gpu" in ptx) == ("release" in ptx) == kept
        # Rows are asked for before the wait, unless they were stored by those waited for.
        after = ptx[ptx.rindex("AGAIN") :]
        assert ("ld.global.v4" in after) == kept
