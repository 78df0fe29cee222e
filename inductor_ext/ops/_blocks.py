"""Checks and shapes that the block formats share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from inductor_ext.decompositions.blocks import as_matrix, ceil_div, round_up

from ..validation import FP8_DTYPES, INPUT_DTYPES, check_dtype, check_same_device, check_tensor

__all__ = ["as_matrix", "ceil_div", "check_choice", "check_codes", "check_input", "check_result",
           "matrix_shape", "round_up"]  # fmt: skip

LAYOUTS = ("plain", "gemm")


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """Return (M, K) for (*, K)."""
    return math.prod(x.shape[:-1]), x.shape[-1]


def check_input(x: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless ``x`` can be cut into blocks of FP8 codes."""
    check_tensor("x", x)
    check_dtype("x", x.dtype, INPUT_DTYPES)
    check_dtype("dtype", dtype, FP8_DTYPES)
    check_has_rows("x", x)


def check_has_rows(name: str, x: Tensor) -> None:
    """Raise ValueError for a 0-d tensor."""
    if x.dim() == 0:
        raise ValueError(f"`{name}` must have at least 1 dimension, got 0")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        said = " or ".join(f'"{choice}"' for choice in allowed)
        raise ValueError(f'`{name}` must be {said}, got "{value}"')


def check_codes(codes: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless ``codes`` is (*, K) FP8 and ``dtype`` is wide."""
    check_tensor("codes", codes)
    check_dtype("codes", codes.dtype, FP8_DTYPES)
    check_dtype("dtype", dtype, INPUT_DTYPES)
    check_has_rows("codes", codes)


def check_result(
    name: str, scale: Tensor, dtype: torch.dtype, codes: Tensor, shape: tuple[int, ...]
) -> None:
    """Raise TypeError or ValueError unless ``scale`` is what came with ``codes``."""
    check_tensor(name, scale)
    check_dtype(name, scale.dtype, (dtype,))
    check_same_device(name, scale, "codes", codes)
    if tuple(scale.shape) != shape:
        raise ValueError(f"`{name}` must have the shape {shape}, got {tuple(scale.shape)}")


def sample_inputs(
    device: torch.device, shapes: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield inputs of each shape and dtype for the harness, with a target."""
    generator = torch.Generator(device=device).manual_seed(0)
    for number, shape in enumerate(shapes):
        for place, dtype in enumerate(INPUT_DTYPES):
            x = torch.randn(shape, generator=generator, device=device).to(dtype)
            yield x, FP8_DTYPES[(number + place) % 2]
