"""Producers and quantize in one Triton template: how many kernels, and which bits.

The kernels run in Triton's interpreter here; test_templates_gpu.py runs them on a card.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu
from inductor_ext.lowerings.templates import fit_row

MX, BLOCK = ixt.MXFP8(), ixt.FP8(granularity="block")
ROW, INT8 = ixt.FP8(granularity="row"), ixt.INT8(granularity="row")
GEMM = ixt.MXFP8(dtype=torch.float8_e5m2, mode="floor", layout="gemm")
BLOCK_GEMM = ixt.FP8(granularity="block", block=32, pow2=True, eps=1e-3, layout="gemm")


@pytest.fixture(autouse=True)
def templates() -> Iterator[None]:
    with ixt.config.patch(enabled=True, templates=True, strict=True):
        yield


def generate(fn: Callable[..., Any], *args: Tensor) -> fake_gpu.GeneratedGraph:
    (graph,) = fake_gpu.capture(fn, args, "sm_90")
    return graph


def values(*shape: int, seed: int = 0) -> Tensor:
    """bf16 of many magnitudes, with NaN, infinities and a block of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-20, 20, shape, generator=generator).float()
    x = (torch.randn(shape, generator=generator) * torch.exp2(exponent)).bfloat16()
    flat = x.view(-1)
    flat[::97], flat[5::1001], flat[40:200] = float("nan"), float("inf"), 0
    return x


def plain_tensors(result: Any) -> list[Tensor]:
    parts = (*result.row, *result.column) if isinstance(result, ixt.BothWays) else tuple(result)
    return [t for t in parts if t is not None]


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


TILES = [
    (MX, "both", (256, 192)),
    (GEMM, "both", (2, 160, 512)),
    (BLOCK, "both", (256, 384)),
    (BLOCK_GEMM, "both", (3, 64, 256)),
    (MX, "column", (96, 192)),
    (GEMM, "column", (96, 256)),
    (BLOCK, "column", (384, 192)),
    (BLOCK_GEMM, "column", (32, 128)),
    (MX, "row", (3, 7, 256)),
    (GEMM, "row", (70, 384)),
    (BLOCK, "row", (5, 128)),
    (BLOCK_GEMM, "row", (1, 256)),
]


@pytest.mark.parametrize(("fmt", "way", "shape"), TILES)
def test_tile(fmt: ixt.Format, way: str, shape: tuple[int, ...]) -> None:
    """A pointwise producer and every orientation: one kernel, and the eager op's bits."""

    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(product(x, y), fmt, orientation=way)  # type: ignore[call-overload]

    x, y = values(*shape), values(*shape, seed=1)
    graph = generate(chain, x, y)
    assert len(graph.kernels) == 1
    assert not graph.externs
    want = plain_tensors(chain(x, y))
    for got, expected in zip(interpreter.run(graph.source, x, y), want, strict=True):
        assert got.shape == expected.shape
        assert got.stride() == expected.stride()
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (got, expected))
        assert torch.equal(a, b)


def test_silu_divides_the_short_way() -> None:
    """1 + exp(-x) is at least 1; the largest divisors are infinite, or would lose bits unscaled."""

    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(F.silu(x) * y, MX)[:2]

    x = torch.linspace(-90, 90, 64 * 256).bfloat16().view(64, 256)
    y = torch.full_like(x, 2.0)
    graph = generate(chain, x, y)
    (kernel,) = graph.kernels.values()
    assert "rcp.approx" in kernel.source
    assert " / tmp" not in kernel.source
    for got, want in zip(interpreter.run(graph.source, x, y), chain(x, y), strict=True):
        distance = got.view(torch.uint8).int() - want.view(torch.uint8).int()
        assert int(distance.abs().max()) <= 1  # exp on the CPU may round otherwise
        assert float((distance != 0).float().mean()) < 1e-3


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    v = x.float()
    return weight * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, r, w: F.rms_norm(x, w.shape, w),
    "residual, rms_norm": lambda x, r, w: F.rms_norm(x + r, w.shape, w),
    "layer_norm": lambda x, r, w: F.layer_norm(x, w.shape, w, w),
    "Llama's norm": lambda x, r, w: llama_norm(x, w),
    "Gemma's norm": lambda x, r, w: llama_norm(x, 1 + w),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("fmt", "shape"),
    [(MX, (6, 512)), (BLOCK, (2, 3, 384)), (GEMM, (130, 640)), (BLOCK_GEMM, (3, 1024))],
    ids=["MX", "block", "MX gemm", "block gemm"],
)
def test_norm(norm: str, fmt: ixt.Format, shape: tuple[int, ...]) -> None:
    """A norm and a quantize along K: one kernel; codes move where the order of the sum does."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return ixt.quantize(NORMS[norm](x, r, w), fmt)

    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    w = torch.randn(shape[-1], generator=generator).bfloat16()
    graph = generate(chain, x, r, w)
    assert len(graph.kernels) == 1
    want = plain_tensors(chain(x, r, w))
    codes, scales = interpreter.run(graph.source, *used(graph, x, r, w))
    distance = codes.view(torch.uint8).int() - want[0].view(torch.uint8).int()
    moved = distance != 0
    assert float(moved.float().mean()) < 2e-3
    assert int(distance.abs().max()) <= 8  # a scale that moved by a power of two moves its codes
    near = torch.isclose(scales.float(), want[1].float(), rtol=1e-2, atol=1.0)
    assert bool(near.all())


def used(graph: fake_gpu.GeneratedGraph, x: Tensor, r: Tensor, w: Tensor) -> list[Tensor]:
    """Return the inputs that the graph takes, which leaves out what the norm does not use."""
    count = graph.source.split(" = args\n")[0].rsplit("\n", 1)[1].count("arg")
    return {3: [x, r, w], 2: [x, w]}[count]


@pytest.mark.parametrize("what", ["the sum", "the norm", "both of them"])
def test_a_value_used_twice(what: str) -> None:
    """A residual sum, or the norm's result, that is needed later is stored on the way."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> list[Tensor]:
        h = x + r
        y = F.rms_norm(h, w.shape, w)
        kept = {"the sum": [h], "the norm": [y], "both of them": [h, y]}[what]
        return [*kept, *ixt.quantize(y, BLOCK)[:2]]

    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(2, 5, 384, generator=generator).bfloat16() for _ in range(2))
    w = torch.randn(384, generator=generator).bfloat16()
    graph = generate(chain, x, r, w)
    assert len(graph.kernels) == 1
    results = interpreter.run(graph.source, x, r, w)
    for got, want in zip(results, chain(x, r, w), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
        assert int((a != b).sum()) <= (0 if got.shape == x.shape and what == "the sum" else 12)


def test_a_value_that_a_kernel_read_before() -> None:
    """The softmax's own kernel reads the sum first: the template may not be what stores it."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        h = x + r
        y = F.rms_norm(h + torch.softmax(h, -1), w.shape, w)
        return (h, *ixt.quantize(y, BLOCK)[:2])

    x, r = (torch.randn(64, 384).bfloat16() for _ in range(2))
    graph = generate(chain, x, r, torch.randn(384).bfloat16())
    calls = [line for line in graph.source.splitlines() if ".run(" in line]
    stored = re.search(r"return \((buf\d+)", graph.source)
    assert stored is not None
    first = next(line for line in calls if stored[1] + "," in line)
    assert "_tem_" not in first
    kernel = graph.kernels[first.strip().partition(".")[0]]
    assert "tl.store" in kernel.source


def same_bits(got: Tensor, want: Tensor) -> bool:
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
    return got.shape == want.shape and torch.equal(a, b)


@pytest.mark.parametrize("fmt", [ROW, INT8, MX, BLOCK, GEMM], ids=repr)
@pytest.mark.parametrize("columns", [384, 1536, 5120, 7680])
def test_a_statistic_that_others_need(fmt: ixt.Format, columns: int) -> None:
    """It is stored on the way, and given it, codes and scales have the eager ops' bits."""

    def norm(x: Tensor, w: Tensor, rstd: Tensor) -> Tensor:
        return (x.float() * rstd).bfloat16() * w

    def chain(x: Tensor, w: Tensor) -> list[Tensor]:
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return [rstd, *ixt.quantize(norm(x, w, rstd), fmt)[:2]]

    x = torch.randn(2, 3, columns).bfloat16()
    w = torch.randn(columns).bfloat16()
    graph = generate(chain, x, w)
    assert len(graph.kernels) == 1
    rstd, *results = interpreter.run(graph.source, x, w)
    torch.testing.assert_close(rstd, chain(x, w)[0], rtol=1e-5, atol=0)
    want = ixt.quantize(norm(x, w, rstd), fmt)[:2]
    assert all(same_bits(a, b) for a, b in zip(results, want, strict=True))


@pytest.mark.parametrize("fmt", [ROW, INT8], ids=repr)
@pytest.mark.parametrize("shape", [(5, 200), (3, 1024), (2, 2, 5120)], ids=str)
def test_whole_rows_of_a_pointwise_producer(fmt: ixt.Format, shape: tuple[int, ...]) -> None:
    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(product(x, y), fmt)

    x, y = values(*shape), values(*shape, seed=1)
    graph = generate(chain, x, y)
    assert [name for name in graph.kernels if "_tem_" in name] == list(graph.kernels)
    got = interpreter.run(graph.source, x, y)
    assert all(map(same_bits, got, plain_tensors(chain(x, y))))


@pytest.mark.parametrize("fmt", [ROW, INT8, MX, GEMM], ids=repr)
def test_one_row_kernel_for_every_batch(fmt: ixt.Format) -> None:
    """The number of rows is an argument of the kernel and of its grid."""

    def chain(x: Tensor, w: Tensor) -> Any:
        assert x.shape[-1] == 384
        return ixt.quantize(F.rms_norm(x, w.shape, w), fmt)[:2]

    arguments = torch.randn(6, 40, 384).bfloat16(), torch.randn(384).bfloat16()
    (graph,) = fake_gpu.capture(chain, arguments, "sm_90", dynamic=True)
    (kernel,) = graph.kernels.values()
    assert "_tem_" in kernel.name
    assert re.search(r"M = .*ks\d", kernel.source)
    assert not graph.externs


def test_a_matrix_that_is_read_transposed_is_no_step() -> None:
    """Square: only where it is read tells the sum from its transpose."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> list[Tensor]:
        h = x + r
        return [h, *ixt.quantize(F.rms_norm(h.t(), w.shape, w), BLOCK)[:2]]

    x, r = (torch.randn(256, 256).bfloat16() for _ in range(2))
    graph = generate(chain, x, r, torch.randn(256).bfloat16())
    assert not any("KEPT_0" in kernel.source for kernel in graph.kernels.values())


def test_halves_that_are_put_together_are_no_step() -> None:
    """Which half an element is of depends on its place: loops fuse that, a template does not."""

    def chain(a: Tensor, b: Tensor) -> list[Tensor]:
        h = torch.cat([a * b, a - b], -1)
        return [h, h.abs(), *ixt.quantize(h, ROW)[:2]]

    graph = generate(chain, *(torch.randn(64, 256).bfloat16() for _ in range(2)))
    assert ["_tem_" in name for name in graph.kernels] == [False]
    assert not graph.externs


def test_a_template_that_fails_leaves_its_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that it was to store has its own kernel again, for the op's."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no template today")

    def chain(x: Tensor, r: Tensor, w: Tensor) -> list[Tensor]:
        h = x + r
        return [h, *ixt.quantize(F.rms_norm(h, w.shape, w), ROW)[:2]]

    monkeypatch.setattr(fit_row, "run_template", fail)
    x, r = (torch.randn(64, 384).bfloat16() for _ in range(2))
    with ixt.config.patch(strict=False), pytest.warns(ixt.InductorExtWarning, match="no template"):
        graph = generate(chain, x, r, torch.randn(384).bfloat16())
    (kernel,) = graph.kernels.values()
    assert kernel.source.count("tl.load") == 3
    assert len(graph.externs) == 1


def test_rows_too_long_for_registers_keep_the_plain_lowering() -> None:
    def chain(x: Tensor, w: Tensor) -> Any:
        return ixt.quantize(F.rms_norm(x, w.shape, w), ROW)[:2]

    graph = generate(chain, torch.randn(2, 16640).bfloat16(), torch.randn(16640).bfloat16())
    assert not any("_tem_" in name for name in graph.kernels)


@pytest.mark.parametrize("fmt", [ROW, MX], ids=repr)
def test_codes_that_go_on_take_the_plain_lowering(fmt: ixt.Format) -> None:
    """Nothing fuses behind a template; what a scale becomes is no reason to do without one."""

    def codes(x: Tensor, w: Tensor) -> Any:
        return F.silu(ixt.dequantize(ixt.quantize(F.rms_norm(x, w.shape, w), fmt), fmt))

    def scale(x: Tensor, w: Tensor) -> Any:
        result = ixt.quantize(F.rms_norm(x, w.shape, w), fmt)
        return result[0], result[1].float() * 2

    x, w = torch.randn(64, 512).bfloat16(), torch.randn(512).bfloat16()
    assert not any("_tem_" in name for name in generate(codes, x, w).kernels)
    assert any("_tem_" in name for name in generate(scale, x, w).kernels)


def test_templates_can_be_turned_off() -> None:
    with ixt.config.patch(templates=False):
        graph = generate(lambda x: ixt.quantize(torch.relu(x), MX), torch.randn(64, 512).bfloat16())
    assert not any("_tem_" in name for name in graph.kernels)
