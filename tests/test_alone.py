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
    return ixt.scaled_mm(a, b, TENSOR)


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
    x, w = (torch.randn(n, 128, dtype=torch.bfloat16) for n in (32768, 32))
    assert outcomes(function, x, w) == expected


def test_always_lower() -> None:
    x = torch.randn(8192, 128, dtype=torch.bfloat16)
    with ixt.config.patch(always_lower=True):
        assert outcomes(lambda x: ixt.quantize(x, ROW)[:2], x) == ["lowered"]


SMALL, LARGE = 64, 8192
BY_SIZE = [
    (ROW, "lowered", "kernel"),
    (ixt.FP8(granularity="block"), "lowered", "kernel"),
    (ixt.MXFP8(), "lowered", "kernel"),
    (ixt.INT8(granularity="row"), "lowered", "kernel"),
    (ixt.INT4(group=128), "lowered", "kernel"),
    (TENSOR, "kernel", "kernel"),
]


@pytest.mark.parametrize(("fmt", "small", "large"), BY_SIZE, ids=lambda value: str(value))
def test_small_tensors_take_generated_code(fmt: ixt.Format, small: str, large: str) -> None:
    for rows, outcome in ((SMALL, small), (LARGE, large)):
        x = torch.randn(rows, 128, dtype=torch.bfloat16)
        assert outcomes(lambda x: ixt.quantize(x, fmt)[:2], x) == [outcome]


BY_LAYOUT = [
    (ixt.MXFP8(), "row", "lowered"),
    (ixt.MXFP8(layout="gemm"), "row", "kernel"),
    (ixt.MXFP8(square=True, layout="gemm"), "row", "lowered"),
    (ixt.MXFP8(), "column", "kernel"),
]


@pytest.mark.parametrize(("fmt", "orientation", "outcome"), BY_LAYOUT, ids=str)
def test_dequantized_by_where_scales_lie(fmt: ixt.Format, orientation: Any, outcome: str) -> None:
    x = torch.randn(128, 256).bfloat16()
    across = orientation == "row"
    q = ixt.quantize(x, fmt, orientation=orientation, transposed=across)

    def back(codes: Tensor, scales: Tensor) -> Tensor:
        return ixt.dequantize((codes, scales), fmt, transposed=across)

    assert outcomes(back, q.codes, q.scale_inv) == [outcome]


def test_dynamic_sizes_count_as_they_are_expected() -> None:
    """And the choice serves every other size: it adds no guard."""

    def report(rows: int, always: bool = False) -> Any:
        x = torch.randn(rows, 128, dtype=torch.bfloat16)
        with ixt.config.patch(always_lower=always):
            return ixt.explain(
                lambda x: ixt.quantize(x, ROW)[:2], x, target="sm_90", dynamic=True, print=False
            )

    for rows, outcome in ((SMALL, "lowered"), (LARGE, "kernel")):
        found = report(rows)
        assert [op.outcome for op in found.ops] == [outcome]
        assert len(found.guards) <= len(report(rows, always=True).guards)


@pytest.mark.parametrize("orientation", ["row", "both"])
def test_the_static_kernel_is_called_for_its_amax(orientation: Any) -> None:
    def codes(x: Tensor, scale: Tensor) -> Any:
        result = ixt.quantize(x, TENSOR, scale, orientation=orientation)
        return [t.codes for t in ((result,) if orientation == "row" else result)]

    def with_amax(x: Tensor, scale: Tensor) -> Any:
        result = ixt.quantize(x, TENSOR, scale, orientation=orientation)
        return [(t.codes, t.amax) for t in ((result,) if orientation == "row" else result)]

    x, scale = torch.randn(SMALL, 128, dtype=torch.bfloat16), torch.tensor(3.0)
    assert outcomes(codes, x, scale) == ["lowered"]
    assert outcomes(with_amax, x, scale) == ["kernel"]


def test_on_the_cpu() -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    for fmt in (ROW, ixt.MXFP8()):
        report = ixt.explain(lambda x: ixt.quantize(x, fmt)[:2], x, print=False)  # noqa: B023
        assert [op.outcome for op in report.ops] == ["kernel"]
