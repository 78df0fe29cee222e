"""Linear layers of every format as inference and training write them, for counting kernels."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext.fake_gpu import GeneratedGraph


class Pair(NamedTuple):
    """Formats of activations (and their gradients) and of weights."""

    a: ixt.Format
    b: ixt.Format
    delayed: bool = False

    def scale(self, scale: Tensor) -> tuple[Tensor, ...]:
        """Return the scale to quantize with, where it is not taken from an amax."""
        return (scale,) if self.delayed else ()


def _of(granularity: Any, layout: Any = "plain") -> ixt.FP8:
    return ixt.FP8(granularity=granularity, layout=layout)


PAIRS = {
    "tensor": Pair(_of("tensor"), _of("tensor"), delayed=True),
    "row": Pair(_of("row"), _of("row")),
    "block": Pair(_of("block", "gemm"), _of("square", "gemm")),
    "block, plain": Pair(_of("block"), _of("square")),
    "mxfp8": Pair(ixt.MXFP8(layout="gemm"), ixt.MXFP8(layout="gemm")),
    "nvfp4": Pair(ixt.NVFP4(layout="gemm"), ixt.NVFP4(layout="gemm")),
    "int8": Pair(ixt.INT8(), ixt.INT8()),
}


class Linear(torch.autograd.Function):
    """``x @ weight.t()`` of (M, K) and (N, K); all three products take quantized operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, name: str) -> Tensor:
        pair = PAIRS[name]
        given = pair.scale(scale)
        q = ixt.quantize(x, pair.a, *given, orientation="both")
        w = ixt.quantize(weight, pair.b, *given, orientation="both")
        ctx.name, kept = name, [t for t in (*q.column, *w.column) if t is not None]
        ctx.save_for_backward(*kept, scale)
        return ixt.scaled_mm(q.row, w.row, pair.a, pair.b, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *kept, scale = ctx.saved_tensors
        pair, half = PAIRS[ctx.name], len(kept) // 2
        x, weight = ixt.Quantized(*kept[:half]), ixt.Quantized(*kept[half:])
        q = ixt.quantize(grad, pair.a, *pair.scale(scale), orientation="both")
        to_input = ixt.scaled_mm(q.row, weight, pair.a, pair.b, dtype=grad.dtype)
        to_weight = ixt.scaled_mm(q.column, x, pair.a, pair.a, dtype=grad.dtype)
        return to_input, to_weight, None, None


_VALUE = re.compile(r"^\s*tmp\d+ = (.*)$", re.M)
_MOVED = re.compile(r"tl\.load\(.*\)(\.to\([^)]*\))*|tmp\d+(\.to\([^)]*\))*|tl\.broadcast_to\(.*\)")


def copies(graph: GeneratedGraph) -> list[str]:
    """Return the kernels that only move or cast what they load.

    Templates of ours, whose text names its values otherwise, quantize.
    """
    found = []
    for name, kernel in graph.kernels.items():
        values = _VALUE.findall(kernel.source)
        if "_tem_" not in name and all(_MOVED.fullmatch(value) for value in values):
            found.append(name)
    return found


def called(graph: GeneratedGraph) -> list[str]:
    """Return the short names of the opaque calls, in order: "scaled_mm", "quantize_fp8_row"."""
    return [name.split(".")[-2] for name in graph.externs]
