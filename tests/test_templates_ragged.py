"""Tiles of matrices whose rows are no whole number of tiles, of groups, of words, or unknown.

As test_templates.py, in Triton's interpreter; test_templates_gpu.py runs them on a card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from test_templates import BLOCK, BLOCK_GEMM, GEMM, MX, generate, plain_tensors, product, values
from test_templates_ahead import SQUARE
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu


@pytest.fixture(autouse=True)
def templates() -> Iterator[None]:
    # A format's numbers are no sizes, which Dynamo would make them.
    with (
        ixt.config.patch(enabled=True, templates=True, strict=True),
        torch._dynamo.config.patch(specialize_int=True),
    ):
        yield


def require_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def known(x: Tensor, columns: int) -> None:
    """Tell the compiler the number of columns (pytest rewrites what `assert` says)."""
    if x.shape[-1] != columns:
        raise ValueError(columns)


RAGGED = [
    (MX, "both", (100, 192)),  # words, a ragged group
    (GEMM, "both", (3, 47, 256)),  # padding beyond the last row
    (BLOCK, "both", (2, 65, 128)),  # bytes
    (BLOCK_GEMM, "column", (39, 128)),
]


@pytest.mark.parametrize(("fmt", "way", "shape"), RAGGED)
def test_ragged_rows(fmt: ixt.Format, way: str, shape: tuple[int, ...]) -> None:
    """One kernel; a ragged group has the scale of its real elements, and padding is zero."""

    def chain(x: Tensor, y: Tensor) -> Any:
        return ixt.quantize(product(x, y), fmt, orientation=way)  # type: ignore[call-overload]

    x, y = values(*shape), values(*shape, seed=1)
    graph = generate(chain, x, y)
    assert len(graph.kernels) == 1
    assert not graph.externs
    require_same(interpreter.run(graph.source, x, y), plain_tensors(chain(x, y)))


@pytest.mark.parametrize(
    ("fmt", "way"),
    [(MX, "both"), (GEMM, "both"), (BLOCK_GEMM, "column")],
    ids=["MX", "MX gemm", "block gemm"],
)
def test_one_tile_kernel_for_every_batch(fmt: ixt.Format, way: str) -> None:
    """Compiled for one number of rows, right for others: whole tiles, words, bytes, one row."""

    def chain(x: Tensor, y: Tensor) -> Any:
        known(x, 128)
        return ixt.quantize(product(x, y), fmt, orientation=way)  # type: ignore[call-overload]

    torch.compiler.reset()
    given = values(2, 70, 128), values(2, 70, 128, seed=1)
    (graph,) = fake_gpu.capture(chain, given, "sm_90", dynamic=True)
    (kernel,) = graph.kernels.values()
    assert "_tem_" in kernel.name
    assert re.search(r"M = .*ks\d", kernel.source)
    sizes = [(2, 64), (2, 70), (3, 51), (1, 1)]
    inputs = [(values(*size, 128), values(*size, 128, seed=1)) for size in sizes]
    given = [(*size, *both) for size, both in zip(sizes, inputs, strict=True)]
    for results, both in zip(interpreter.run_each(graph.source, given), inputs, strict=True):
        require_same(results, plain_tensors(chain(*both)))


@pytest.mark.parametrize("fmt", [MX, SQUARE], ids=["MX", "squares"])
def test_a_norm_of_any_batch(fmt: ixt.Format) -> None:
    """Statistics ahead of tiles, any number of rows; codes move where the order of a sum does."""

    def chain(x: Tensor, w: Tensor) -> Any:
        known(x, 256)
        return ixt.quantize(F.rms_norm(x, w.shape, w), fmt, orientation="both")

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(270, 256, generator=generator).bfloat16()
    w = torch.randn(256, generator=generator).bfloat16()
    torch.compiler.reset()
    (graph,) = fake_gpu.capture(chain, (x, w), "sm_90", dynamic=True)
    assert sorted("_tem_" in name for name in graph.kernels) == [False, True]
    given = [(rows, x[:rows].clone(), w) for rows in (270, 64, 3)]
    for got, (_, *inputs) in zip(interpreter.run_each(graph.source, given), given, strict=True):
        want = plain_tensors(chain(*inputs))
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.stride()) == (b.shape, b.stride())
            if a.dtype == torch.float32:
                torch.testing.assert_close(a, b, rtol=1e-2, atol=0)
            else:
                first, second = (t.contiguous().view(torch.uint8).int() for t in (a, b))
                assert float((first != second).float().mean()) < 2e-3


def test_a_given_scale_behind_a_norm_of_any_batch() -> None:
    fmt = ixt.FP8(granularity="tensor")

    def chain(x: Tensor, w: Tensor, scale: Tensor) -> list[Tensor]:
        known(x, 128)
        q = ixt.quantize(F.rms_norm(x, w.shape, w), fmt, scale, orientation="both")
        return [q.row.codes, q.column.codes]

    torch.compiler.reset()
    x, w, scale = torch.randn(70, 128).bfloat16(), torch.randn(128).bfloat16(), torch.tensor(20.0)
    (graph,) = fake_gpu.capture(chain, (x, w, scale), "sm_90", dynamic=True)
    assert sum("_tem_" in name for name in graph.kernels) == 1
    given = [(rows, x[:rows].clone(), w, scale) for rows in (70, 68)]
    for results, (_, *inputs) in zip(interpreter.run_each(graph.source, given), given, strict=True):
        got, got_t = results
        want, want_t = chain(*inputs)
        assert (got_t.shape, got_t.stride()) == (want_t.shape, want_t.stride())
        assert torch.equal(got_t.view(torch.uint8), got.view(torch.uint8).t())
        assert float((got.view(torch.uint8) != want.view(torch.uint8)).float().mean()) < 2e-3


def test_ragged_columns_keep_the_plain_lowering() -> None:
    x = torch.randn(256, 200).bfloat16()
    graph = generate(lambda x: ixt.quantize(torch.relu(x), MX, orientation="column"), x)
    assert not any("_tem_" in name for name in graph.kernels)
