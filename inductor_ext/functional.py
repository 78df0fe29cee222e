"""Norms and activations with a gradient and one rounding: the public functions above the ops.

Each is computed in fp32 from its inputs and rounded once to the dtype of the first of them (see
docs/numerics.md).  In eager mode a CUDA kernel runs; ``torch.compile`` sees the formula, and fuses
it with its neighbours.  Inputs are bfloat16, float16 or float32 with any strides; weights and
biases may be of another of these dtypes.  All raise TypeError or ValueError naming the argument,
what was expected and what came.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ._call import call_with_gradient
from .api import _guard_mode
from .validation import check_tensor

__all__ = [
    "add_rms_norm", "geglu", "gelu", "layer_norm", "relu2", "rms_norm", "silu", "swiglu",
]  # fmt: skip

Approximate = Literal["none", "tanh"]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """Return ``x * (mean(x²) + eps)^-½ * (weight + offset)``, row by row.

    Args:
        x: (*, K).
        weight: (K,), or None for ones.
        offset: 1 for models that store ``weight - 1``.
    """
    result: Tensor = _run("rms_norm", (x, weight, eps, offset), x=x, weight=weight)[0]
    return result


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return :func:`rms_norm` of ``x + residual``, and that sum, rounded to its dtype first."""
    arguments = (x, residual, weight, eps, offset)
    y, total, _ = _run("add_rms_norm", arguments, x=x, residual=residual, weight=weight)
    return y, total


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return ``(x - mean) * (var + eps)^-½ * weight + bias``, row by row.

    Args:
        x: (*, K).
        weight, bias: (K,), or None for ones and zeros.
    """
    arguments = (x, weight, bias, eps)
    result: Tensor = _run("layer_norm", arguments, x=x, weight=weight, bias=bias)[0]
    return result


def silu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(x)``."""
    result: Tensor = _run("silu", (x,), x=x)
    return result


def gelu(x: Tensor, approximate: Approximate = "none") -> Tensor:
    """Return GELU of ``x``, by erf ("none") or by its tanh approximation ("tanh")."""
    result: Tensor = _run("gelu", (x, approximate), x=x)
    return result


def relu2(x: Tensor) -> Tensor:
    """Return ``relu(x)²``."""
    result: Tensor = _run("relu2", (x,), x=x)
    return result


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return ``silu(a) * b``; both of one shape and dtype, for instance halves of a tensor."""
    result: Tensor = _run("swiglu", (a, b), a=a, b=b)
    return result


def geglu(a: Tensor, b: Tensor, approximate: Approximate = "none") -> Tensor:
    """Return ``gelu(a) * b``; see :func:`gelu` and :func:`swiglu`."""
    result: Tensor = _run("geglu", (a, b, approximate), a=a, b=b)
    return result


def _run(name: str, arguments: tuple[Any, ...], /, **tensors: Tensor | None) -> Any:
    _guard_mode()
    for argument, value in tensors.items():
        if value is not None or argument in ("x", "residual", "a", "b"):
            check_tensor(argument, value)
    return call_with_gradient(getattr(torch.ops.inductor_ext, name).default, *arguments)
