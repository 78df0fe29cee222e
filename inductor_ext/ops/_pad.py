"""A matrix as a larger one, zeros behind it: one kernel on CUDA, PyTorch's passes elsewhere.

Kernel: ``kernels/cuda/pad.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import LIBRARY, has_cuda_kernel

NAME = "_pad"
LIBRARY.define(f"{NAME}(Tensor matrix, int rows, int columns) -> Tensor")
torch.library.register_fake(
    f"inductor_ext::{NAME}", lambda x, rows, columns: x.new_empty((rows, columns)), lib=LIBRARY
)
_OP = torch.ops.inductor_ext._pad.default


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix of any strides as (rows, columns), contiguous, with zeros behind it.

    Args:
        matrix: (<= rows, <= columns), of 8 or 16 bits or float32.
        columns: filling a multiple of 16 bytes.
    """
    if matrix.is_cuda and has_cuda_kernel(NAME):
        made: Tensor = _OP(matrix, rows, columns)
        return made
    return padded_in_passes(matrix, rows, columns)


def padded_in_passes(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Do what :func:`padded` says with PyTorch's kernels: a fill and a copy."""
    kept = matrix.dtype
    if matrix.element_size() == 1:  # nothing fills float8
        matrix = matrix.view(torch.uint8)
    made = matrix.new_zeros((rows, columns))
    made[: matrix.shape[0], : matrix.shape[1]] = matrix
    return made.view(kept)
