"""RMSNorm and LayerNorm, forward and backward: the arithmetic of every implementation, in ATen.

Everything is computed in fp32 from the inputs as they are stored, and each result is rounded once
to its dtype.  Sums may be taken in any order, so implementations differ in the last bits of a
statistic; docs/numerics.md says by how much.  Sources of the formulas: Zhang & Sennrich,
arXiv:1910.07467 (RMSNorm); Ba et al., arXiv:1607.06450 (LayerNorm).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Normalize rows: ``y = round(x * rstd * (weight + offset))``, rstd = (mean(x²) + eps)^-½.

    Args:
        x: (*, K) bfloat16, float16 or float32.
        weight: (K,) of any of these dtypes; None for ones.
        offset: added to the weight; 1 for models that store ``weight - 1``.

    Returns:
        y like ``x``; rstd (*, 1) float32.
    """
    v = x.float()
    rstd = torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    y = v * rstd
    if weight is not None:
        y = y * _gain(weight, offset)
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float = 0.0,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weight``.

    With n = x * rstd and g = grad * (weight + offset): dx = rstd * (g - n * mean(g * n)) + add,
    dweight = the sum of grad * n over the rows.

    Args:
        grad: of ``y``; its shape and dtype.
        add: a gradient of ``x`` that came another way (around the norm), or None.

    Returns:
        dx like ``x``; dweight like ``weight``, or empty float32 (0,) without a weight.
    """
    g, n = grad.float(), x.float() * rstd
    scaled = g if weight is None else g * _gain(weight, offset)
    dx = rstd * (scaled - n * (scaled * n).mean(-1, keepdim=True))
    if add is not None:
        dx = dx + add.float()
    return dx.to(x.dtype).contiguous(), _over_rows(g * n, weight)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the RMSNorm of ``x + residual``, that sum, rounded to its dtype first, and rstd."""
    total = (x + residual).contiguous()
    y, rstd = rms_norm(total, weight, eps, offset)
    return y, total, rstd


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize rows: ``y = round((x - mean) * rstd * weight + bias)``.

    rstd = (var + eps)^-½, where var is the mean of (x - mean)².

    Args:
        x: (*, K) bfloat16, float16 or float32.
        weight, bias: (K,) of any of these dtypes; None for ones and zeros.

    Returns:
        y like ``x``; mean and rstd (*, 1) float32.
    """
    v = x.float()
    if x.shape[-1] == 0:  # var_mean warns of the empty set
        nothing = v.new_full((*x.shape[:-1], 1), float("nan"))
        return torch.empty_like(x).contiguous(), nothing, nothing.clone()
    variance, mean = torch.var_mean(v, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (v - mean) * rstd
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).contiguous(), mean.contiguous(), rstd.contiguous()


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, ``weight`` and ``bias``.

    With n = (x - mean) * rstd and g = grad * weight: dx = (g - mean(g) - n * mean(g * n)) * rstd;
    dweight and dbias are the sums of grad * n and of grad over the rows.

    Returns:
        dx like ``x``; dweight and dbias like theirs, or empty float32 (0,) without them.
    """
    g, n = grad.float(), (x.float() - mean) * rstd
    scaled = g if weight is None else g * weight.float()
    centred = scaled - scaled.mean(-1, keepdim=True) - n * (scaled * n).mean(-1, keepdim=True)
    dx = (centred * rstd).to(x.dtype).contiguous()
    return dx, _over_rows(g * n, weight), _over_rows(g, bias)


def _gain(weight: Tensor, offset: float) -> Tensor:
    return weight.float() + offset if offset != 0.0 else weight.float()


def _over_rows(v: Tensor, like: Tensor | None) -> Tensor:
    """Sum (*, K) over all rows, in the dtype of ``like``; nothing where it is None."""
    if like is None:
        return v.new_empty((0,), dtype=torch.float32)
    rows = v.flatten(0, -2) if v.dim() > 1 else v.unsqueeze(0)
    return rows.sum(0).to(like.dtype)
