"""Two orientations in one graph become one op; one that nobody uses disappears."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry

X = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
BLOCKS: tuple[ixt.Format, ...] = (
    ixt.FP8(granularity="block", block=64, layout="gemm"),
    ixt.FP8(granularity="square", block=32, eps=1e-4, pow2=True),
    ixt.MXFP8(mode="floor"),
    ixt.MXFP8(square=True),
    ixt.NVFP4(),
    ixt.NVFP4(square=True),
)
NAMES = {ixt.FP8: "quantize_fp8_block", ixt.MXFP8: "quantize_mxfp8", ixt.NVFP4: "quantize_nvfp4"}
each = pytest.mark.parametrize("fmt", BLOCKS, ids=repr)


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    torch.compiler.reset()
    registry.clear_records()
    with ixt.config.patch(enabled=True), torch.compiler.config.patch(force_disable_caches=True):
        yield


def lowered(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, list[str]]:
    """Compile and run; return the result and the quantizations that were lowered."""
    result = torch.compile(fn, fullgraph=True)(*args)
    names = [r.op.partition("::")[2] for r in registry.records()]
    return result, [name for name in names if name.startswith("quantize_")]


def require_same(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride()
            same = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
            assert torch.equal(*same)


@each
def test_a_pair_becomes_one_op(fmt: ixt.Format) -> None:
    def both(x: Tensor) -> ixt.BothWays:
        return ixt.quantize(F.relu(x), fmt, orientation="both")

    got, ops = lowered(both, X)
    assert ops == [NAMES[type(fmt)] + "_both"]
    want = both(X)
    require_same(got.row, want.row)
    require_same(got.column, want.column)


@each
@pytest.mark.parametrize("half", ["row", "column"])
def test_an_unused_half_disappears(fmt: ixt.Format, half: str) -> None:
    def one(x: Tensor) -> ixt.Quantized:
        q: ixt.Quantized = getattr(ixt.quantize(F.relu(x), fmt, orientation="both"), half)
        return q

    got, ops = lowered(one, X)
    assert ops == [NAMES[type(fmt)]]
    require_same(got, one(X))


def test_the_user_may_write_the_halves() -> None:
    def halves(x: Tensor) -> tuple[Any, ...]:
        y = x * 2
        column = ixt.quantize(y, ixt.MXFP8(), orientation="column", transposed=False)
        row = ixt.quantize(y, ixt.MXFP8())
        return *column, *row

    got, ops = lowered(halves, X)
    assert ops == ["quantize_mxfp8_both"]
    require_same(got, halves(X))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ixt.quantize(x + 1, ixt.MXFP8(), orientation="column"),
        lambda x: ixt.quantize(x, ixt.MXFP8(mode="floor"), orientation="column"),
        lambda x: ixt.quantize(x, ixt.MXFP8(layout="gemm"), orientation="column"),
        lambda x: ixt.quantize(x, ixt.MXFP8(square=True), orientation="column"),
        lambda x: ixt.quantize(x, ixt.FP8(granularity="block", block=32), orientation="column"),
    ],
    ids=["another tensor", "another mode", "another layout", "another block", "another format"],
)
def test_what_is_no_pair_stays_two(other: Callable[[Tensor], ixt.Quantized]) -> None:
    def two(x: Tensor) -> tuple[Any, ...]:
        y = F.relu(x)
        return *ixt.quantize(y, ixt.MXFP8()), *other(y)

    got, ops = lowered(two, X)
    assert len(ops) == 2
    assert not any(name.endswith("_both") for name in ops)
    require_same(got, two(X))


def test_a_disabled_op_is_not_made() -> None:
    with ixt.config.patch(disabled_ops={"inductor_ext::quantize_mxfp8_both"}):
        _, ops = lowered(lambda x: ixt.quantize(F.relu(x), ixt.MXFP8(), orientation="both"), X)
    assert ops == ["quantize_mxfp8", "quantize_mxfp8"]
