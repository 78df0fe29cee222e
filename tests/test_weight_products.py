"""What torch.compile makes of a product that the user wrote with dequantize, for a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import weights
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu, registry

BF16 = torch.bfloat16


def externs(name: str, m: int, *, bias: bool = False, linear: bool = True, **flags: str) -> str:
    """Return the code of ``F.linear(x, dequantize(w))`` for a card."""
    case = weights.case(name, m, 64, 256, BF16, bias=bias)

    def layer(x: Tensor, q: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        w = ixt.dequantize(q, case.format)
        return F.linear(x.view(1, m, 256), w, bias) if linear else x @ w.t()

    torch.compiler.reset()
    tensors = tuple(case.q)
    with ixt.config.patch(enabled=True, **flags):
        # padding of products would be decided by running them
        no_padding = {"shape_padding": False}
        args = (case.x, tensors, case.bias)
        (graph,) = fake_gpu.capture(layer, args, "sm_90", config=no_padding)
    return graph.source


@pytest.mark.parametrize(
    ("name", "m", "bias"),
    [
        ("int8 row", 1, False), ("int4 asymmetric 128", 16, True), ("fp8 128x128", 4, False),
        ("mxfp8", 3, True), ("nvfp4 row", 2, False),
    ],
)  # fmt: skip
def test_fast_numerics_take_one_kernel(name: str, m: int, bias: bool) -> None:
    source = externs(name, m, bias=bias, linear=m != 4, numerics="fast", weight_only="kernel")
    assert source.count("weight_only_mm_") >= 1
    assert "extern_kernels" not in source.partition("def call")[2]
    assert "dequantize_" not in source.partition("def call")[2]
    assert "triton_" not in source.partition("def call")[2]


def test_the_record_says_which_route() -> None:
    registry.clear_records()
    with torch.compiler.config.patch(force_disable_caches=True):
        externs("int8 row", 8, numerics="fast", weight_only="kernel")
    (record,) = [r for r in registry.records() if "weight_only_mm" in r.op]
    assert record.outcome == "opaque"
    assert record.reason == "kernel: pinned by config.weight_only"


@pytest.mark.parametrize(
    ("m", "flags"),
    [
        (4, {"numerics": "exact", "weight_only": "kernel"}),  # the weight is rounded to bf16
        (17, {"numerics": "fast"}),  # too many rows
        (17, {"numerics": "fast", "weight_only": "kernel"}),
    ],
    ids=["exact", "rows", "rows, pinned"],
)
def test_otherwise_it_stays_what_was_written(m: int, flags: dict[str, str]) -> None:
    source = externs("int8 row", m, **flags)
    assert "weight_only_mm_" not in source
    assert source.count("extern_kernels.mm") == 1
