"""Activations, gated ones, and their backwards: the arithmetic of every implementation, in ATen.

Computed in fp32 from the inputs as they are stored, by PyTorch's own functions, and rounded once to
the dtype of ``x`` (eager ``F.silu(a) * b`` in bf16 rounds twice).  Results are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def silu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(x)``."""
    return _rounded(F.silu(x.float()), x)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return ``grad * s * (1 + x * (1 - s))`` with s = sigmoid(x)."""
    return _rounded(_silu_gradient(grad.float(), x.float()), x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``x * Phi(x)``: by erf ("none"), or by tanh ("tanh"); Hendrycks & Gimpel, 2016."""
    return _rounded(F.gelu(x.float(), approximate=approximate), x)


def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``grad`` times the derivative of :func:`gelu`."""
    return _rounded(_gelu_gradient(grad.float(), x.float(), approximate), x)


def relu2(x: Tensor) -> Tensor:
    """Return ``relu(x)²``; So et al., arXiv:2109.08668."""
    v = F.relu(x.float())
    return _rounded(v * v, x)


def relu2_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return ``grad * 2 * relu(x)``."""
    return _rounded(grad.float() * (2.0 * F.relu(x.float())), x)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return ``silu(a) * b``; Shazeer, arXiv:2002.05202."""
    return _rounded(F.silu(a.float()) * b.float(), a)


def swiglu_backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``a`` and ``b``."""
    g, u, v = grad.float(), a.float(), b.float()
    return _rounded(_silu_gradient(g * v, u), a), _rounded(g * F.silu(u), b)


def geglu(a: Tensor, b: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(a) * b``; Shazeer, arXiv:2002.05202."""
    return _rounded(F.gelu(a.float(), approximate=approximate) * b.float(), a)


def geglu_backward(
    grad: Tensor, a: Tensor, b: Tensor, approximate: str = "none"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``a`` and ``b``."""
    g, u, v = grad.float(), a.float(), b.float()
    da = _gelu_gradient(g * v, u, approximate)
    return _rounded(da, a), _rounded(g * F.gelu(u, approximate=approximate), b)


def _silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad, x)


def _gelu_gradient(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":  # farther out the slope is 0 or 1, but PyTorch's x * x overflows
        x = x.clamp(-100.0, 100.0)
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


def _rounded(v: Tensor, like: Tensor) -> Tensor:
    return v.to(like.dtype).contiguous()
