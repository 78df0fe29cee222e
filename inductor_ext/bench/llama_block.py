"""Four Llama-like layers of plain bf16 weights, as ``bench llama`` runs them, and its recipes.

Width 4096, 32 heads (of queries as of keys), 14336 inside, no rotary embedding, batch 1: the block
whose times in other libraries are known.  A recipe says how activations and weights are quantized;
the weights in every step, or once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt

from .chain_cases import plain_row, plain_static, plain_tensor
from .llama_layer import Attend, Linear, Sizes, layer, sdpa

SIZES, LAYERS = Sizes(4096, 32, 32, 14336), 4
SMALL = Sizes(128, 2, 2, 256)
"""For a CPU."""


@dataclass(frozen=True)
class Recipe:
    """How a linear layer's two operands are quantized, and the same in plain PyTorch.

    ``given`` scales come from earlier steps (delayed scaling) instead of from the operand.
    """

    activations: ixt.FP8
    weights: ixt.FP8
    plain: Callable[..., Any] | None = None
    given: bool = False

    @property
    def fast_accum(self) -> bool:
        """Whether the product may be accumulated in fewer bits, as is usual for inference."""
        return self.activations.granularity != "block"

    def quantize_weight(self, p: dict[str, Any], name: str) -> ixt.Quantized:
        """Return the named weight (N, K) in FP8."""
        scale = p[f"{name}_w_scale"] if self.given else None
        return ixt.quantize(p[name], self.weights, scale)


TENSOR, ROW = ixt.FP8(granularity="tensor"), ixt.FP8(granularity="row")
RECIPES = {
    "tensor": Recipe(TENSOR, TENSOR, plain_tensor),
    "static": Recipe(TENSOR, TENSOR, plain_static, given=True),
    "row": Recipe(ROW, ROW, plain_row),
    "block": Recipe(
        ixt.FP8(granularity="block", layout="gemm"), ixt.FP8(granularity="square", layout="gemm")
    ),
}


def parameters(
    sizes: Sizes, layers: int, device: torch.device, recipe: Recipe | None, kept: bool
) -> list[dict[str, Any]]:
    """Return each layer's weights, norms' included; ``kept``: the linear ones quantized."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, int]) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device)
        return (made * 0.02).bfloat16()

    made = []
    for _ in range(layers):
        p: dict[str, Any] = {name: random(shape) for name, shape in sizes.projections.items()}
        for name in sizes.projections if recipe is not None and recipe.given else ():
            p[f"{name}_w_scale"] = (448.0 / p[name].abs().amax().float()).reshape(())
            p[f"{name}_x_scale"] = torch.tensor(448.0 / 8.0, device=device)
        if recipe is not None and kept:
            p |= {name: recipe.quantize_weight(p, name) for name in sizes.projections}
        for name in ("attention_norm", "mlp_norm"):
            p[name] = torch.ones(sizes.width, device=device, dtype=torch.bfloat16)
        made.append(p)
    return made


def bf16_linear(x: Tensor, p: dict[str, Any], name: str) -> Tensor:
    """Return ``x`` times the named weight."""
    return F.linear(x, p[name])


@torch.compiler.disable
def _not_compiled() -> None:
    """Break the graph of whoever calls this."""


def our_linear(recipe: Recipe, kept: bool, broken: bool = False) -> Linear:
    """Return the linear layer of a recipe in our ops; ``broken``: behind a graph break."""

    def linear(x: Tensor | ixt.Quantized, p: dict[str, Any], name: str) -> Tensor:
        if broken:
            _not_compiled()
        if isinstance(x, ixt.Quantized):  # with the scale that is given for it
            shape, a = x.codes.shape, x._replace(codes=x.codes.flatten(0, -2))
        else:
            scale = p[f"{name}_x_scale"] if recipe.given else None
            shape, a = x.shape, ixt.quantize(x.flatten(0, -2), recipe.activations, scale)
        b = p[name] if kept else recipe.quantize_weight(p, name)
        formats = recipe.activations, recipe.weights
        product = ixt.scaled_mm(a, b, *formats, fast_accum=recipe.fast_accum)
        return product.view(*shape[:-1], -1)

    return linear


def plain_linear(recipe: Recipe, kept: bool) -> Linear:
    """Return the same in PyTorch's own ops."""

    def codes(x: Tensor, p: dict[str, Any], scale_name: str) -> tuple[Tensor, Tensor]:
        assert recipe.plain is not None
        if not recipe.given:
            made: tuple[Tensor, Tensor] = recipe.plain(x)
            return made
        scale = p[scale_name]
        return recipe.plain(x, scale), scale.reciprocal()

    def linear(x: Tensor, p: dict[str, Any], name: str) -> Tensor:
        a, scale_a = codes(x.flatten(0, -2), p, f"{name}_x_scale")
        b, scale_b = p[name][:2] if kept else codes(p[name], p, f"{name}_w_scale")
        product = torch._scaled_mm(
            a, b.t(), scale_a, scale_b.t(), out_dtype=x.dtype, use_fast_accum=recipe.fast_accum
        )
        return product.view(*x.shape[:-1], -1)

    return linear


def our_attention(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None = None) -> Tensor:
    """Return our causal attention."""
    return ixt.attention(q, k, v, causal=True)


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, next_scale: Tensor | None = None) -> Any:
    """Return it with one scale each for q, k and v; codes where the next product's is given."""
    return ixt.attention(q, k, v, causal=True, format=TENSOR, out_scale=next_scale)


ATTENTION: dict[str, Attend] = {"sdpa": sdpa, "bf16": our_attention, "fp8": fp8_attention}
"""PyTorch's choice of a back end, and ours."""


class Block(torch.nn.Module):
    """All layers, for x (1, tokens, width) in bf16.

    A module, since CUDA graphs read its weights where they are, and copy what comes as an argument.
    """

    def __init__(
        self, layers: list[dict[str, Any]], sizes: Sizes, linear: Linear, attend: Attend = sdpa
    ) -> None:
        super().__init__()
        self.layers, self.sizes = layers, sizes
        self.linear, self.attend = linear, attend

    def forward(self, x: Tensor) -> Tensor:
        """Return the layers' result."""
        for p in self.layers:
            x = layer(x, None, None, p, self.sizes, self.linear, self.attend)
        return x


def traffic(sizes: Sizes, layers: int, tokens: int, weights: int) -> int:
    """Return the bytes that all but products and attention move at least.

    A layer, per token: norm to codes reads 2 bytes and writes 1; attention's result to codes
    likewise; residual, norm, codes: 2 + 2 in, 2 + 1 out; the last residual 4 in, 2 out, all of the
    width; SiLU * mul 4 in, 1 out of the inner width.  ``weights``: bytes for each of theirs.
    """
    count = sum(rows * columns for rows, columns in sizes.projections.values())
    a_token = (3 + 3 + 7 + 6) * sizes.width + 5 * sizes.inner
    return layers * (tokens * a_token + weights * count)
