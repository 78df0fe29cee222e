"""``inductor_ext::round_to_dtype``: the store to bf16 or fp16 that eager mode makes after every op.

Users never call it.  :mod:`inductor_ext._rounding` puts it into graphs; its compiled form is
``lowerings/rounding.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define


def _fake(x: Tensor, before_addition: bool = False) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _reference(x: Tensor, before_addition: bool = False) -> Tensor:
    """Return a copy: a tensor in memory is rounded to its dtype already."""
    return _fake(x).copy_(x)


round_to_dtype = define(
    "round_to_dtype(Tensor x, bool before_addition=False) -> Tensor",
    fake=_fake,
    reference=_reference,
    compiled=False,
)
