"""NVFP4: schemas, fakes and contracts.

Arithmetic: ``decompositions/nvfp4.py``; compiled form: ``lowerings/nvfp4.py``; kernels:
``kernels/cuda/nvfp4.cu`` and ``kernels/cpu/nvfp4.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import nvfp4 as reference

from ..registry import register
from ..validation import (
    INPUT_DTYPES,
    check_dtype,
    check_same_device,
    check_scale,
    check_tensor,
)
from ._alone import own_kernel
from ._blocks import (
    LAYOUTS,
    ceil_div,
    check_choice,
    check_has_rows,
    check_result,
    matrix_shape,
    round_up,
)
from ._library import define
from .fp8 import triton_casts_to_fp8

BLOCK = 16
_LOWERINGS = "inductor_ext.lowerings.nvfp4:"
_SCALE = torch.float8_e4m3fn


def check_quantize(
    x: Tensor,
    amax: Tensor,
    block: tuple[int, int],
    transposed: bool,
    layout: str,
    hadamard: bool,
    rng: Tensor | None,
    amax_name: str = "amax",
) -> None:
    """Raise TypeError or ValueError for arguments that ``quantize_nvfp4`` does not take."""
    check_input(x)
    if not (block == (BLOCK, BLOCK) or block == ((16, 1) if transposed else (1, 16))):
        raise ValueError(
            "(`block_m`, `block_k`) must be (1, 16), (16, 1) with transposed=True, or (16, 16), "
            f"got {block} with transposed={transposed}"
        )
    check_choice("layout", layout, LAYOUTS)
    square = block == (BLOCK, BLOCK)
    if hadamard and square:
        raise ValueError("`hadamard` must be False for blocks of 16x16, got True")
    check_multiple(x, transposed)
    check_amax(amax_name, amax, x, transposed, square)
    if rng is not None:
        check_rng(rng, x)


def check_input(x: Tensor) -> None:
    """Raise unless ``x`` is a floating-point tensor of at least one dimension."""
    check_tensor("x", x)
    check_dtype("x", x.dtype, INPUT_DTYPES)
    check_has_rows("x", x)


def check_multiple(x: Tensor, transposed: bool) -> None:
    """Raise ValueError unless the axis that is packed is a multiple of 16."""
    size = matrix_shape(x)[0 if transposed else 1]
    if size % BLOCK == 0:
        return
    what = "rows (the product of all dimensions but the last)" if transposed else "columns"
    best = round_up(size, BLOCK)
    raise ValueError(
        f"`x` must have a multiple of {BLOCK} {what}, got {size}; padded with zeros to {best} it "
        "works"
    )


def check_amax(name: str, amax: Tensor, x: Tensor, transposed: bool, square: bool) -> None:
    """Raise unless ``amax`` is float32 with one element, or one a row of the result."""
    check_tensor(name, amax)
    check_dtype(name, amax.dtype, (torch.float32,))
    check_same_device(name, amax, "x", x)
    if not (square or transposed):
        check_scale(name, amax, "x", x)
        return
    per_column = amax.dim() == 2 and amax.shape[0] == x.shape[-1] and amax.shape[1] == 1
    if amax.numel() == 1 or (per_column and not square):
        return
    other = "" if square else f" or the shape {(x.shape[-1], 1)}, an amax for each column of `x`"
    why = " for blocks of 16x16" if square else ""
    raise ValueError(f"`{name}` must have one element{other}{why}, got {tuple(amax.shape)}")


def check_rng(rng: Tensor, x: Tensor) -> None:
    """Raise unless ``rng`` is (seed, offset), int64, on the device of ``x``."""
    check_tensor("rng", rng)
    check_dtype("rng", rng.dtype, (torch.int64,))
    check_same_device("rng", rng, "x", x)
    if rng.dim() != 1 or rng.shape[0] != 2:
        raise ValueError(f"`rng` must have the shape (2,), seed and offset, got {tuple(rng.shape)}")


def check_dequantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    layout: str,
) -> None:
    """Raise TypeError or ValueError for arguments that ``dequantize_nvfp4`` does not take."""
    check_tensor("codes", codes)
    check_dtype("codes", codes.dtype, (torch.uint8,))
    check_has_rows("codes", codes)
    if codes.shape[-1] % 8 != 0:
        raise ValueError(
            f"`codes` must have a multiple of 8 columns (16 elements), got {codes.shape[-1]}"
        )
    check_dtype("dtype", dtype, INPUT_DTYPES)
    if block not in ((1, BLOCK), (BLOCK, BLOCK)):
        raise ValueError(f"(`block_m`, `block_k`) must be (1, 16) or (16, 16), got {block}")
    check_choice("layout", layout, LAYOUTS)
    expected = _scale_shape(codes.shape[:-1], codes.shape[-1] // 8, block[0] == BLOCK, layout)
    check_result("scales", scales, _SCALE, codes, expected)
    check_scale("amax", amax, "codes", codes)


def _scale_shape(outer: tuple[int, ...], blocks: int, square: bool, layout: str) -> tuple[int, ...]:
    rows = math.prod(outer)
    if layout == "gemm":
        return round_up(rows, 128), round_up(blocks, 4)
    return (ceil_div(rows, BLOCK), blocks) if square else (*outer, blocks)


def _results(x: Tensor, square: bool, transposed: bool, layout: str) -> tuple[Tensor, Tensor]:
    rows, columns = matrix_shape(x)
    outer, length = ((columns,), rows) if transposed else (x.shape[:-1], columns)
    shape = _scale_shape(outer, length // BLOCK, square, layout)
    codes = torch.empty((*outer, length // 2), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(shape, dtype=_SCALE, device=x.device)


def _fake_quantize(
    x: Tensor,
    amax: Tensor,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    layout: str = "plain",
    hadamard: bool = False,
    rng: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_quantize(x, amax, (block_m, block_k), transposed, layout, hadamard, rng)
    return _results(x, block_m == block_k, transposed, layout)


def _fake_both(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    square: bool,
    layout: str = "plain",
    hadamard: bool = False,
    rng: Tensor | None = None,
) -> tuple[Tensor, ...]:
    block = BLOCK if square else 1
    check_quantize(x, amax, (block, BLOCK), False, layout, hadamard and square, rng)
    check_quantize(x, amax_t, (BLOCK, block), True, layout, hadamard, rng, "amax_t")
    return _results(x, square, False, layout) + _results(x, square, True, layout)


def _fake_amax_hadamard(x: Tensor, transposed: bool) -> Tensor:
    check_input(x)
    check_multiple(x, transposed)
    return x.new_empty((), dtype=torch.float32)


def _fake_dequantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Tensor:
    check_dequantize(codes, scales, amax, (block_m, block_k), dtype, layout)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    return torch.empty(shape, dtype=dtype, device=codes.device)


quantize_nvfp4 = define(
    "quantize_nvfp4(Tensor x, Tensor amax, int block_m, int block_k, bool transposed=False, "
    'str layout="plain", bool hadamard=False, Tensor? rng=None) -> (Tensor, Tensor)',
    fake=_fake_quantize,
    reference=reference.quantize_nvfp4,
)
quantize_nvfp4_both = define(
    'quantize_nvfp4_both(Tensor x, Tensor amax, Tensor amax_t, bool square, str layout="plain", '
    "bool hadamard=False, Tensor? rng=None) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_both,
    reference=reference.quantize_nvfp4_both,
)
amax_hadamard = define(
    "amax_hadamard(Tensor x, bool transposed) -> Tensor",
    fake=_fake_amax_hadamard,
    reference=reference.amax_hadamard,
)
dequantize_nvfp4 = define(
    "dequantize_nvfp4(Tensor codes, Tensor scales, Tensor amax, int block_m, int block_k, "
    'ScalarType dtype, str layout="plain") -> Tensor',
    fake=_fake_dequantize,
    reference=reference.dequantize_nvfp4,
)


def _xs(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs whose rows and columns are multiples of 16, with their amax."""
    generator = torch.Generator(device=device).manual_seed(0)
    for dtype in INPUT_DTYPES:
        for shape in ((3, 16, 48), (5, 16, 32)):
            x = torch.randn(shape, generator=generator, device=device).to(dtype)
            yield x, x.float().abs().amax()


# Nothing stochastic here: under dynamic shapes a batch of 2 is taken for the size of `rng`.
def _inputs_quantize(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, amax in _xs(device):
        yield x, amax, 1, 16
        yield x, amax, 16, 16, True
        yield x, amax, 16, 1, True, "gemm", True
        yield x, amax, 16, 16, False, "gemm"
        yield x, x.float().abs().amax(-1, keepdim=True), 1, 16, False, "gemm"


def _inputs_both(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, amax in _xs(device):
        yield x, amax, amax, True
        yield x, amax, amax, True, "gemm"
        yield x, amax, amax * 2, False
        yield x, amax, amax * 2, False, "gemm"
        yield x, amax, amax * 4, False, "plain", True


def _inputs_amax(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, _ in _xs(device):
        yield x, True
        yield x, False


def _inputs_dequantize(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, amax in _xs(device):
        yield *reference.quantize_nvfp4(x, amax, 1, 16), amax, 1, 16, x.dtype
        yield *reference.quantize_nvfp4(x, amax, 16, 16), amax, 16, 16, x.dtype


register(
    quantize_nvfp4,
    reference=reference.quantize_nvfp4,
    lowering=_LOWERINGS + "quantize_nvfp4",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs_quantize,
)
register(
    quantize_nvfp4_both,
    reference=reference.quantize_nvfp4_both,
    lowering=_LOWERINGS + "quantize_nvfp4_both",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs_both,
)
register(
    amax_hadamard,
    reference=reference.amax_hadamard,
    lowering=_LOWERINGS + "amax_hadamard",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs_amax,
)
register(
    dequantize_nvfp4,
    reference=reference.dequantize_nvfp4,
    lowering=_LOWERINGS + "dequantize_nvfp4",
    autograd=None,
    supports=triton_casts_to_fp8,
    kernel_alone=own_kernel,
    inputs=_inputs_dequantize,
)
