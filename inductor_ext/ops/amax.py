"""Largest magnitudes, per tensor and per row: schemas, fakes and contracts.

Arithmetic: ``decompositions/amax.py``; compiled form: ``lowerings/amax.py``; kernels:
``kernels/cuda/amax.cu`` and ``kernels/cpu/ints.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inductor_ext.decompositions import amax as reference

from ..registry import register
from ..validation import INPUT_DTYPES, check_dtype, check_tensor
from ._alone import own_kernel
from ._devices import cpu_or_nvidia
from ._library import define


def check_float(x: Tensor, *, rowwise: bool) -> None:
    """Raise TypeError or ValueError unless ``x`` is bf16, fp16 or fp32, and has rows if needed."""
    check_tensor("x", x)
    check_dtype("x", x.dtype, INPUT_DTYPES)
    if rowwise and x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, got 0-d")


def float_inputs(device: torch.device, columns: int = 128) -> Iterator[Tensor]:
    """Yield inputs of every dtype, of two and three dimensions."""
    generator = torch.Generator(device=device).manual_seed(0)
    for shape in ((3, columns), (2, 3, columns)):
        for dtype in INPUT_DTYPES:
            yield torch.randn(shape, generator=generator, device=device).to(dtype)


def _fake_amax(x: Tensor) -> Tensor:
    check_float(x, rowwise=False)
    return x.new_empty((), dtype=torch.float32)


def _fake_amax_row(x: Tensor) -> Tensor:
    check_float(x, rowwise=True)
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


amax = define("amax(Tensor x) -> Tensor", fake=_fake_amax, reference=reference.amax)
amax_row = define("amax_row(Tensor x) -> Tensor", fake=_fake_amax_row, reference=reference.amax_row)


def _inputs(device: torch.device) -> Iterator[tuple[Tensor]]:
    for x in float_inputs(device):
        yield (x,)
        yield (x[..., 3:-2],)


register(
    amax,
    reference=reference.amax,
    lowering="inductor_ext.lowerings.amax:amax",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=own_kernel,
    inputs=_inputs,
)
register(
    amax_row,
    reference=reference.amax_row,
    lowering="inductor_ext.lowerings.amax:amax_row",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=own_kernel,
    inputs=_inputs,
)
