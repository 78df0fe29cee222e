"""Matrices as larger ones: PyTorch's passes against numpy, and the kernel against the passes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from inductor_ext.ops import _pad
from inductor_ext.ops._library import has_cuda_kernel

DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.int8, torch.bfloat16, torch.float32)
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def views(device: str) -> Iterator[Tensor]:
    """Yield bytes, words of 16 and of 32 bits: rows at any address, columns, one row, nothing."""
    data = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(0))
    data = data.to(torch.uint8).to(device)
    for dtype in DTYPES:
        flat = data[: 5000 // 8 * 8].view(dtype)
        for start in range(0, 5, 1 if flat.element_size() == 1 else 3):
            for rows, cols in ((1, 1), (3, 5), (17, 16), (9, 34), (2, 146), (13, 31)):
                mine = flat[start : start + rows * cols].view(rows, cols)
                yield mine
                yield mine.t()
                yield mine[:, : cols // 2]
                yield mine[::2, ::3]
        yield flat[:1].view(1, 1).expand(1, 7)
        yield flat[:0].view(0, 3)
        yield flat[:0].view(3, 0)


def sizes_of(matrix: Tensor) -> Iterator[tuple[int, int]]:
    """Yield sizes of the result: columns alone, and both."""
    unit = 16 // matrix.element_size()
    columns = -(-matrix.shape[1] // unit) * unit
    yield matrix.shape[0], columns
    yield matrix.shape[0] + 3, columns + 2 * unit


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(RAW[t.element_size()])


def test_passes() -> None:
    for matrix in views("cpu"):
        for rows, columns in sizes_of(matrix):
            (made,) = _pad.padded(_pad.Wanted(matrix, rows, columns))
            behind = [(0, rows - matrix.shape[0]), (0, columns - matrix.shape[1])]
            want = np.pad(bits(matrix).numpy(), behind)
            assert made.dtype == matrix.dtype
            assert made.is_contiguous()
            np.testing.assert_array_equal(bits(made).numpy(), want)


def check_kernel(*matrices: Tensor) -> None:
    """Require what the passes give."""
    for both in zip(*map(sizes_of, matrices), strict=True):
        wanted = [_pad.Wanted(x, *size) for x, size in zip(matrices, both, strict=True)]
        for made, each in zip(_pad.padded(*wanted), wanted, strict=True):
            want = _pad.padded_in_passes(each)
            assert made.dtype == want.dtype
            assert made.stride() == want.stride()
            assert torch.equal(bits(made), bits(want)), each


@pytest.mark.gpu
def test_kernel() -> None:
    assert has_cuda_kernel(_pad.NAME)
    every = list(views("cuda"))
    for matrix in every:
        check_kernel(matrix)
    for count in (2, 3, 4):  # at a time, of any dtypes, empty ones among them
        for start in range(0, len(every) - 60, 7):
            check_kernel(*every[start : start + 20 * count : 20])


@pytest.mark.gpu
def test_kernel_of_a_large_matrix() -> None:
    """Offsets beyond 2^31."""
    large = torch.randint(0, 256, (40000, 65537), dtype=torch.uint8, device="cuda")
    small, made = _pad.padded(_pad.Wanted(large[:1], 1, 65552), _pad.Wanted(large, 40001, 65552))
    assert torch.equal(small, made[:1])
    assert torch.equal(made[:40000, :65537], large)
    assert not made[40000].any()
    assert not made[:, 65537:].any()


@pytest.mark.gpu
def test_kernel_refuses() -> None:
    x = torch.zeros(4, 8, device="cuda")
    for matrices, rows, columns, words in (
        ([x[0]], [4], [8], "`matrices` must have 2 dimensions"),
        ([x.double()], [4], [8], "`matrices` must be float32"),
        ([x], [3], [8], "`rows` must be at least 4"),
        ([x], [4], [4], "`columns` must be at least 8"),
        ([x], [4], [9], "fill 16 bytes"),
        ([x, x.cpu()], [4, 4], [8, 8], "on one device"),
        ([x, x], [4], [8], "must have a number for each"),
        ([x] * 5, [4] * 5, [8] * 5, "`matrices` must be 1 to 4"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.ops.inductor_ext._pad(matrices, rows, columns)
