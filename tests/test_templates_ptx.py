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


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_ptxas_takes_it(fmt: ixt.Format) -> None:
    blocks = isinstance(fmt, ixt.MXFP8) or fmt.granularity == "block"  # type: ignore[attr-defined]
    way = "both" if blocks else "row"

    def chain(x: Tensor) -> Any:
        result = ixt.quantize(torch.nn.functional.silu(x), fmt, orientation=way)  # type: ignore[call-overload]
        return (*result.row[:2], *result.column[:2]) if blocks else result[:2]

    with ixt.config.patch(enabled=True, templates=True, strict=True):
        x = torch.randn(256, 512).bfloat16()
        (graph,) = fake_gpu.capture(chain, (x,), "sm_90", asm=True)
    (kernel,) = graph.kernels.values()
    assert "_tem_" in kernel.name
    assert all(compiled["cubin"] for compiled in kernel.asm)
