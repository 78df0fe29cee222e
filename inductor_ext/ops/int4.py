"""INT4 by groups, symmetric and asymmetric: schemas, fakes and contracts.

Arithmetic: ``decompositions/int4.py``; compiled form: ``lowerings/int4.py``; kernels:
``kernels/cuda/groups.cu`` and ``kernels/cpu/ints.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inductor_ext.decompositions import int4 as reference

from ..registry import register
from ..validation import INPUT_DTYPES, check_dtype, check_tensor
from ._alone import kernel_unless_small, own_kernel
from ._devices import cpu_or_nvidia
from ._library import define
from .amax import check_float
from .int8 import GROUPS, check_group, check_group_tensor, group_inputs

_LOWERINGS = "inductor_ext.lowerings.int4:"


def check_quantize(x: Tensor, group: int) -> None:
    """Raise TypeError or ValueError for arguments that the INT4 quantize ops do not take."""
    check_float(x, rowwise=True)
    check_group(group)
    columns = x.shape[-1]
    if columns % group != 0:
        raise ValueError(
            f"`x` must have rows of a multiple of `group` elements, {group}, got {columns}: "
            + _what_would_work(columns, group)
        )


def _what_would_work(columns: int, group: int) -> str:
    smaller = [g for g in GROUPS if g < group and columns % g == 0]
    return f"use group {smaller[-1]}" if smaller else f"pad to {-(-columns // group) * group}"


def check_dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group: int, dtype: torch.dtype
) -> None:
    """Raise TypeError or ValueError for arguments that ``dequantize_int4`` does not take."""
    check_tensor("codes", codes)
    check_dtype("codes", codes.dtype, (torch.uint8,))
    check_dtype("dtype", dtype, INPUT_DTYPES)
    check_group(group)
    if codes.dim() == 0:
        raise ValueError("`codes` must have at least one dimension, got 0-d")
    columns = 2 * codes.shape[-1]
    if columns % group != 0:
        raise ValueError(
            f"`codes` must have rows of a multiple of {group // 2} bytes for `group` {group}, "
            f"got {codes.shape[-1]}"
        )
    check_group_tensor("scale", scale, codes, columns, group, torch.float32)
    if zero is not None:
        check_group_tensor("zero", zero, codes, columns, group, torch.uint8)


def _fake_symmetric(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    check_quantize(x, group)
    codes = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    return codes, x.new_empty((*x.shape[:-1], x.shape[-1] // group), dtype=torch.float32)


def _fake_asymmetric(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale = _fake_symmetric(x, group)
    return codes, scale, scale.new_empty(scale.shape, dtype=torch.uint8)


def _fake_dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    check_dequantize(codes, scale, zero, group, dtype)
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)


quantize_int4_symmetric = define(
    "quantize_int4_symmetric(Tensor x, int group) -> (Tensor, Tensor)",
    fake=_fake_symmetric,
    reference=reference.quantize_int4_symmetric,
)
quantize_int4_asymmetric = define(
    "quantize_int4_asymmetric(Tensor x, int group) -> (Tensor, Tensor, Tensor)",
    fake=_fake_asymmetric,
    reference=reference.quantize_int4_asymmetric,
)
dequantize_int4 = define(
    "dequantize_int4(Tensor codes, Tensor scale, Tensor? zero, int group, ScalarType dtype)"
    " -> Tensor",
    fake=_fake_dequantize,
    reference=reference.dequantize_int4,
)


def _inputs_dequantize(
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int, torch.dtype]]:
    for x, group in group_inputs(device):
        yield *reference.quantize_int4_symmetric(x, group), None, group, x.dtype
        yield *reference.quantize_int4_asymmetric(x, group), group, x.dtype


register(
    quantize_int4_symmetric,
    reference=reference.quantize_int4_symmetric,
    lowering=_LOWERINGS + "quantize_int4_symmetric",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=kernel_unless_small,
    inputs=group_inputs,
)
register(
    quantize_int4_asymmetric,
    reference=reference.quantize_int4_asymmetric,
    lowering=_LOWERINGS + "quantize_int4_asymmetric",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=kernel_unless_small,
    inputs=group_inputs,
)
register(
    dequantize_int4,
    reference=reference.dequantize_int4,
    lowering=_LOWERINGS + "dequantize_int4",
    autograd=None,
    supports=cpu_or_nvidia,
    kernel_alone=own_kernel,
    inputs=_inputs_dequantize,
)
