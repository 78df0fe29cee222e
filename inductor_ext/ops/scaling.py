"""Delayed scaling, the update of amax histories and scales: schemas, fakes and contracts.

Arithmetic: ``decompositions/scaling.py``; compiled form: ``lowerings/scaling.py``; kernels:
``kernels/cuda/scaling.cu`` and ``kernels/cpu/scaling.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import scaling as reference

from ..registry import register
from ..validation import FP8_DTYPES, check_dtype, check_same_device, check_tensor
from ._alone import own_kernel
from ._devices import cpu_or_nvidia
from ._library import define

ALGORITHMS = ("max", "most_recent")
LARGEST_MARGIN = 100
"""Keeps ``max_finite * 2**-margin`` an exact fp32 number."""


def check_update(
    history: Tensor, scale: Tensor, dtype: torch.dtype, margin: int, algorithm: str
) -> None:
    """Raise TypeError or ValueError for arguments that the scale update does not take."""
    check_tensor("history", history)
    check_tensor("scale", scale)
    check_dtype("history", history.dtype, (torch.float32,))
    check_dtype("scale", scale.dtype, (torch.float32,))
    check_dtype("dtype", dtype, FP8_DTYPES)
    check_same_device("scale", scale, "history", history)
    if history.dim() not in (1, 2):
        raise ValueError(f"`history` must have 1 or 2 dimensions, got {history.dim()}")
    if history.dim() == 1 and scale.numel() != 1:
        raise ValueError(f"`scale` must have one element, got {tuple(scale.shape)}")
    if history.dim() == 2 and (scale.dim() != 1 or scale.shape[0] != history.shape[1]):
        shape = (history.shape[1],)
        raise ValueError(f"`scale` must have the shape {shape}, got {tuple(scale.shape)}")
    if not -LARGEST_MARGIN <= margin <= LARGEST_MARGIN:
        raise ValueError(f"`margin` must be at least -100 and at most 100, got {margin}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f'`algorithm` must be "max" or "most_recent", got "{algorithm}"')


def _fake(
    history: Tensor, scale: Tensor, dtype: torch.dtype, margin: int = 0, algorithm: str = "max"
) -> tuple[Tensor, Tensor]:
    check_update(history, scale, dtype, margin, algorithm)
    return history.new_empty(history.shape), scale.new_empty(scale.shape)


def _fake_(
    history: Tensor, scale: Tensor, dtype: torch.dtype, margin: int = 0, algorithm: str = "max"
) -> None:
    check_update(history, scale, dtype, margin, algorithm)
    for name, written in (("history", history), ("scale", scale)):
        steps = zip(written.shape, written.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in steps):
            raise ValueError(f"`{name}` must not be expanded: it is written to")


update_fp8_scale = define(
    "update_fp8_scale(Tensor history, Tensor scale, ScalarType dtype, int margin=0,"
    ' str algorithm="max") -> (Tensor, Tensor)',
    fake=_fake,
    reference=reference.update_fp8_scale,
)
update_fp8_scale_ = define(
    "update_fp8_scale_(Tensor(a!) history, Tensor(b!) scale, ScalarType dtype, int margin=0,"
    ' str algorithm="max") -> ()',
    fake=_fake_,
    reference=reference.update_fp8_scale_,
)


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for shape in ((16,), (1,), (2, 5), (16, 3), (40, 16)):
        history = torch.rand(shape, generator=generator, device=device) * 8
        scale = torch.rand(shape[1:], generator=generator, device=device) + 1
        for dtype in FP8_DTYPES:
            yield history, scale, dtype
            yield history, scale, dtype, 2, "most_recent"


register(
    update_fp8_scale,
    reference=reference.update_fp8_scale,
    lowering="inductor_ext.lowerings.scaling:update_fp8_scale",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=own_kernel,
    inputs=_inputs,
)
# Writing to its arguments is all it does: the compiler calls the kernel, in place.
register(
    update_fp8_scale_,
    reference=reference.update_fp8_scale_,
    opaque=True,
    autograd=None,
    inputs=_inputs,
)
