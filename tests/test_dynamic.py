"""Dynamic shapes: right numbers for every batch size, and no compilation of our own making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, config, registry
from inductor_ext.decompositions import fp8 as reference
from inductor_ext.testing import running

pytestmark = pytest.mark.contract
SIZES = (2, 3, 17, 1, 0)
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def row(x: Tensor) -> Tensor:
    q = ixt.quantize(x * 2, ixt.FP8(granularity="row"))
    return ixt.dequantize(q, ixt.FP8(), torch.float32)


def tensor(x: Tensor) -> Tensor:
    q = ixt.quantize(x * 2, ixt.FP8(granularity="tensor"))
    return ixt.dequantize(q, ixt.FP8(), torch.float32)


def static(x: Tensor) -> Tensor:
    scale = x.new_full((x.shape[0], 1), 3.0)
    q = ixt.quantize(x * 2, ixt.FP8(granularity="row"), scale=scale)
    assert q.amax is not None
    return ixt.dequantize(q, ixt.FP8(), torch.float32) + q.amax


def plain_row(x: Tensor) -> Tensor:
    """The same as ``row`` in plain PyTorch: how often does that compile?"""
    codes, scale_inv = reference.quantize_fp8_row(x * 2, E4M3)
    return reference.dequantize_fp8(codes, scale_inv, torch.float32)


def plain_tensor(x: Tensor) -> Tensor:
    codes, scale_inv = reference.quantize_fp8_tensor(x * 2, E4M3)
    return reference.dequantize_fp8(codes, scale_inv, torch.float32)


def plain_static(x: Tensor) -> Tensor:
    scale = x.new_full((x.shape[0], 1), 3.0)
    codes, scale_inv, amax = reference.quantize_fp8_static(x * 2, scale, E4M3)
    return reference.dequantize_fp8(codes, scale_inv, torch.float32) + amax


PAIRS = {
    "row": (row, plain_row),
    "tensor": (tensor, plain_tensor),
    "static": (static, plain_static),
}


def compilations(fn: Callable[..., Any], expected: Callable[..., Any], **options: Any) -> list[int]:
    """Run all sizes and return how many graphs had been compiled after each."""
    run = running.compiled(running.own_code(fn, fn.__name__), dynamic=True)
    start, counts = running.graphs(), []
    for size in SIZES:
        x = torch.randn(size, 48, generator=torch.Generator().manual_seed(size))
        if options.get("unbacked"):
            torch._dynamo.decorators.mark_unbacked(x, 0)
        result = run(x)
        assert result.shape == x.shape
        assert torch.equal(result, expected(x)), f"batch {size}"
        counts.append(running.graphs() - start)
    return counts


@pytest.mark.parametrize("kind", PAIRS)
def test_batch_sizes(kind: str) -> None:
    """One graph for all sizes from 2 on; 0 and 1 are PyTorch's own specialisations, not ours."""
    fused, plain = PAIRS[kind]
    registry.clear_records()
    with config.patch(enabled=True, strict=True):
        ours = compilations(fused, fused)
    theirs = compilations(plain, plain)
    assert ours[:3] == [1, 1, 1]
    assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert {record.outcome for record in registry.records()} == {"lowered"}


@pytest.mark.parametrize("kind", PAIRS)
def test_oblivious_to_zero_and_one(kind: str) -> None:
    fused, _ = PAIRS[kind]
    with config.patch(enabled=True, strict=True), running.no_size_is_special():
        assert compilations(fused, fused)[-1] <= 2


def test_unbacked_sizes() -> None:
    """A batch that the compiler may assume nothing of: one graph for every size."""
    with config.patch(enabled=True, strict=True):
        assert compilations(row, row, unbacked=True)[-1] <= 2


# --- export ----------------------------------------------------------------------------------


class Chain(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return row(x)


@pytest.mark.parametrize("enabled", [False, True])
def test_export_keeps_the_ops(enabled: bool) -> None:
    x = torch.randn(4, 48)
    batch = torch.export.Dim("batch", min=2)
    with config.patch(enabled=enabled):
        program = torch.export.export(Chain(), (x,), dynamic_shapes={"x": {0: batch}})
        lowered = program.run_decompositions()
    for exported in (program, lowered):
        targets = [node.target for node in exported.graph.nodes]
        assert torch.ops.inductor_ext.quantize_fp8_row.default in targets
        assert torch.ops.inductor_ext.dequantize_fp8.default in targets
        for size in (4, 7):
            y = torch.randn(size, 48)
            assert torch.equal(exported.module()(y), row(y))


def test_export_can_decompose_to_the_reference() -> None:
    x = torch.randn(4, 48)
    table = torch.export.default_decompositions()
    table[torch.ops.inductor_ext.quantize_fp8_row.default] = reference.quantize_fp8_row
    program = torch.export.export(Chain(), (x,)).run_decompositions(table)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.inductor_ext.quantize_fp8_row.default not in targets
    assert torch.ops.inductor_ext.dequantize_fp8.default in targets
    assert torch.equal(program.module()(x), row(x))


@pytest.mark.parametrize("rows", [0, 1, 1000, 65535 * 16, 65535 * 16 + 1])
def test_a_grid_of_planes(rows: int) -> None:
    """No rows are no blocks: torch 2.11 and 2.12 divide by them; else the grid is PyTorch's."""
    with config.patch(enabled=True):
        grid = _compat.Grid2DWithYZOverflow({})
        grid.generate({"XBLOCK": 32, "YBLOCK": 16})
        x, y, z = grid.eval_slow({"xnumel": 100, "ynumel": rows})
    blocks = -(-rows // 16)
    assert (x, z) == (4, -(-blocks // 65535))
    assert y == (-(-blocks // z) if z else 0)
