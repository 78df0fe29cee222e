"""INT8 per tensor, per row and per group: schemas, fakes and contracts.

Arithmetic: ``decompositions/int8.py``; compiled form: ``lowerings/int8.py``; kernels:
``kernels/cuda/int8*.cu``, ``kernels/cuda/groups.cu`` and ``kernels/cpu/ints.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inductor_ext.decompositions import int8 as reference

from ..registry import register
from ..validation import (
    INPUT_DTYPES,
    check_dtype,
    check_same_device,
    check_scale,
    check_tensor,
)
from ._alone import kernel_unless_small, own_kernel
from ._devices import cpu_or_nvidia
from ._library import define
from .amax import check_float, float_inputs

GROUPS = (32, 64, 128, 256)
"""How many elements of a row can share a scale."""

_LOWERINGS = "inductor_ext.lowerings.int8:"


def check_group(group: int) -> None:
    """Raise ValueError unless ``group`` is one of :data:`GROUPS`."""
    if group not in GROUPS:
        raise ValueError(f"`group` must be 32, 64, 128 or 256, got {group}")


def check_group_tensor(
    name: str, value: Tensor, codes: Tensor, columns: int, group: int, dtype: torch.dtype
) -> None:
    """Raise TypeError or ValueError unless ``value`` holds one ``dtype`` number a group."""
    check_tensor(name, value)
    check_dtype(name, value.dtype, (dtype,))
    check_same_device(name, value, "codes", codes)
    shape = (*codes.shape[:-1], -(-columns // group))
    if value.dim() != codes.dim() or tuple(value.shape) != shape:
        raise ValueError(
            f"`{name}` must have the shape {shape}, one element a group of {group}, "
            f"got {tuple(value.shape)}"
        )


def check_quantize_group(x: Tensor, group: int) -> None:
    """Raise TypeError or ValueError for arguments that ``quantize_int8_group`` does not take."""
    check_float(x, rowwise=True)
    check_group(group)


def check_dequantize(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError for arguments that ``dequantize_int8`` does not take."""
    check_tensor("codes", codes)
    check_dtype("codes", codes.dtype, (torch.int8,))
    check_dtype("dtype", dtype, INPUT_DTYPES)
    if group == 0:
        check_scale("scale", scale, "codes", codes)
        return
    if group not in GROUPS:
        raise ValueError(f"`group` must be 0, 32, 64, 128 or 256, got {group}")
    if codes.dim() == 0:
        raise ValueError("`codes` must have at least one dimension, got 0-d")
    check_group_tensor("scale", scale, codes, codes.shape[-1], group, torch.float32)


def _codes(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.int8, device=x.device)


def _fake_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    check_float(x, rowwise=False)
    return _codes(x), x.new_empty((), dtype=torch.float32)


def _fake_row(x: Tensor) -> tuple[Tensor, Tensor]:
    check_float(x, rowwise=True)
    return _codes(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _fake_group(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    check_quantize_group(x, group)
    groups = (x.shape[-1] + group - 1) // group
    return _codes(x), x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


def _fake_dequantize(codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    check_dequantize(codes, scale, group, dtype)
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


quantize_int8_tensor = define(
    "quantize_int8_tensor(Tensor x) -> (Tensor, Tensor)",
    fake=_fake_tensor,
    reference=reference.quantize_int8_tensor,
)
quantize_int8_row = define(
    "quantize_int8_row(Tensor x) -> (Tensor, Tensor)",
    fake=_fake_row,
    reference=reference.quantize_int8_row,
)
quantize_int8_group = define(
    "quantize_int8_group(Tensor x, int group) -> (Tensor, Tensor)",
    fake=_fake_group,
    reference=reference.quantize_int8_group,
)
dequantize_int8 = define(
    "dequantize_int8(Tensor codes, Tensor scale, int group, ScalarType dtype) -> Tensor",
    fake=_fake_dequantize,
    reference=reference.dequantize_int8,
)


def _inputs(device: torch.device) -> Iterator[tuple[Tensor]]:
    for x in float_inputs(device):
        yield (x,)


def group_inputs(device: torch.device) -> Iterator[tuple[Tensor, int]]:
    """Yield inputs of four groups a row, a number that no batch of the parity harness has."""
    for group in (128, 32, 256):
        for x in float_inputs(device, 4 * group):
            yield x, group


def _inputs_group(device: torch.device) -> Iterator[tuple[Tensor, int]]:
    for x, group in group_inputs(device):
        yield x, group
        yield x[..., 1:-30], group


def _inputs_dequantize(device: torch.device) -> Iterator[tuple[Tensor, Tensor, int, torch.dtype]]:
    for x, group in group_inputs(device):
        codes, scale = reference.quantize_int8_row(x)
        yield codes, scale, 0, x.dtype
        yield codes, scale.flatten()[0], 0, x.dtype
        yield *reference.quantize_int8_group(x, group), group, x.dtype
        yield *reference.quantize_int8_group(x[..., 1:-30], group), group, x.dtype


register(
    quantize_int8_tensor,
    reference=reference.quantize_int8_tensor,
    lowering=_LOWERINGS + "quantize_int8_tensor",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=own_kernel,
    inputs=_inputs,
)
register(
    quantize_int8_row,
    reference=reference.quantize_int8_row,
    lowering=_LOWERINGS + "quantize_int8_row",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=kernel_unless_small,
    inputs=_inputs,
)
register(
    quantize_int8_group,
    reference=reference.quantize_int8_group,
    lowering=_LOWERINGS + "quantize_int8_group",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=kernel_unless_small,
    inputs=_inputs_group,
)
register(
    dequantize_int8,
    reference=reference.dequantize_int8,
    lowering=_LOWERINGS + "dequantize_int8",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=kernel_unless_small,
    inputs=_inputs_dequantize,
)
