"""FP8 with a transpose beside the codes, and FP8 with a scale a column: schemas and contracts.

Arithmetic: ``decompositions/fp8_both.py``; compiled form: ``lowerings/fp8_both.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import fp8_both as reference

from ..registry import register
from ..validation import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dtype,
    check_eps,
    check_same_device,
    check_tensor,
)
from ._alone import kernel_for_amax_unless_small, kernel_unless_small, own_kernel
from ._blocks import check_input, matrix_shape
from ._library import define
from .fp8 import triton_casts_to_fp8

_LOWERINGS = "inductor_ext.lowerings.fp8_both:"


def check_static_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError for arguments that ``..._static_both`` does not take."""
    check_input(x, dtype)
    check_tensor("scale", scale)
    check_dtype("scale", scale.dtype, (torch.float32,))
    check_same_device("scale", scale, "x", x)
    if scale.numel() != 1:
        raise ValueError(f"`scale` must have one element, got the shape {tuple(scale.shape)}")


def check_current(x: Tensor, dtype: torch.dtype, eps: float) -> None:
    """Raise TypeError or ValueError for arguments that the other two ops do not take."""
    check_input(x, dtype)
    check_eps(eps)


def _fake_static_both(
    x: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_static_both(x, scale, dtype)
    inverse, amax = scale.new_empty(scale.shape), scale.new_empty(scale.shape)
    return _codes(x, dtype), _codes_t(x, dtype), inverse, amax


def _fake_tensor_both(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    check_current(x, dtype, eps)
    return _codes(x, dtype), _codes_t(x, dtype), x.new_empty((), dtype=torch.float32)


def _fake_column(
    x: Tensor,
    dtype: torch.dtype,
    transposed: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
) -> tuple[Tensor, Tensor]:
    check_current(x, dtype, eps)
    columns = x.shape[-1]
    if transposed:
        return _codes_t(x, dtype), x.new_empty((columns, 1), dtype=torch.float32)
    return _codes(x, dtype), x.new_empty((1, columns), dtype=torch.float32)


def _codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _codes_t(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(matrix_shape(x)[::-1], dtype=dtype)


quantize_fp8_static_both = define(
    "quantize_fp8_static_both(Tensor x, Tensor scale, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_static_both,
    reference=reference.quantize_fp8_static_both,
)
quantize_fp8_tensor_both = define(
    "quantize_fp8_tensor_both(Tensor x, ScalarType dtype, float eps=0., bool pow2=False)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_tensor_both,
    reference=reference.quantize_fp8_tensor_both,
)
quantize_fp8_column = define(
    "quantize_fp8_column(Tensor x, ScalarType dtype, bool transposed=False, float eps=0., "
    "bool pow2=False) -> (Tensor, Tensor)",
    fake=_fake_column,
    reference=reference.quantize_fp8_column,
)


def _inputs(device: torch.device) -> Iterator[tuple[Tensor, torch.dtype]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for number, shape in enumerate(((3, 64), (70, 33), (2, 3, 40))):
        for place, dtype in enumerate(INPUT_DTYPES):
            x = torch.randn(shape, generator=generator, device=device).to(dtype)
            yield x, FP8_DTYPES[(number + place) % 2]


def _inputs_static_both(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, dtype) in enumerate(_inputs(device)):
        scale = torch.tensor(37.5, device=device)
        yield x, scale.view([(), (1,), (1, 1)][number // 3]), dtype


def _inputs_tensor_both(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, dtype) in enumerate(_inputs(device)):
        yield x, dtype, (0.0, 1e-12)[number % 2], number % 3 == 0


def _inputs_column(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, dtype) in enumerate(_inputs(device)):
        yield x, dtype, number % 2 == 0, (0.0, 1e-12)[number // 2 % 2], number % 3 == 0


register(
    quantize_fp8_static_both,
    reference=reference.quantize_fp8_static_both,
    lowering=_LOWERINGS + "quantize_fp8_static_both",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_for_amax_unless_small,
    inputs=_inputs_static_both,
)
register(
    quantize_fp8_tensor_both,
    reference=reference.quantize_fp8_tensor_both,
    lowering=_LOWERINGS + "quantize_fp8_tensor_both",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs_tensor_both,
)
register(
    quantize_fp8_column,
    reference=reference.quantize_fp8_column,
    lowering=_LOWERINGS + "quantize_fp8_column",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_unless_small,
    inputs=_inputs_column,
)
