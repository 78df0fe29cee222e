"""Delayed scaling: the once-a-step update of an amax history and the scale, in ATen.

Source: docs/formats.md (it follows Transformer Engine's kernel).
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOAT32_MAX = torch.finfo(torch.float32).max


def update_fp8_scale(
    history: Tensor, scale: Tensor, dtype: torch.dtype, margin: int = 0, algorithm: str = "max"
) -> tuple[Tensor, Tensor]:
    """Return the next history and the next scale.

    The next history is moved down by one: ``history[0]``, the amax of this step, becomes the last
    entry, and entry 0 becomes 0, to collect the next step's amax.

    Args:
        history: float32 (L,), or (L, N) for N tensors at once; without entries nothing happens.
        scale: float32, one element, or (N,).
        dtype: float8_e4m3fn or float8_e5m2, whose largest value the scale maps the amax to.
        margin: the scale is made 2**margin smaller.
        algorithm: "max" takes the largest entry (NaN skipped), "most_recent" takes entry 0.

    Returns:
        history like ``history``, contiguous; scale like ``scale``: ``max_finite * 2**-margin /
        amax``, the largest fp32 in place of an infinity, and the old scale where the amax is not
        a positive finite number.
    """
    if history.shape[0] == 0:
        return history.new_empty(history.shape), scale.clone()
    amax = history[0]
    if algorithm == "max":
        amax = torch.where(history.isnan(), 0.0, history).amax(0)
    moved = torch.cat((torch.zeros_like(history[:1]), history[2:], history[:1]))
    amax = amax.reshape(scale.shape)
    largest = torch.finfo(dtype).max * 2.0**-margin
    updated = (torch.full_like(amax, largest) / amax).clamp(max=_FLOAT32_MAX)
    usable = (amax > 0) & (amax <= _FLOAT32_MAX)
    return moved[: history.shape[0]].contiguous(), torch.where(usable, updated, scale).contiguous()


def update_fp8_scale_(
    history: Tensor, scale: Tensor, dtype: torch.dtype, margin: int = 0, algorithm: str = "max"
) -> None:
    """Update ``history`` and ``scale`` in place; see :func:`update_fp8_scale`."""
    new_history, new_scale = update_fp8_scale(history, scale, dtype, margin, algorithm)
    history.copy_(new_history)
    scale.copy_(new_scale)
