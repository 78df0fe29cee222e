"""A whole Llama layer for sm_90: which kernels it becomes, to the letter, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu
from inductor_ext.bench import llama_layer as llama

SMALL = llama.Sizes(width=256, heads=4, key_heads=2, inner=512)


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The op that a card would take; without one PyTorch takes attention apart."""
    assert options == {"is_causal": True, "enable_gqa": True}
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    result: Tensor = op(q, k, v, 0.0, True)[0]
    return result


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    with ixt.config.patch(enabled=True):
        yield


def generate(sizes: llama.Sizes, tokens: int, dynamic: bool) -> fake_gpu.GeneratedGraph:
    p = llama.parameters(sizes, torch.device("cpu"))
    rotary = llama.rotary(tokens, sizes.head, torch.device("cpu"))

    def layer(x: Tensor, cos: Tensor, sin: Tensor, *values: Tensor) -> Tensor:
        return llama.layer(x, cos, sin, dict(zip(p, values, strict=True)), sizes)

    x = torch.randn(2, tokens, sizes.width).bfloat16()
    torch.compiler.reset()
    (graph,) = fake_gpu.capture(layer, (x, *rotary, *p.values()), "sm_90", dynamic=dynamic)
    return graph


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.usefixtures("on_a_card")
class TestKernels(TestCase):
    """Norm, residual + norm, SiLU * mul and attention's result: one kernel each, codes out."""

    def test_static(self) -> None:
        graph = generate(SMALL, 64, dynamic=False)
        assert [name.split(".")[-2] for name in graph.externs] == [
            "scaled_mm", "_scaled_dot_product_flash_attention", *["scaled_mm"] * 3,
        ]  # fmt: skip
        assert len(graph.kernels) == 7
        if _compat.torch_release() == "2.11":  # the names of another one's kernels differ
            self.assertExpectedInline(
                "\n".join(graph.kernels),
                """\
triton_tem_fused__to_copy_add_mean_mul_pow_quantize_fp8_row_rsqrt_0
triton_poi_fused__scaled_dot_product_flash_attention_add_cat_mul_neg_split_split_with_sizes_transpose_view_1
triton_poi_fused__scaled_dot_product_flash_attention_add_cat_mul_neg_split_split_with_sizes_transpose_view_2
triton_per_fused_quantize_fp8_row_transpose_view_3
triton_tem_fused__to_copy_add_mean_mul_pow_quantize_fp8_row_rsqrt_view_4
triton_tem_fused_mul_quantize_fp8_row_silu_split_view_5
triton_poi_fused_add_view_6""",
            )

    def test_dynamic(self) -> None:
        assert len(generate(SMALL, 64, dynamic=True).kernels) == 7


def unquantized(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    return x.float() @ (p[name].float() * p[f"{name}_scale"]).t()


def test_result() -> None:
    """Compiled or not, the layer is as far from one that does not quantize its activations."""
    torch.manual_seed(0)
    p = llama.parameters(SMALL, torch.device("cpu"))
    rotary = llama.rotary(32, SMALL.head, torch.device("cpu"))
    x = torch.randn(2, 32, SMALL.width).bfloat16()
    eager = llama.layer(x, *rotary, p, SMALL)
    torch.compiler.reset()
    with ixt.config.patch(enabled=True):
        compiled = torch.compile(llama.layer, fullgraph=True)(x, *rotary, p, SMALL)
    assert compiled.dtype == eager.dtype == torch.bfloat16
    exact = llama.layer(x.float(), *(t.float() for t in rotary), p, SMALL, unquantized)
    errors = [float((y - exact).norm() / exact.norm()) for y in (eager, compiled)]
    assert 5e-3 < errors[0] < 3e-2
    assert abs(errors[1] / errors[0] - 1) < 0.05
