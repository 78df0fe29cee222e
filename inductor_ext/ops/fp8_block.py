"""FP8 with a scale a block: schemas, fakes and contracts.

Arithmetic: ``decompositions/fp8_block.py``; compiled form: ``lowerings/fp8_block.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import fp8_block as reference

from ..registry import register
from ..validation import check_eps
from ._alone import kernel_on_cpu, kernel_unless_small, own_kernel
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

_LOWERINGS = "inductor_ext.lowerings.fp8_block:"
BLOCKS = (32, 64, 128)


def check_block(block_m: int, block_k: int) -> None:
    """Raise ValueError unless the block is 1 x G, G x 1 or G x G."""
    size = max(block_m, block_k)
    if size not in BLOCKS or min(block_m, block_k) not in (1, size):
        raise ValueError(
            "`block_m` and `block_k` must be (1, G), (G, 1) or (G, G) with G = 32, 64 or 128, "
            f"got ({block_m}, {block_k})"
        )


def _check_layout(layout: str, columns: bool) -> None:
    check_choice("layout", layout, LAYOUTS)
    if columns and layout == "gemm":
        raise ValueError(
            '`layout` must be "plain" for G x 1 blocks of codes that are not transposed (a GEMM '
            'takes them transposed), got "gemm"'
        )


def check_quantize(
    x: Tensor,
    dtype: torch.dtype,
    block_m: int,
    block_k: int,
    transposed: bool,
    eps: float,
    layout: str,
) -> None:
    """Raise TypeError or ValueError for arguments that ``quantize_fp8_block`` does not take."""
    check_input(x, dtype)
    check_block(block_m, block_k)
    check_eps(eps)
    _check_layout(layout, columns=block_k == 1 and not transposed)


def check_quantize_both(x: Tensor, dtype: torch.dtype, block: int, eps: float, layout: str) -> None:
    """Raise TypeError or ValueError for arguments that ``..._block_both`` does not take."""
    check_input(x, dtype)
    if block not in BLOCKS:
        raise ValueError(f"`block` must be 32, 64 or 128, got {block}")
    check_eps(eps)
    check_choice("layout", layout, LAYOUTS)


def check_dequantize(
    codes: Tensor,
    scale_inv: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str,
) -> None:
    """Raise TypeError or ValueError for arguments that ``dequantize_fp8_block`` does not take."""
    check_codes(codes, dtype)
    check_block(block_m, block_k)
    _check_layout(layout, columns=block_k == 1)
    shape = _scale_shape(codes, block_m, block_k, layout)
    check_result("scale_inv", scale_inv, torch.float32, codes, shape)


def _scale_shape(x: Tensor, block_m: int, block_k: int, layout: str) -> tuple[int, ...]:
    """Return the shape of the scales of codes that are not transposed."""
    rows, columns = matrix_shape(x)
    if block_m == 1 and layout == "plain":
        return (*x.shape[:-1], ceil_div(columns, block_k))
    return _matrix_scale_shape(rows, columns, block_m, block_k, layout)


def _matrix_scale_shape(
    rows: int, columns: int, block_m: int, block_k: int, layout: str
) -> tuple[int, int]:
    down, across = ceil_div(rows, block_m), ceil_div(columns, block_k)
    return (down, round_up(across, 4) if layout == "gemm" and block_m == block_k else across)


def _fake(
    x: Tensor,
    dtype: torch.dtype,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
    layout: str = "plain",
) -> tuple[Tensor, Tensor]:
    check_quantize(x, dtype, block_m, block_k, transposed, eps, layout)
    if transposed:
        rows, columns = matrix_shape(x)
        codes = x.new_empty((columns, rows), dtype=dtype)
        shape: tuple[int, ...] = _matrix_scale_shape(columns, rows, block_k, block_m, layout)
    else:
        codes = x.new_empty(x.shape, dtype=dtype)
        shape = _scale_shape(x, block_m, block_k, layout)
    if layout == "gemm" and block_m != block_k:  # column-major
        return codes, x.new_empty(shape[::-1], dtype=torch.float32).t()
    return codes, x.new_empty(shape, dtype=torch.float32)


def _fake_both(
    x: Tensor,
    dtype: torch.dtype,
    block: int,
    square: bool,
    eps: float = 0.0,
    pow2: bool = False,
    layout: str = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_quantize_both(x, dtype, block, eps, layout)
    other = block if square else 1
    rows = _fake(x, dtype, other, block, False, eps, pow2, layout)
    columns = _fake(x, dtype, block, other, True, eps, pow2, layout)
    return (*rows, *columns)


def _fake_dequantize(
    codes: Tensor,
    scale_inv: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Tensor:
    check_dequantize(codes, scale_inv, block_m, block_k, dtype, layout)
    return codes.new_empty(codes.shape, dtype=dtype)


quantize_fp8_block = define(
    "quantize_fp8_block(Tensor x, ScalarType dtype, int block_m, int block_k, "
    'bool transposed=False, float eps=0., bool pow2=False, str layout="plain")'
    " -> (Tensor, Tensor)",
    fake=_fake,
    reference=reference.quantize_fp8_block,
)
quantize_fp8_block_both = define(
    "quantize_fp8_block_both(Tensor x, ScalarType dtype, int block, bool square, "
    'float eps=0., bool pow2=False, str layout="plain") -> (Tensor, Tensor, Tensor, Tensor)',
    fake=_fake_both,
    reference=reference.quantize_fp8_block_both,
)
dequantize_fp8_block = define(
    "dequantize_fp8_block(Tensor codes, Tensor scale_inv, int block_m, int block_k, "
    'ScalarType dtype, str layout="plain") -> Tensor',
    fake=_fake_dequantize,
    reference=reference.dequantize_fp8_block,
)


SAMPLES = ((3, 160), (70, 33), (2, 3, 520))


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, dtype) in enumerate(sample_inputs(device, SAMPLES)):
        size = BLOCKS[number // 3]
        yield x, dtype, 1, size, False, 0.0, False, ("plain", "gemm")[number % 2]
        yield x, dtype, size, 1, True, 0.0, True, ("gemm", "plain")[number % 2]
        yield x, dtype, size, size, number % 2 == 0, 1e-12, False, ("plain", "gemm")[number % 2]
    yield x, dtype, 32, 1


def _inputs_both(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, (x, dtype) in enumerate(sample_inputs(device, SAMPLES)):
        layout = ("plain", "gemm")[number // 2 % 2]
        yield x, dtype, BLOCKS[number // 3], number % 2 == 0, 0.0, number % 2 == 1, layout


def _inputs_dequantize(device: torch.device) -> Iterator[tuple[Any, ...]]:
    # Blocks in one row only: the harness changes the number of rows, and that of scales with it.
    for number, (x, dtype) in enumerate(sample_inputs(device, SAMPLES)):
        size, layout = BLOCKS[number // 3], ("plain", "gemm")[number // 3 % 2]
        codes, scale_inv = reference.quantize_fp8_block(x, dtype, 1, size, layout=layout)
        yield codes, scale_inv, 1, size, x.dtype, layout


register(
    quantize_fp8_block,
    reference=reference.quantize_fp8_block,
    lowering=_LOWERINGS + "quantize_fp8_block",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_unless_small,
    inputs=_inputs,
)
register(
    quantize_fp8_block_both,
    reference=reference.quantize_fp8_block_both,
    lowering=_LOWERINGS + "quantize_fp8_block_both",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs_both,
)
register(
    dequantize_fp8_block,
    reference=reference.dequantize_fp8_block,
    lowering=_LOWERINGS + "dequantize_fp8_block",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=kernel_on_cpu,
    inputs=_inputs_dequantize,
)
