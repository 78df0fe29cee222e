"""An op with nothing to fuse with calls its own kernel; one with a neighbour is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt
from inductor_ext.kernels import load

pytestmark = pytest.mark.skipif(load().cuda is None, reason="needs the CUDA library")
ROW, TENSOR = ixt.FP8(granularity="row"), ixt.FP8(granularity="tensor")


@pytest.fixture(autouse=True)
def users_default() -> Iterator[None]:
    with ixt.config.patch(enabled=True, always_lower=False):
        yield


def outcomes(fn: Callable[..., Any], *args: Tensor) -> list[str]:
    report = ixt.explain(fn, *args, target="sm_90", print=False)
    return [op.outcome for op in report.ops]


def codes_to_gemm(x: Tensor, w: Tensor) -> Tensor:
    a, b = ixt.quantize(x, TENSOR), ixt.quantize(w, TENSOR)
    return ixt.scaled_mm(a.codes, b.codes.t(), a.scale_inv, b.scale_inv)


CASES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "alone": (lambda x, w: ixt.quantize(x, ROW)[:2], ["kernel"]),
    "a view of an input": (lambda x, w: ixt.quantize(x[:, :64].t(), ROW)[:2], ["kernel"]),
    "after an opaque op": (lambda x, w: ixt.quantize(x @ w.t(), ROW)[:2], ["kernel"]),
    "before an opaque op": (codes_to_gemm, ["kernel", "kernel", "opaque"]),
    "a producer": (lambda x, w: ixt.quantize(F.silu(x), ROW)[:2], ["lowered"]),
    "a consumer of codes": (
        lambda x, w: ixt.dequantize(ixt.quantize(x, ROW), ROW), ["lowered", "lowered"]
    ),
    "a consumer of the scale": (lambda x, w: ixt.quantize(x, ROW).scale_inv * 2, ["lowered"]),
    "a consumer behind a view": (
        lambda x, w: ixt.quantize(x, ROW).codes.view(-1).float() + 1, ["lowered"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_choice(case: str) -> None:
    function, expected = CASES[case]
    x, w = (torch.randn(n, 128, dtype=torch.bfloat16) for n in (64, 32))
    assert outcomes(function, x, w) == expected


def test_always_lower() -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    with ixt.config.patch(always_lower=True):
        assert outcomes(lambda x: ixt.quantize(x, ROW)[:2], x) == ["lowered"]


@pytest.mark.parametrize(("fmt", "outcome"), [(ROW, "lowered"), (ixt.MXFP8(), "kernel")], ids=repr)
def test_on_the_cpu(fmt: ixt.Format, outcome: str) -> None:
    """The loops of rows are as fast when they are generated; those of blocks are not."""
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    report = ixt.explain(lambda x: ixt.quantize(x, fmt)[:2], x, print=False)
    assert [op.outcome for op in report.ops] == [outcome]
