"""A Llama layer whose linear layers take FP8: what the plugin is for, in one function.

The norms, the rotary embedding and the activation are plain PyTorch, as in a user's model; the
quantizations and the matrix products are ours, or for comparison plain PyTorch too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt

from .chain_cases import plain_row, rms_norm, swiglu

ROW = ixt.FP8(granularity="row")


@dataclass(frozen=True)
class Sizes:
    """Width, heads (of queries, of keys and values), width of the feed-forward part."""

    width: int
    heads: int
    key_heads: int
    inner: int

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer."""
        together = (self.heads + 2 * self.key_heads) * self.head
        return {
            "qkv": (together, self.width),
            "out": (self.width, self.width),
            "gate_up": (2 * self.inner, self.width),
            "down": (self.width, self.inner),
        }


LLAMA_8B = Sizes(4096, 32, 8, 14336)


def parameters(sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    """Return random bf16 weights, quantized once by rows: NAME and NAME_scale; and the norms'."""
    bf16 = {"device": device, "dtype": torch.bfloat16}
    made = {name: torch.rand(sizes.width, **bf16) for name in ("attention_norm", "mlp_norm")}
    for name, shape in sizes.projections.items():
        codes, scale = ixt.quantize(torch.randn(shape, **bf16) * shape[1] ** -0.5, ROW)[:2]
        made |= {name: codes, f"{name}_scale": scale}
    return made


def rotary(tokens: int, head: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, bf16 (tokens, head)."""
    frequency = 5e5 ** (-torch.arange(0, head, 2, device=device) / head)
    angle = torch.outer(torch.arange(tokens, device=device).float(), frequency).repeat(1, 2)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


Linear = Callable[[Tensor, dict[str, Any], str], Tensor]


def fp8_linear(x: Tensor, p: dict[str, Any], name: str) -> Tensor:
    """Return ``x`` times the named weight: rows quantized by our ops, our matrix product."""
    weight = ixt.Quantized(p[name], p[f"{name}_scale"])
    return ixt.scaled_mm(ixt.quantize(x, ROW), weight, ROW, dtype=x.dtype, fast_accum=True)


def plain_linear(x: Tensor, p: dict[str, Any], name: str) -> Tensor:
    """Return the same by PyTorch's own ops."""
    codes, scale = plain_row(x.flatten(0, -2))
    weight, weight_scale = p[name], p[f"{name}_scale"]
    product = torch._scaled_mm(
        codes, weight.t(), scale, weight_scale.t(), out_dtype=x.dtype, use_fast_accum=True
    )
    return product.view(*x.shape[:-1], -1)


Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Any]
"""From q, k, v and the given scale of the next product, if any, to a tensor or its codes."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, next_scale: Tensor | None = None) -> Tensor:
    """Return PyTorch's causal attention, by the back end that it picks."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def layer(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    p: dict[str, Any],
    sizes: Sizes,
    linear: Linear = fp8_linear,
    attend: Attend = sdpa,
) -> Tensor:
    """Return the layer's result for ``x`` (batch, tokens, width), bf16; no ``cos``, no rotation."""
    batch, tokens, _ = x.shape
    qkv = linear(rms_norm(x, p["attention_norm"]), p, "qkv")
    qkv = qkv.view(batch, tokens, -1, sizes.head).transpose(1, 2)
    q, k, v = qkv.split([sizes.heads, sizes.key_heads, sizes.key_heads], 1)
    attended = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v, p.get("out_x_scale"))
    x = x + linear(_merged(attended), p, "out")
    gate, up = linear(rms_norm(x, p["mlp_norm"]), p, "gate_up").chunk(2, -1)
    return x + linear(swiglu(gate, up), p, "down")


def _merged(attended: Any) -> Any:
    """Return the heads of a token side by side, in 16 bits or as codes."""
    if isinstance(attended, ixt.Quantized):
        return attended._replace(codes=_merged(attended.codes))
    return attended.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return x
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
