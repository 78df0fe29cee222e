"""Matrices as larger ones, zeros behind them: one kernel on CUDA, PyTorch's passes elsewhere.

Kernel: ``kernels/cuda/pad.cu``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._library import LIBRARY, has_cuda_kernel

NAME = "_pad"
LIBRARY.define(f"{NAME}(Tensor[] matrices, int[] rows, int[] columns) -> Tensor[]")
_OP = torch.ops.inductor_ext._pad.default


class Wanted(NamedTuple):
    """A matrix of any strides, of 8 or 16 bits or float32, and the sizes that it is to have.

    Args:
        matrix: (<= rows, <= columns).
        columns: filling a multiple of 16 bytes where the matrix is smaller.
    """

    matrix: Tensor
    rows: int
    columns: int

    @property
    def grows(self) -> bool:
        """Whether there is anything to put behind the matrix."""
        rows, columns = self.matrix.shape
        return (rows, columns) != (self.rows, self.columns)


def _fake(matrices: list[Tensor], rows: list[int], columns: list[int]) -> list[Tensor]:
    wanted = map(Wanted, matrices, rows, columns)
    return [each.matrix.new_empty((each.rows, each.columns)) for each in wanted]


torch.library.register_fake(f"inductor_ext::{NAME}", _fake, lib=LIBRARY)


def padded(*wanted: Wanted) -> list[Tensor]:
    """Return up to four matrices with zeros behind them, contiguous."""
    if wanted[0].matrix.is_cuda and has_cuda_kernel(NAME):
        made: list[Tensor] = _OP(*zip(*wanted, strict=True))
        return made
    return [padded_in_passes(each) for each in wanted]


def padded_in_passes(wanted: Wanted) -> Tensor:
    """Do for one matrix what :func:`padded` says, with PyTorch's kernels: a fill and a copy."""
    matrix, kept = wanted.matrix, wanted.matrix.dtype
    if matrix.element_size() == 1:  # nothing fills float8
        matrix = matrix.view(torch.uint8)
    made = matrix.new_zeros((wanted.rows, wanted.columns))
    made[: matrix.shape[0], : matrix.shape[1]] = matrix
    return made.view(kept)
