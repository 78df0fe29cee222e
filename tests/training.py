"""A linear layer in FP8 as training writes it, and what stands between two of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt

TENSOR, ROW = ixt.FP8(granularity="tensor"), ixt.FP8(granularity="row")
Both = tuple[Tensor, Tensor, Tensor, Tensor]


def both(x: Tensor, fmt: ixt.FP8, scale: Tensor) -> Both:
    """Return codes and scales along K, then those of the transpose.

    ``scale`` is the delayed one, of a format with one scale a tensor.
    """
    given = (scale,) if fmt.granularity == "tensor" else ()
    q = ixt.quantize(x, fmt, *given, orientation="both")
    return q.row.codes, q.row.scale_inv, q.column.codes, q.column.scale_inv


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Return ``a @ b.t()``, given both with rows along the contraction."""
    return ixt.scaled_mm(ixt.Quantized(a, a_scale), ixt.Quantized(b, b_scale), ROW)


class Linear(torch.autograd.Function):
    """``x @ weight.t()``; x and the gradient are quantized in both orientations."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, fmt: ixt.FP8, scales: Tensor, *quantized: Tensor
    ) -> Tensor:
        codes, scale, codes_t, scale_t = both(x, fmt, scales.select(0, 0))
        row, row_scale, column, column_scale = quantized
        ctx.fmt = fmt
        ctx.save_for_backward(codes_t, scale_t, column, column_scale, scales)
        return product(codes, scale, row, row_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_t, x_scale, weight_t, weight_scale, scales = ctx.saved_tensors
        codes, scale, codes_t, scale_t = both(grad, ctx.fmt, scales.select(0, 1))
        to_input = product(codes, scale, weight_t, weight_scale)
        return to_input, product(codes_t, scale_t, x_t, x_scale), *[None] * 6


class Layer(torch.nn.Module):
    """A linear layer whose weight was quantized before the step.

    Args:
        fmt: FP8 with one scale a tensor (delayed) or one a row.
    """

    def __init__(self, inputs: int, outputs: int, fmt: ixt.FP8) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16) * inputs**-0.5
        self.weight, self.fmt = torch.nn.Parameter(weight), fmt
        self.register_buffer("scales", torch.tensor([37.5, 41.0]))
        for name, value in zip("abcd", both(weight, fmt, torch.tensor(99.0)), strict=True):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        quantized = self.a, self.b, self.c, self.d
        result: Tensor = Linear.apply(x, self.weight, self.fmt, self.scales, *quantized)
        return result


class Training(torch.nn.Module):
    """A linear layer, what stands between, a linear layer.

    Args:
        between: "SiLU*mul", "RMSNorm", "residual, RMSNorm" or "LayerNorm".
    """

    def __init__(self, between: str, fmt: ixt.FP8, width: int = 512) -> None:
        super().__init__()
        self.between = between
        self.first = Layer(width, 2 * width if between == "SiLU*mul" else width, fmt)
        self.second = Layer(width, width, fmt)
        self.norm = torch.nn.Parameter(torch.rand(width, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.rand(width, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h, shape = self.first(x), self.norm.shape
        if self.between == "SiLU*mul":
            gate, up = h.chunk(2, -1)
            return (self.second(F.silu(gate) * up),)
        if self.between == "LayerNorm":
            return (self.second(F.layer_norm(h, shape, self.norm, self.bias)),)
        if self.between == "RMSNorm":
            return (self.second(F.rms_norm(h, shape, self.norm)),)
        h = x + h
        return h, self.second(F.rms_norm(h, shape, self.norm))
