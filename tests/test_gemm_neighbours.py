"""What stands around matrix products in code for sm_90: no copy, and one kernel behind each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_formats import PAIRS, Linear, called, copies
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu, kernels
from inductor_ext.bench import llama_layer as llama

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
M, N, K = 1024, 768, 512


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's defaults, with a CUDA library: an op that stands alone calls its kernel."""
    monkeypatch.setattr(kernels, "load", lambda: SimpleNamespace(cpu=None, cuda=object()))
    with ixt.config.patch(enabled=True, always_lower=False, strict=True):
        yield


def generate(fn: Any, *arguments: Any) -> list[fake_gpu.GeneratedGraph]:
    torch.compiler.reset()
    return list(fake_gpu.capture(fn, arguments, "sm_90"))


def operands(name: str) -> tuple[ixt.Quantized, ixt.Quantized]:
    return (
        ixt.quantize(torch.randn(M, K).bfloat16(), PAIRS[name].a),
        ixt.quantize(torch.randn(N, K).bfloat16(), PAIRS[name].b),
    )


# Besides the product.  A given scale's reciprocal is a kernel of one element, which depends on
# nothing else; NVFP4's plain lowering writes its scales and then lays them out: no template yet.
BEHIND = dict.fromkeys(PAIRS, 1) | {"tensor": 2, "nvfp4": 2}


@pytest.mark.parametrize("name", PAIRS)
def test_bias_gelu_quantize(name: str) -> None:
    pair = PAIRS[name]
    x, w = operands(name)
    bias, given = torch.randn(N).bfloat16(), torch.tensor(3.5)

    def layer(x: ixt.Quantized, w: ixt.Quantized, bias: Tensor, given: Tensor) -> Any:
        y = F.gelu(ixt.scaled_mm(x, w, pair.a, pair.b, bias=bias))
        amax = {"amax": given} if isinstance(pair.a, ixt.NVFP4) else {}
        return ixt.quantize(y, pair.a, *pair.scale(given), **amax)[:2]

    (graph,) = generate(layer, x, w, bias, given)
    assert len(graph.externs) == 1
    assert graph.externs[0].startswith("torch.ops.inductor_ext.scaled_mm")
    assert graph.externs[0].endswith(".out")
    assert len(graph.kernels) == BEHIND[name], list(graph.kernels)
    assert len(copies(graph)) == (name == "nvfp4")


@pytest.mark.parametrize("name", ["tensor", "block", "nvfp4", "int8"])
def test_residual(name: str) -> None:
    pair = PAIRS[name]
    x, w = operands(name)

    def layer(x: ixt.Quantized, w: ixt.Quantized, residual: Tensor) -> Tensor:
        return residual + ixt.scaled_mm(x, w, pair.a, pair.b)

    (graph,) = generate(layer, x, w, torch.randn(M, N).bfloat16())
    assert (len(graph.externs), len(graph.kernels)) == (1, 1)


def test_an_unquantized_product() -> None:
    """PyTorch's own product keeps its bias; what quantizes its result is one kernel."""

    def layer(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        return ixt.quantize(F.gelu(F.linear(x, w, bias)), PAIRS["row"].a)[:2]

    (graph,) = generate(layer, *(torch.randn(s).bfloat16() for s in ((M, K), (N, K), (N,))))
    assert (list(graph.externs), len(graph.kernels)) == (["extern_kernels.addmm"], 1)


def test_a_copy_is_seen() -> None:
    """The counts below can fail: a transposed operand is a kernel that only moves."""
    row = PAIRS["row"].a
    x, w = operands("row")

    def product(x: ixt.Quantized, w: ixt.Quantized) -> Tensor:
        codes = w.codes.view(torch.uint8).t().contiguous().view(w.codes.dtype)
        return ixt.scaled_mm(x, ixt.Quantized(codes, w.scale_inv), row)

    (graph,) = generate(product, x, ixt.Quantized(w.codes.view(K, N), w.scale_inv))
    assert len(copies(graph)) == 1


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The op that a card would take; without one PyTorch takes attention apart."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    result: Tensor = op(q, k, v, 0.0, True)[0]
    return result


class Layer(torch.nn.Module):
    """A layer of Llama 8B in training: weights quantized in every step, in both orientations."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, bf16 = name, torch.bfloat16
        for key, shape in llama.LLAMA_8B.projections.items():
            self.register_parameter(key, torch.nn.Parameter(torch.empty(shape, dtype=bf16)))
        for key in ("attention_norm", "mlp_norm"):
            self.register_parameter(key, torch.nn.Parameter(torch.empty(4096, dtype=bf16)))
        self.register_buffer("scale", torch.empty(()))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parameters = dict(self.named_parameters())

        def linear(x: Tensor, p: dict[str, Tensor], key: str) -> Tensor:
            y = Linear.apply(x.flatten(0, -2), p[key], self.scale, self.name)
            return y.view(*x.shape[:-1], -1)

        return llama.layer(x, cos, sin, parameters, llama.LLAMA_8B, linear)


PRODUCTS = {"forward": 4, "backward": 8}
# Kernels generated, and quantizations that stand alone (weights; the attention's result; the
# layer's gradient) and call their own kernel.
KERNELS = {
    "tensor": {"forward": (8, 5), "backward": (9, 6)},
    "row": {"forward": (6, 5), "backward": (14, 7)},
    "block": {"forward": (6, 5), "backward": (10, 6)},
}


@pytest.mark.parametrize("name", KERNELS)
def test_llama_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: products, attention, quantizations, and no copy around any of them."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    x = torch.empty(1, 8192, 4096, dtype=torch.bfloat16, requires_grad=True)
    rotary = llama.rotary(8192, llama.LLAMA_8B.head, torch.device("cpu"))
    graphs = generate(Layer(name), x, *rotary)
    assert [graph.kind for graph in graphs] == list(PRODUCTS)
    for graph in graphs:
        calls = called(graph)
        products = [call for call in calls if call.startswith("scaled_mm")]
        alone = [call for call in calls if call.startswith("quantize_")]
        attention = [call for call in calls if "attention" in call]
        assert len(products) == PRODUCTS[graph.kind]
        assert len(attention) == 1
        assert len(products + alone + attention) == len(calls), calls
        assert copies(graph) == []
        found = len(graph.kernels), len(alone)
        assert found == KERNELS[name][graph.kind], [*graph.kernels, *alone]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["row", "block, plain"])
def test_experts(name: str, dynamic: bool) -> None:
    """A mixture's gate and up, SiLU * mul and down: two grouped products, no copy, codes between;
    each says which kernel it calls."""
    pair = PAIRS[name]
    gate_up, down = (
        ixt.quantize(torch.randn(4, *shape).bfloat16(), pair.b)
        for shape in ((512, 256), (384, 256))
    )

    def mixture(x: Tensor, offsets: Tensor, gate_up: ixt.Quantized, down: ixt.Quantized) -> Tensor:
        assert (x.shape[1], *gate_up.codes.shape[1:]) == (256, 512, 256)  # tokens alone are unknown
        q = ixt.quantize(x, pair.a)
        gate, up = ixt.scaled_grouped_mm(q, gate_up, offsets, pair.a, pair.b).chunk(2, -1)
        q = ixt.quantize(F.silu(gate) * up, pair.a)
        return ixt.scaled_grouped_mm(q, down, offsets, pair.a, pair.b)

    x, offsets = torch.randn(600, 256).bfloat16(), torch.tensor([0, 5, 133, 600]).int()
    torch.compiler.reset()
    ixt.clear_records()
    with torch.no_grad():
        (graph,) = fake_gpu.capture(mixture, (x, offsets, gate_up, down), "sm_90", dynamic=dynamic)
    op = "scaled_grouped_mm" if name == "row" else "scaled_grouped_mm_fp8_block"
    assert called(graph) == [op, op]
    assert len(graph.kernels) == 2, list(graph.kernels)
    assert copies(graph) == []
    reasons = {r.reason.partition(":")[0] for r in ixt.records() if r.op == f"inductor_ext::{op}"}
    assert reasons == {"decided when it runs, by the sizes" if dynamic else "triton"}
