"""FP8 per tensor, row and head: schemas, fakes and contracts.

Arithmetic: ``decompositions/fp8.py``; compiled form: ``lowerings/fp8.py``; kernels:
``kernels/cuda/fp8.cu`` and ``kernels/cpu/fp8.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import fp8 as reference

from ..registry import register
from ..validation import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dtype,
    check_eps,
    check_scale,
    check_tensor,
)
from ._alone import kernel_for_amax, kernel_unless_small, own_kernel
from ._devices import cpu_or_nvidia
from ._library import define

_LOWERINGS = "inductor_ext.lowerings.fp8:"


def _codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def check_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError for arguments that ``quantize_fp8_static`` does not take."""
    _check_input(x, dtype)
    check_scale("scale", scale, "x", x)


def check_current(x: Tensor, dtype: torch.dtype, eps: float, *, rowwise: bool) -> None:
    """Raise TypeError or ValueError for arguments that current scaling does not take."""
    _check_input(x, dtype)
    check_eps(eps)
    if rowwise and x.dim() == 0:
        raise ValueError("`x` must have at least one dimension to be quantized by rows, got 0-d")


def check_dequantize(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError for arguments that ``dequantize_fp8`` does not take."""
    check_tensor("codes", codes)
    check_dtype("codes", codes.dtype, FP8_DTYPES)
    check_dtype("dtype", dtype, INPUT_DTYPES)
    check_scale("scale_inv", scale_inv, "codes", codes)


def _check_input(x: Tensor, dtype: torch.dtype) -> None:
    check_tensor("x", x)
    check_dtype("x", x.dtype, INPUT_DTYPES)
    check_dtype("dtype", dtype, FP8_DTYPES)


def _fake_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    check_static(x, scale, dtype)
    return _codes(x, dtype), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


def _fake_tensor(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    check_current(x, dtype, eps, rowwise=False)
    return _codes(x, dtype), x.new_empty((), dtype=torch.float32)


def _fake_row(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    check_current(x, dtype, eps, rowwise=True)
    return _codes(x, dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _fake_heads(
    x: Tensor, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    check_current(x, dtype, eps, rowwise=False)
    if x.dim() != 4:
        raise ValueError(f"`x` must have 4 dimensions, (B, H, S, D), got {x.dim()}")
    return _codes(x, dtype), x.new_empty(x.shape[:2], dtype=torch.float32)


def _fake_dequantize(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    check_dequantize(codes, scale_inv, dtype)
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


quantize_fp8_static = define(
    "quantize_fp8_static(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    fake=_fake_static,
    reference=reference.quantize_fp8_static,
)
quantize_fp8_tensor = define(
    "quantize_fp8_tensor(Tensor x, ScalarType dtype, float eps=0., bool pow2=False)"
    " -> (Tensor, Tensor)",
    fake=_fake_tensor,
    reference=reference.quantize_fp8_tensor,
)
quantize_fp8_row = define(
    "quantize_fp8_row(Tensor x, ScalarType dtype, float eps=0., bool pow2=False)"
    " -> (Tensor, Tensor)",
    fake=_fake_row,
    reference=reference.quantize_fp8_row,
)
quantize_fp8_heads = define(
    "quantize_fp8_heads(Tensor x, ScalarType dtype, float eps=0., bool pow2=False)"
    " -> (Tensor, Tensor)",
    fake=_fake_heads,
    reference=reference.quantize_fp8_heads_by_row,
    compiled=False,
)
dequantize_fp8 = define(
    "dequantize_fp8(Tensor codes, Tensor scale_inv, ScalarType dtype) -> Tensor",
    fake=_fake_dequantize,
    reference=reference.dequantize_fp8,
)


def triton_casts_to_fp8(x: Tensor, *args: Any, **kwargs: Any) -> bool | str:
    """Return whether the lowerings can be compiled for the device of ``x``, or why not."""
    answer = cpu_or_nvidia(x)
    if answer is not True or x.device.type == "cpu":
        return answer
    capability = torch.cuda.get_device_capability(x.device)
    if capability < (8, 9):
        its = f"sm_{capability[0]}{capability[1]}"
        return f"Triton converts to float8 from sm_89 on, this device is {its}"
    return True


def _inputs(device: torch.device) -> Iterator[tuple[Tensor, torch.dtype]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for dtype in INPUT_DTYPES:
        for shape in ((3, 64), (5, 33), (2, 3, 40)):
            x = torch.randn(shape, generator=generator, device=device).to(dtype)
            for code in FP8_DTYPES:
                yield x, code


def _inputs_heads(device: torch.device) -> Iterator[tuple[Tensor, torch.dtype]]:
    for number, (x, dtype) in enumerate(_inputs(device)):
        heads = x.reshape(1, x.shape[0], -1, 11 if x.shape[-1] == 33 else 8)
        expanded = heads[:, :1].expand(2, 3, -1, -1)
        yield (heads, heads.transpose(1, 2), expanded)[number % 3], dtype


def _inputs_static(device: torch.device) -> Iterator[tuple[Tensor, Tensor, torch.dtype]]:
    for x, dtype in _inputs(device):
        yield x, torch.tensor(37.5, device=device), dtype
        yield x, torch.full((*x.shape[:-1], 1), 21.25, device=device), dtype


def _inputs_dequantize(device: torch.device) -> Iterator[tuple[Tensor, Tensor, torch.dtype]]:
    for x, dtype in _inputs(device):
        codes, scale_inv = reference.quantize_fp8_row(x, dtype)
        yield codes, scale_inv, x.dtype
        yield codes, scale_inv.flatten()[0], x.dtype


register(
    quantize_fp8_static,
    reference=reference.quantize_fp8_static,
    lowering=_LOWERINGS + "quantize_fp8_static",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_for_amax,
    inputs=_inputs_static,
)
register(
    quantize_fp8_tensor,
    reference=reference.quantize_fp8_tensor,
    lowering=_LOWERINGS + "quantize_fp8_tensor",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs,
)
register(
    quantize_fp8_row,
    reference=reference.quantize_fp8_row,
    lowering=_LOWERINGS + "quantize_fp8_row",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_unless_small,
    inputs=_inputs,
)
register(
    quantize_fp8_heads,
    reference=reference.quantize_fp8_heads,
    decomposition="inductor_ext.decompositions.fp8:quantize_fp8_heads_by_row",
    autograd=None,
    supports=triton_casts_to_fp8,
    inputs=_inputs_heads,
)
register(
    dequantize_fp8,
    reference=reference.dequantize_fp8,
    lowering=_LOWERINGS + "dequantize_fp8",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_unless_small,
    inputs=_inputs_dequantize,
)
