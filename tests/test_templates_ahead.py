"""Both orientations, and squares, behind a norm: statistics and tiles in one kernel.

As test_templates.py, in Triton's interpreter; test_templates_gpu.py runs them on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from test_templates import BLOCK, GEMM, MX, NORMS, generate, plain_tensors, used
from torch import Tensor

import inductor_ext as ixt

SQUARE = ixt.FP8(granularity="square")
SQUARE_GEMM = ixt.FP8(granularity="square", dtype=torch.float8_e5m2, pow2=True, layout="gemm")


@pytest.fixture(autouse=True)
def templates() -> Iterator[None]:
    with ixt.config.patch(enabled=True, templates=True, strict=True):
        yield


AHEAD = [
    *((norm, MX, "both", (256, 512)) for norm in NORMS),
    # rows that are no whole tile, and swizzled scales beyond them
    ("residual, rms_norm", GEMM, "both", (2, 160, 640)),
    ("layer_norm", BLOCK, "both", (2, 128, 384)),
    ("rms_norm", MX, "column", (3, 96, 192)),
    ("residual, rms_norm", SQUARE, "row", (2, 128, 384)),
    ("rms_norm", SQUARE, "both", (256, 384)),
    ("rms_norm", SQUARE, "column", (128, 256)),
    ("rms_norm", SQUARE_GEMM, "row", (128, 512)),
    ("layer_norm", SQUARE_GEMM, "both", (2, 256, 512)),
]


@pytest.mark.parametrize(("norm", "fmt", "way", "shape"), AHEAD, ids=lambda value: str(value)[:18])
def test_norm_in_both_orientations(
    norm: str, fmt: ixt.Format, way: str, shape: tuple[int, ...]
) -> None:
    """One kernel reduces rows and does the tiles, one fills a buffer before; eager's codes.

    The interpreter runs programs in their order: a tile whose statistic is computed by a later
    program reads -1, a NaN, and its codes are not eager's.
    """

    def chain(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return ixt.quantize(NORMS[norm](x, r, w), fmt, orientation=way)  # type: ignore[call-overload]

    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    w = torch.randn(shape[-1], generator=generator).bfloat16()
    graph = generate(chain, x, r, w)
    assert sorted("_tem_" in name for name in graph.kernels) == [False, True]
    assert not graph.externs
    want = plain_tensors(chain(x, r, w))
    for got, expected in zip(
        interpreter.run(graph.source, *used(graph, x, r, w)), want, strict=True
    ):
        assert got.shape == expected.shape
        assert got.stride() == expected.stride()
        a, b = (t.contiguous().view(-1).view(torch.uint8).int() for t in (got, expected))
        assert float((a != b).float().mean()) < 2e-3  # the order of a row's sum
        assert expected.dtype == torch.float32 or int((a - b).abs().max()) <= 8


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(128, 192), (3, 28, 640)], ids=str)
def test_norm_to_a_given_scale_in_both_orientations(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Codes and their transpose; where the amax is asked for too, the plain lowering has it."""
    fmt = ixt.FP8(granularity="tensor", dtype=dtype)

    def chain(x: Tensor, w: Tensor, scale: Tensor) -> list[Tensor]:
        q = ixt.quantize(F.rms_norm(x, w.shape, w), fmt, scale, orientation="both")
        return [q.row.codes, q.column.codes]

    def with_amax(x: Tensor, w: Tensor, scale: Tensor) -> list[Tensor]:
        q = ixt.quantize(F.rms_norm(x, w.shape, w), fmt, scale, orientation="both")
        return [*q.row, q.column.codes]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).bfloat16()
    w = torch.randn(shape[-1], generator=generator).bfloat16()
    scale = torch.tensor(20.0)
    graph = generate(chain, x, w, scale)
    assert sum("_tem_" in name for name in graph.kernels) == 1
    template = next(name for name in graph.kernels if "_tem_" in name)
    got, got_t = interpreter.run(graph.source, x, w, scale)
    want, want_t = chain(x, w, scale)
    assert torch.equal(got_t.view(torch.uint8), got.flatten(0, -2).view(torch.uint8).t())
    for a, b in ((got, want), (got_t, want_t)):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert float((a.view(torch.uint8) != b.view(torch.uint8)).float().mean()) < 2e-3
    assert "STATISTICS" in graph.kernels[template].source
    assert not any("_tem_" in name for name in generate(with_amax, x, w, scale).kernels)


CODES_ALONG_K = [
    ("rms_norm", BLOCK, 8192, True),
    ("rms_norm", BLOCK, 12288, False),
    ("rms_norm", MX, 1024, False),
    ("residual, rms_norm", MX, 1024, True),
    ("residual, rms_norm", MX, 14336, False),
]


@pytest.mark.parametrize(("norm", "fmt", "columns", "of_rows"), CODES_ALONG_K, ids=str)
def test_who_makes_the_codes_along_k(
    norm: str, fmt: ixt.Format, columns: int, of_rows: bool
) -> None:
    """The rows that statistics are taken of, or the tiles, as was measured."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> list[Tensor]:
        q = ixt.quantize(NORMS[norm](x, r, w), fmt, orientation="both")  # type: ignore[call-overload]
        return plain_tensors(q)

    x, w = torch.randn(256, columns).bfloat16(), torch.randn(columns).bfloat16()
    graph = generate(chain, x, x.clone(), w)
    (source,) = (kernel.source for name, kernel in graph.kernels.items() if "_tem_" in name)
    assert ("arg_SCALES," in source, "arg_SCALES_K," in source) == (of_rows, not of_rows)


def test_a_sum_kept_by_the_statistics_of_tiles() -> None:
    """The residual sum is stored on the way, and so is a statistic that others need."""

    def chain(x: Tensor, r: Tensor, w: Tensor) -> list[Tensor]:
        h = x + r
        scale = torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        q = ixt.quantize((h * scale).bfloat16() * w, MX, orientation="both")
        return [h, scale, *plain_tensors(q)]

    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(2, 96, 384, generator=generator).bfloat16() for _ in range(2))
    w = torch.randn(384, generator=generator).bfloat16()
    graph = generate(chain, x, r, w)
    assert sum("_tem_" in name for name in graph.kernels) == 1
    assert len(graph.kernels) == 2
    results = interpreter.run(graph.source, x, r, w)
    want = chain(x, r, w)
    assert torch.equal(results[0], want[0])
    torch.testing.assert_close(results[1], want[1], rtol=1e-6, atol=0)
    for got, expected in zip(results[2:], want[2:], strict=True):
        a, b = (t.contiguous().view(-1).view(torch.uint8).int() for t in (got, expected))
        assert float((a != b).float().mean()) < 2e-3
