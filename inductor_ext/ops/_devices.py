"""Where the lowerings of ops without float8 conversions can be compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cpu_or_nvidia(x: Tensor, *args: Any, **kwargs: Any) -> bool | str:
    """Return whether the lowerings can be compiled for the device of ``x``, or why not."""
    if x.device.type == "cpu" or (x.device.type == "cuda" and torch.version.hip is None):
        return True
    kind = "ROCm" if x.device.type == "cuda" else x.device.type
    return f"the lowerings are written for the CPU and for CUDA, not for {kind}"
