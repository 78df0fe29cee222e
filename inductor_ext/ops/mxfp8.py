"""MXFP8 (FP8 codes, e8m0 scales for blocks of 32): schemas, fakes and contracts.

Arithmetic: ``decompositions/mxfp8.py``; compiled form: ``lowerings/mxfp8.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import mxfp8 as reference

from ..registry import register
from ._alone import kernel_but_for_plain_rows, kernel_unless_small, own_kernel
from ._blocks import (
    LAYOUTS,
    ceil_div,
    check_choice,
    check_codes,
    check_input,
    check_result,
    matrix_shape,
    round_up,
    sample_inputs,
)
from ._library import define
from .fp8 import triton_casts_to_fp8

_LOWERINGS = "inductor_ext.lowerings.mxfp8:"
MODES = ("ceil", "floor")
BLOCKS = ((1, 32), (32, 1), (32, 32))


def check_block(block_m: int, block_k: int) -> None:
    """Raise ValueError unless the block is 1 x 32, 32 x 1 or 32 x 32."""
    if (block_m, block_k) not in BLOCKS:
        raise ValueError(
            "`block_m` and `block_k` must be (1, 32), (32, 1) or (32, 32), "
            f"got ({block_m}, {block_k})"
        )


def check_quantize(
    x: Tensor, dtype: torch.dtype, block_m: int, block_k: int, mode: str, layout: str
) -> None:
    """Raise TypeError or ValueError for arguments that ``quantize_mxfp8`` does not take."""
    check_input(x, dtype)
    check_block(block_m, block_k)
    check_choice("mode", mode, MODES)
    check_choice("layout", layout, LAYOUTS)


def check_dequantize(
    codes: Tensor, scales: Tensor, block_m: int, block_k: int, dtype: torch.dtype, layout: str
) -> None:
    """Raise TypeError or ValueError for arguments that ``dequantize_mxfp8`` does not take."""
    check_codes(codes, dtype)
    check_block(block_m, block_k)
    check_choice("layout", layout, LAYOUTS)
    shape = _scale_shape(codes, block_m, block_k, False, layout)
    check_result("scales", scales, torch.uint8, codes, shape)


def _scale_shape(
    x: Tensor, block_m: int, block_k: int, transposed: bool, layout: str
) -> tuple[int, ...]:
    rows, columns = matrix_shape(x)
    down, across = ceil_div(rows, block_m), ceil_div(columns, block_k)
    if layout == "gemm":
        along_m = block_k == 1 or (block_m > 1 and transposed)
        length, blocks = (columns, down) if along_m else (rows, across)
        return round_up(length, 128), round_up(blocks, 4)
    if transposed:
        return across, down
    return (*x.shape[:-1], across) if block_m == 1 else (down, across)


def _fake(
    x: Tensor,
    dtype: torch.dtype,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    mode: str = "ceil",
    layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    check_quantize(x, dtype, block_m, block_k, mode, layout)
    shape = matrix_shape(x)[::-1] if transposed else x.shape
    scales = _scale_shape(x, block_m, block_k, transposed, layout)
    return x.new_empty(shape, dtype=dtype), x.new_empty(scales, dtype=torch.uint8)


def _fake_both(
    x: Tensor,
    dtype: torch.dtype,
    square: bool,
    transposed: bool = True,
    mode: str = "ceil",
    layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    other = 32 if square else 1
    along_k = _fake(x, dtype, other, 32, False, mode, layout)
    along_m = _fake(x, dtype, 32, other, transposed, mode, layout)
    return (*along_k, *along_m)


def _fake_dequantize(
    codes: Tensor,
    scales: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Tensor:
    check_dequantize(codes, scales, block_m, block_k, dtype, layout)
    return codes.new_empty(codes.shape, dtype=dtype)


quantize_mxfp8 = define(
    "quantize_mxfp8(Tensor x, ScalarType dtype, int block_m, int block_k, "
    'bool transposed=False, str mode="ceil", str layout="plain") -> (Tensor, Tensor)',
    fake=_fake,
    reference=reference.quantize_mxfp8,
)
quantize_mxfp8_both = define(
    "quantize_mxfp8_both(Tensor x, ScalarType dtype, bool square, bool transposed=True, "
    'str mode="ceil", str layout="plain") -> (Tensor, Tensor, Tensor, Tensor)',
    fake=_fake_both,
    reference=reference.quantize_mxfp8_both,
)
dequantize_mxfp8 = define(
    "dequantize_mxfp8(Tensor codes, Tensor scales, int block_m, int block_k, "
    'ScalarType dtype, str layout="plain") -> Tensor',
    fake=_fake_dequantize,
    reference=reference.dequantize_mxfp8,
)


SAMPLES = ((3, 160), (70, 133), (2, 3, 200))


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, dtype) in enumerate(sample_inputs(device, SAMPLES)):
        mode, layout = MODES[number // 2 % 2], LAYOUTS[number % 2]
        yield x, dtype, 1, 32, False, mode, layout
        yield x, dtype, 32, 1, number % 2 == 0, mode, layout
        yield x, dtype, 32, 32, number % 4 < 2, mode, layout


def _inputs_both(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, dtype) in enumerate(sample_inputs(device, SAMPLES)):
        mode, layout = MODES[number // 2 % 2], LAYOUTS[number % 2]
        yield x, dtype, number % 2 == 1, number % 4 < 2, mode, layout


def _inputs_dequantize(device: torch.device) -> Iterator[tuple[Any, ...]]:
    # Blocks in one row only: the harness changes the number of rows, and that of scales with it.
    for x, dtype in sample_inputs(device, SAMPLES):
        codes, scales = reference.quantize_mxfp8(x, dtype, 1, 32)
        yield codes, scales, 1, 32, x.dtype


register(
    quantize_mxfp8,
    reference=reference.quantize_mxfp8,
    lowering=_LOWERINGS + "quantize_mxfp8",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_unless_small,
    inputs=_inputs,
)
register(
    quantize_mxfp8_both,
    reference=reference.quantize_mxfp8_both,
    lowering=_LOWERINGS + "quantize_mxfp8_both",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs_both,
)
register(
    dequantize_mxfp8,
    reference=reference.dequantize_mxfp8,
    lowering=_LOWERINGS + "dequantize_mxfp8",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_but_for_plain_rows,
    inputs=_inputs_dequantize,
)
