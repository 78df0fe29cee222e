"""Every formula of the templates is PTX that ptxas takes; Triton's interpreter runs none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMATS: list[ixt.Format] = [
    *(ixt.MXFP8(dtype=dtype, mode=mode) for dtype in CODES for mode in ("ceil", "floor")),
    *(
        ixt.FP8(dtype=dtype, granularity="block", pow2=pow2, eps=eps)
        for dtype, pow2, eps in zip(CODES, (True, False), (0.0, 1e-3), strict=True)
    ),
    *(
        ixt.FP8(dtype=dtype, granularity="row", pow2=pow2)
        for dtype, pow2 in zip(CODES, (True, False), strict=True)
    ),
    ixt.INT8(granularity="row"),
]


# Usual tiles, and the finer ones of a small matrix, whose rows are ragged.
SHAPES = [(fmt, (4096, 512)) for fmt in FORMATS]
SHAPES += [(fmt, (301, 512)) for fmt in (FORMATS[0], FORMATS[4])]


@pytest.mark.parametrize(("fmt", "shape"), SHAPES, ids=repr)
def test_ptxas_takes_it(fmt: ixt.Format, shape: tuple[int, int]) -> None:
    blocks = isinstance(fmt, ixt.MXFP8) or fmt.granularity == "block"  # type: ignore[attr-defined]
    way = "both" if blocks else "row"

    def chain(x: Tensor) -> Any:
        result = ixt.quantize(torch.nn.functional.silu(x), fmt, orientation=way)  # type: ignore[call-overload]
        return (*result.row[:2], *result.column[:2]) if blocks else result[:2]

    with ixt.config.patch(enabled=True, templates=True, strict=True):
        x = torch.randn(shape).bfloat16()
        (graph,) = fake_gpu.capture(chain, (x,), "sm_90", asm=True)
    (kernel,) = graph.kernels.values()
    assert "_tem_" in kernel.name
    assert all(compiled["cubin"] for compiled in kernel.asm)


NORMS = [
    *((fmt, "both") for fmt in FORMATS[:6]),
    (ixt.FP8(granularity="square"), "row"),
    (ixt.FP8(granularity="square", dtype=torch.float8_e5m2, pow2=True, layout="gemm"), "both"),
    *((ixt.FP8(granularity="tensor", dtype=dtype), "both") for dtype in CODES),
]


@pytest.mark.parametrize(("fmt", "way"), NORMS, ids=repr)
def test_ptxas_takes_it_behind_a_norm(fmt: ixt.Format, way: str) -> None:
    """The texts that reduce rows ahead of tiles; with one scale a tensor it is given."""
    given = [torch.tensor(20.0)] if getattr(fmt, "granularity", "") == "tensor" else []

    def chain(x: Tensor, w: Tensor, *scale: Tensor) -> list[Tensor]:
        y = torch.nn.functional.rms_norm(x, w.shape, w)
        q = ixt.quantize(y, fmt, *scale, orientation=way)  # type: ignore[call-overload]
        return [t for part in ((q.row, q.column) if way == "both" else (q,)) for t in part[:2]]

    with ixt.config.patch(enabled=True, templates=True, strict=True):
        arguments = (torch.randn(4096, 512).bfloat16(), torch.randn(512).bfloat16(), *given)
        (graph,) = fake_gpu.capture(chain, arguments, "sm_90", asm=True)
    (kernel,) = (kernel for kernel in graph.kernels.values() if "_tem_" in kernel.name)
    assert "STATISTICS" in kernel.source
    assert all(compiled["cubin"] for compiled in kernel.asm)
