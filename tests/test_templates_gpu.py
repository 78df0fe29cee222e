"""The templates on a card: the bits of the eager ops, over shapes that tiles do not divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_templates as cpu
import test_templates_ahead as ahead
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import inductor_ext as ixt

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def templates() -> Iterator[None]:
    torch.compiler.reset()
    with (
        ixt.config.patch(enabled=True, templates=True, strict=True),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        yield


def _same(got: Any, want: Any) -> None:
    for a, b in zip(cpu.plain_tensors(got), cpu.plain_tensors(want), strict=True):
        assert a.stride() == b.stride()
        same = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*same)


SHAPES = ((256, 512), (2, 160, 384), (4096, 4096), (1056, 14336), (3, 47, 256), (1001, 1024))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", ["row", "column", "both"])
@pytest.mark.parametrize("fmt", [cpu.MX, cpu.GEMM, cpu.BLOCK, cpu.BLOCK_GEMM], ids=repr)
def test_tile(fmt: ixt.Format, way: str, shape: tuple[int, ...]) -> None:
    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(x * y, fmt, orientation=way)  # type: ignore[call-overload]

    x, y = cpu.values(*shape).cuda(), cpu.values(*shape, seed=1).cuda()
    _same(torch.compile(chain, fullgraph=True)(x, y), chain(x, y))


@pytest.mark.parametrize("fmt", [cpu.MX, cpu.GEMM, cpu.BLOCK, cpu.BLOCK_GEMM], ids=repr)
def test_one_tile_kernel_for_every_batch(fmt: ixt.Format) -> None:
    """Compiled once; whole tiles, words, bytes; once more for a single block along M.

    PyTorch sets apart the sizes 0 and 1, those of the scales included.
    """
    counter = CompileCounterWithBackend("inductor")

    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(x * y, fmt, orientation="both")

    compiled = torch.compile(chain, fullgraph=True, backend=counter)
    for rows, graphs in ((4096, 1), (300, 1), (129, 1), (31, 2), (2, 2)):
        x, y = cpu.values(rows, 1024).cuda(), cpu.values(rows, 1024, seed=1).cuda()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
        _same(compiled(x, y), chain(x, y))
        assert counter.frame_count <= graphs


def test_scales_beside_rare_ones() -> None:
    """A thread makes several scales at once: groups of zeros do not change tiny numbers'."""
    x = (torch.randn(2048, 2048, device="cuda") * 2.0**-20).half()
    x[::3, 256:512] = 0
    x[128:256, ::5] = 0

    def chain(x: Tensor) -> Any:
        return ixt.quantize(-x, cpu.BLOCK, orientation="both")

    _same(torch.compile(chain, fullgraph=True)(x), chain(x))


@pytest.mark.parametrize("shape", [(70, 192), (4096, 4096), (1001, 1024)], ids=str)
def test_a_given_scale_behind_a_pointwise_producer(shape: tuple[int, ...]) -> None:
    fmt, scale = ixt.FP8(granularity="tensor"), torch.tensor(0.5, device="cuda")

    def chain(x: Tensor, y: Tensor) -> list[Tensor]:
        q = ixt.quantize(x * y, fmt, scale, orientation="both")
        return [q.row.codes, q.column.codes]

    x, y = cpu.values(*shape).cuda(), cpu.values(*shape, seed=1).cuda()
    for got, want in zip(torch.compile(chain, fullgraph=True)(x, y), chain(x, y), strict=True):
        assert got.stride() == want.stride()
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_tiles_beyond_two_to_the_31_keep_the_plain_lowering() -> None:
    x = torch.randn((1 << 19) + 64, 4096, device="cuda", dtype=torch.bfloat16)

    def chain(x: Tensor) -> Any:
        return ixt.quantize(torch.relu(x), cpu.MX)

    _same(torch.compile(chain, fullgraph=True)(x), chain(x))


@pytest.mark.parametrize("shape", [(6, 512), (3, 7, 4096), (65, 5120), (16, 16384)], ids=str)
@pytest.mark.parametrize("norm", cpu.NORMS)
@pytest.mark.parametrize("fmt", [cpu.MX, cpu.BLOCK], ids=repr)
def test_norm(fmt: ixt.Format, norm: str, shape: tuple[int, ...]) -> None:
    """Given the same statistic the codes are the same; its last bit moves a few by a step."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return ixt.quantize(cpu.NORMS[norm](x, r, w), fmt)

    x, r = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(shape[-1], device="cuda", dtype=torch.bfloat16)
    got, want = torch.compile(chain, fullgraph=True)(x, r, w), chain(x, r, w)
    a, b = (ixt.dequantize(q, fmt, torch.float32) for q in (got, want))
    assert float((a != b).float().mean()) < 2e-3
    assert torch.allclose(a, b, rtol=0.13, atol=1e-3)


@pytest.mark.parametrize(
    "shape", [(64, 128), (2, 160, 640), (4096, 8192), (96, 16384), (3, 47, 256)], ids=str
)
@pytest.mark.parametrize("norm", cpu.NORMS)
def test_norm_in_both_orientations(norm: str, shape: tuple[int, ...]) -> None:
    """Tiles wait for statistics of other programs: nothing hangs, every run gives the same."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return ixt.quantize(cpu.NORMS[norm](x, r, w), cpu.MX, orientation="both")

    x, r = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(shape[-1], device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(chain, fullgraph=True)
    got, want = compiled(x, r, w), chain(x, r, w)
    for q, expected in ((got.row, want.row), (got.column, want.column)):
        a, b = (ixt.dequantize(t, cpu.MX, torch.float32) for t in (q, expected))
        assert float((a != b).float().mean()) < 2e-3
    for _ in range(50):
        _same(compiled(x, r, w), got)


@pytest.mark.parametrize("shape", [(128, 512), (2, 128, 2560), (1024, 14336)], ids=str)
@pytest.mark.parametrize("way", ["row", "both"])
@pytest.mark.parametrize("fmt", [ahead.SQUARE, ahead.SQUARE_GEMM], ids=["plain", "gemm"])
def test_norm_to_squares(fmt: ixt.Format, way: str, shape: tuple[int, ...]) -> None:
    """The gemm layout has padding here and there: then the plain lowering, with the same bits."""

    def chain(x: Tensor, w: Tensor) -> Any:
        return ixt.quantize(F.rms_norm(x, w.shape, w), fmt, orientation=way)  # type: ignore[call-overload]

    _moves_few(chain, torch.randn(shape, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(128, 192), (3, 28, 640), (4096, 8192), (99, 256)], ids=str)
def test_norm_to_a_given_scale_in_both_orientations(shape: tuple[int, ...]) -> None:
    fmt, scale = ixt.FP8(granularity="tensor"), torch.tensor(20.0, device="cuda")

    def chain(x: Tensor, w: Tensor) -> list[Tensor]:
        q = ixt.quantize(F.rms_norm(x, w.shape, w), fmt, scale, orientation="both")
        return [q.row.codes, q.column.codes]

    _moves_few(chain, torch.randn(shape, device="cuda", dtype=torch.bfloat16))


def _moves_few(chain: Callable[..., Any], x: Tensor) -> None:
    """Nearly all bytes are the eager ops' (the order of a row's sum), the same in every run."""
    w = torch.randn(x.shape[-1], device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(chain, fullgraph=True)
    got, want = (_tensors(f(x, w)) for f in (compiled, chain))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        same = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        assert float((same[0] != same[1]).float().mean()) < 2e-3
    for _ in range(50):
        assert all(
            torch.equal(a, b) for a, b in zip(_bytes(compiled(x, w)), _bytes(got), strict=True)
        )


def _tensors(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else cpu.plain_tensors(result)


def _bytes(result: Any) -> list[Tensor]:
    return [t.contiguous().view(-1).view(torch.uint8) for t in _tensors(result)]


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_a_value_used_twice(rows: int) -> None:
    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        h = x + r
        q = ixt.quantize(F.rms_norm(h, w.shape, w), cpu.BLOCK)
        return h, q, h + ixt.dequantize(q, cpu.BLOCK)

    x, r = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    h, q, out = torch.compile(chain, fullgraph=True)(x, r, w)
    want_h, want_q, _ = chain(x, r, w)
    assert torch.equal(h, want_h)
    assert float((q.codes.float() != want_q.codes.float()).float().mean()) < 2e-3
    assert torch.equal(out, h + ixt.dequantize(q, cpu.BLOCK))


def test_dynamic_rows_compile_once() -> None:
    count = 0

    def chain(x: Tensor, w: Tensor) -> Any:
        nonlocal count
        count += 1
        return ixt.quantize(F.rms_norm(x, w.shape, w), cpu.MX)

    run: Callable[..., Any] = torch.compile(chain, fullgraph=True, dynamic=True)
    w = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    for rows in (5, 17, 300):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        got, want = run(x, w), chain(x, w)
        assert float((got.codes.float() != want.codes.float()).float().mean()) < 2e-3


@pytest.mark.parametrize("exponent", [0, 3, 26, 27, 127, 226, 227, 253])
def test_scales_of_every_mantissa(exponent: int) -> None:
    """A group's scale and its inverse are IEEE quotients, in and beyond the branchless range."""

    def chain(x: Tensor) -> Any:
        return ixt.quantize(torch.relu(x), cpu.BLOCK)[1]

    compiled = torch.compile(chain, fullgraph=True, dynamic=False)
    x = torch.zeros(1 << 13, 128 * 128, device="cuda")
    for start in range(0, 1 << 23, 1 << 20):
        mantissa = torch.arange(start, start + (1 << 20), device="cuda", dtype=torch.int32)
        amax = (mantissa | exponent << 23).view(torch.float32)
        x.view(-1, 128)[:, 0] = amax
        # number / tensor would multiply by a reciprocal
        scale = torch.full_like(amax, 448.0) / amax
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        scale = torch.where(amax > 0, scale, 1.0)
        want = torch.ones_like(scale) / scale
        assert torch.equal(compiled(x).view(-1).view(torch.int32), want.view(torch.int32))


TENSORS = [ixt.FP8(granularity="tensor"), ixt.INT8(granularity="tensor")]


@pytest.mark.parametrize("shape", [(1, 64), (5, 200), (3, 7, 4096), (301, 14336)], ids=str)
@pytest.mark.parametrize("fmt", TENSORS, ids=repr)
def test_one_scale_a_tensor(fmt: ixt.Format, shape: tuple[int, ...]) -> None:
    """Programs wait for the amax of others: nothing hangs, and every run has the eager bits."""

    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(x * y, fmt)

    x, y = cpu.values(*shape).cuda(), cpu.values(*shape, seed=1).cuda()
    x, y = (t.nan_to_num(1, 1, 1).clamp(-1e4, 1e4) for t in (x, y))
    compiled, want = torch.compile(chain, fullgraph=True), chain(x, y)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            results.append(compiled(x, y))
    torch.cuda.synchronize()
    for got in results:
        _same(got, want)


@pytest.mark.parametrize("fmt", TENSORS, ids=repr)
def test_one_scale_behind_a_norm_and_a_sum_that_is_kept(fmt: ixt.Format) -> None:
    """The sum is stored by programs that others wait for, and read by those."""

    def chain(x: Tensor, r: Tensor) -> list[Tensor]:
        h = x + r
        mean = h.float().mean(-1, keepdim=True)
        return [h, mean, *ixt.quantize((h.float() - mean).bfloat16(), fmt)[:2]]

    # Small integers: their mean does not depend on an order.
    x, r = (torch.randint(-8, 9, (5000, 4096), device="cuda").bfloat16() for _ in range(2))
    compiled, want = torch.compile(chain, fullgraph=True, mode="reduce-overhead"), chain(x, r)
    for _ in range(5):
        for a, b in zip(compiled(x, r), want, strict=True):
            assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def test_one_scale_for_any_number_of_rows() -> None:
    def chain(x: Tensor) -> Any:
        return ixt.quantize(-x, TENSORS[0])

    compiled = torch.compile(chain, fullgraph=True, dynamic=True)
    for rows in (300, 40, 2, 3000, 0):
        x = cpu.values(rows, 384).cuda().nan_to_num(1, 1, 1)
        torch._dynamo.mark_static(x, 1)
        _same(compiled(x), chain(x))
