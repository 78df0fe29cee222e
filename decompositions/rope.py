"""Rotary position embedding and its backward: the arithmetic of every implementation, in ATen.

Computed in fp32 from the inputs as they are stored, one rounding to the dtype of ``x``.  A pair
(a, b) of elements becomes (a * cos_a - b * sin_a, b * cos_b + a * sin_b).  The pairs are elements i
and i + R/2 of the R that are rotated (half-split: Llama, Hugging Face), or 2i and 2i + 1
(interleaved: GPT-J); elements behind them pass through.  Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Rotate the pairs of each head.

    Args:
        x: (B, H, S, D) bfloat16, float16 or float32.
        cos, sin: (S, W) or (B or 1, S, W); with ``positions`` a table (T, W).  W is R, each element
            with its own, or R / 2, a pair with one.  bfloat16, float16 or float32.
        positions: (S,) or (B, S) integers, rows of the table; clamped to it.
        rotary_dim: R, the leading elements of D that are rotated; 0 for all.
        interleaved: pairs of neighbours.

    Returns:
        (B, H, S, D) of the dtype of ``x``, contiguous.
    """
    c, s, sign = _factors(cos, sin, positions, rotary_dim or x.shape[-1], interleaved)
    return _rotated(x, c, s * sign, interleaved).contiguous()


def rope_backward(
    grad: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
    token_major: bool = False,
) -> Tensor:
    """Return the gradient of ``x``: the transposed rotation of the gradient of the result.

    Args:
        token_major: the result lies in memory as (B, S, H, D).
    """
    c, s, sign = _factors(cos, sin, positions, rotary_dim or grad.shape[-1], interleaved)
    made = _rotated(grad, c, (s * sign).flip(_axis(interleaved)), interleaved)
    if token_major:
        dense = torch.contiguous_format  # also where nothing is in it, and any strides would do
        return made.transpose(1, 2).clone(memory_format=dense).transpose(1, 2)
    return made.contiguous()


def _axis(interleaved: bool) -> int:
    """Return the axis of the two of a pair, once the last one is taken apart."""
    return -1 if interleaved else -2


def _rotated(x: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> Tensor:
    """Return ``v * c + other(v) * s`` rounded, where other() gives each the other of its pair."""
    width = c.shape[-2] * c.shape[-1]
    pair = c.shape[-2:]
    v = x[..., :width].float().unflatten(-1, (pair[0], pair[1]))
    made = (v * c + v.flip(_axis(interleaved)) * s).flatten(-2).to(x.dtype)
    return made if width == x.shape[-1] else torch.cat((made, x[..., width:]), -1)


def _factors(
    cos: Tensor, sin: Tensor, positions: Tensor | None, width: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cos and sin in fp32, (B or 1, 1, S, *) with * as the pairs lie, and signs (-1, 1)."""
    half, axis = width // 2, _axis(interleaved)
    shape = (half, 2) if interleaved else (2, half)
    made = []
    for table in (cos, sin):
        rows = table if positions is None else table[positions.clamp(0, table.shape[0] - 1)]
        rows = rows.float()
        if rows.shape[-1] == half:
            rows = rows.unsqueeze(axis).expand(*rows.shape[:-1], *shape)
        else:
            rows = rows.unflatten(-1, shape)
        made.append(rows.unsqueeze(-4))  # the heads
    sign = torch.arange(-1.0, 2.0, 2.0, device=cos.device)
    return made[0], made[1], sign if interleaved else sign.unsqueeze(-1)
