"""Other libraries' conventions: schemas, fakes and contracts. Never the default.

These ops are their formulas in plain PyTorch (``decompositions/modes.py``): eager mode runs them
step by step, there is no CUDA kernel; Inductor fuses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import modes as reference

from ..registry import register
from ..validation import FP8_DTYPES, check_dtype, check_same_device, check_tensor
from ._devices import cpu_or_nvidia
from ._library import define
from .amax import check_float, float_inputs
from .fp8 import triton_casts_to_fp8

FP8_MODES = ("torchao_training", "torchao_inference", "vllm")
MX_MODES = ("torchao_floor", "torchao_rceil")
NVFP4_MODES = ("torchao", "vllm")
BLOCKS = (-1, 0, 32, 64, 128, 256)

_MODES = "inductor_ext.decompositions.modes:"


def _check_mode(mode: str, allowed: tuple[str, ...]) -> None:
    if mode not in allowed:
        names = " or ".join(f'"{name}"' for name in allowed)
        raise ValueError(f'`mode` must be {names}, got "{mode}"')


def _check_columns(x: Tensor, block: int) -> None:
    if x.shape[-1] % block != 0:
        raise ValueError(f"`x` must have rows of a multiple of {block} elements, got {x.shape[-1]}")


def _check_block(x: Tensor, block: int) -> None:
    if block not in BLOCKS:
        raise ValueError(f"`block` must be -1, 0, 32, 64, 128 or 256, got {block}")
    check_float(x, rowwise=block != 0)
    if block > 0:
        _check_columns(x, block)


def _scale_like(x: Tensor, block: int) -> Tensor:
    shape = () if block == 0 else (*x.shape[:-1], 1 if block < 0 else x.shape[-1] // block)
    return x.new_empty(shape, dtype=torch.float32)


def _fake_div_rn(a: Tensor, b: Tensor) -> Tensor:
    for name, value in (("a", a), ("b", b)):
        check_tensor(name, value)
        check_dtype(name, value.dtype, (torch.float32,))
    check_same_device("b", b, "a", a)
    if tuple(torch.broadcast_shapes(a.shape, b.shape)) != tuple(a.shape):
        raise ValueError(f"`b` must broadcast to {tuple(a.shape)}, got {tuple(b.shape)}")
    return a.new_empty(a.shape)


def _fake_fp8(x: Tensor, dtype: torch.dtype, block: int, mode: str) -> tuple[Tensor, Tensor]:
    _check_block(x, block)
    check_dtype("dtype", dtype, FP8_DTYPES)
    _check_mode(mode, FP8_MODES)
    return x.new_empty(x.shape, dtype=dtype), _scale_like(x, block)


def _fake_mxfp8(x: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    check_float(x, rowwise=True)
    check_dtype("dtype", dtype, FP8_DTYPES)
    _check_columns(x, 32)
    _check_mode(mode, MX_MODES)
    return x.new_empty(x.shape, dtype=dtype), _scale_like(x, 32).to(torch.uint8)


def _fake_int8(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    _check_block(x, block)
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, block)


def _fake_nvfp4(x: Tensor, global_scale: Tensor | None, mode: str) -> tuple[Tensor, Tensor]:
    check_float(x, rowwise=True)
    _check_columns(x, 16)
    _check_mode(mode, NVFP4_MODES)
    if global_scale is not None:
        check_tensor("global_scale", global_scale)
        check_dtype("global_scale", global_scale.dtype, (torch.float32,))
        check_same_device("global_scale", global_scale, "x", x)
        if global_scale.numel() != 1:
            shape = tuple(global_scale.shape)
            raise ValueError(f"`global_scale` must have one element, got {shape}")
    elif mode == "vllm":
        raise ValueError('`global_scale` must be given in the mode "vllm", got None')
    codes = x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)
    return codes, _scale_like(x, 16).to(torch.float8_e4m3fn)


div_rn = define(
    "div_rn(Tensor a, Tensor b) -> Tensor",
    fake=_fake_div_rn,
    reference=reference.div_rn,
    compiled=False,
)
quantize_fp8_mode = define(
    "quantize_fp8_mode(Tensor x, ScalarType dtype, int block, str mode) -> (Tensor, Tensor)",
    fake=_fake_fp8,
    reference=reference.quantize_fp8_mode,
    compiled=False,
)
quantize_mxfp8_mode = define(
    "quantize_mxfp8_mode(Tensor x, ScalarType dtype, str mode) -> (Tensor, Tensor)",
    fake=_fake_mxfp8,
    reference=reference.quantize_mxfp8_mode,
    compiled=False,
)
quantize_int8_mode = define(
    "quantize_int8_mode(Tensor x, int block) -> (Tensor, Tensor)",
    fake=_fake_int8,
    reference=reference.quantize_int8_mode,
    compiled=False,
)
quantize_nvfp4_mode = define(
    "quantize_nvfp4_mode(Tensor x, Tensor? global_scale, str mode) -> (Tensor, Tensor)",
    fake=_fake_nvfp4,
    reference=reference.quantize_nvfp4_mode,
    compiled=False,
)


def _inputs_div(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for x in float_inputs(device, 64):
        if x.dtype == torch.float32:
            yield x, x.flip(-1)
            yield x, x[..., :1]
            yield x, x.flatten()[0]


def _inputs_fp8(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x in float_inputs(device):
        for number, mode in enumerate(FP8_MODES):
            for block in (0, -1, 32):
                yield x, FP8_DTYPES[(number + block) % 2], block, mode


def _inputs_mxfp8(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x in float_inputs(device):
        for number, mode in enumerate(MX_MODES):
            yield x, FP8_DTYPES[number], mode


def _inputs_int8(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x in float_inputs(device):
        for block in (0, -1, 32):
            yield x, block


def _inputs_nvfp4(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x in float_inputs(device):
        whole = torch.tensor(3.5 / 2688, device=device)
        yield x, whole, "torchao"
        yield x, None, "torchao"
        yield x, 1 / whole, "vllm"


register(
    div_rn,
    reference=reference.div_rn,
    lowering="inductor_ext.lowerings.division:div_rn",
    autograd=None,
    supports=cpu_or_nvidia,
    inputs=_inputs_div,
)
register(
    quantize_fp8_mode,
    reference=reference.quantize_fp8_mode,
    decomposition=_MODES + "quantize_fp8_mode",
    autograd=None,
    supports=triton_casts_to_fp8,
    inputs=_inputs_fp8,
)
register(
    quantize_mxfp8_mode,
    reference=reference.quantize_mxfp8_mode,
    decomposition=_MODES + "quantize_mxfp8_mode",
    autograd=None,
    supports=triton_casts_to_fp8,
    inputs=_inputs_mxfp8,
)
register(
    quantize_int8_mode,
    reference=reference.quantize_int8_mode,
    decomposition=_MODES + "quantize_int8_mode",
    autograd=None,
    supports=cpu_or_nvidia,
    inputs=_inputs_int8,
)
register(
    quantize_nvfp4_mode,
    reference=reference.quantize_nvfp4_mode,
    decomposition=_MODES + "quantize_nvfp4_mode",
    autograd=None,
    supports=triton_casts_to_fp8,
    inputs=_inputs_nvfp4,
)
