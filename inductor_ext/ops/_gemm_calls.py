"""Calls of the libraries' GEMMs, with operands as the libraries take them.

B is (N, K) everywhere.  cuBLASLt wants A row-major and B^T column-major, K and N multiples of 16
and 16-byte aligned rows; what is not so is copied into zeros, which add nothing.  Nothing here
reads a tensor's values on the host, so that every call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_ext.decompositions.blocks import round_up

from ._pad import Wanted, padded

ALIGNMENT = 16
"""Bytes of a row, and of the address, that cuBLASLt's FP8 kernels load at once."""


def prepared(*wanted: Wanted) -> list[Tensor]:
    """Return up to four matrices of the sizes wanted, as :func:`row_major` does.

    Those that are smaller get zeros behind them, all in one kernel.
    """
    small = [each for each in wanted if each.grows]
    if not small:
        return [row_major(each.matrix) for each in wanted]
    grown = iter(padded(*small))
    return [next(grown) if each.grows else row_major(each.matrix) for each in wanted]


def is_prepared(wanted: Wanted) -> bool:
    """Return whether :func:`prepared` has nothing to do."""
    matrix = wanted.matrix
    return not wanted.grows and is_aligned(matrix) and matrix.stride() == (wanted.columns, 1)


def row_major(matrix: Tensor) -> Tensor:
    """Return a matrix contiguous and aligned.

    Its stride is (columns, 1) also where a dimension is 1, which "contiguous" leaves open.
    """
    matrix = aligned(matrix)
    rows, columns = matrix.shape
    if matrix.stride() == (columns, 1):
        return matrix
    return matrix.as_strided((rows, columns), (columns, 1))


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor contiguous and on a 16-byte boundary, itself where it is."""
    tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and begins on a 16-byte boundary."""
    place: int = tensor.data_ptr() % ALIGNMENT
    return tensor.is_contiguous() and place == 0


def for_each(scale: Tensor, count: int) -> Tensor:
    """Return one scale for all, or ``count`` scales, as a row: (1, count)."""
    return scale.reshape(1, -1).expand(1, count)


def add_bias(out: Tensor, product: Tensor, bias: Tensor | None) -> None:
    """Write ``cast(product + bias)`` of a (>= M, >= N) product."""
    product = product[: out.shape[0], : out.shape[1]]
    if bias is None:
        out.copy_(product)
    else:
        torch.add(product, bias, out=out)


def wide_mm(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """Multiply dequantized operands, A (M, K) and B (N, K), bf16 or fp32, into ``out``.

    bf16 operands are summed in fp32; a bias of the same dtype goes into cuBLASLt's epilogue.
    """
    if out.dtype == a.dtype:
        if bias is None:
            torch.mm(a, b.t(), out=out)
        else:
            torch.addmm(bias, a, b.t(), out=out)
    else:
        add_bias(out, unscaled_mm(a, b), bias)


def unscaled_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the fp32 product of bf16 or fp32 operands."""
    if a.dtype == torch.float32:
        return torch.mm(a, b.t())
    return torch.mm(a, b.t(), out_dtype=torch.float32)


def padded_out(out: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return where a GEMM of padded size writes: ``out`` itself where it fits."""
    if out.shape == (rows, columns) and out.dtype == dtype:
        return out
    return out.new_empty((rows, columns), dtype=dtype)


def scaled_mm_v1(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    fast_accum: bool = False,
) -> None:
    """Call ``torch._scaled_mm``; ``b`` is (N, K)."""
    torch._scaled_mm(a, b.t(), scale_a, scale_b, bias, None, out.dtype, fast_accum, out=out)


def scaled_mm_v2(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle: list[int],
    bias: Tensor | None,
) -> None:
    """Call ``torch._scaled_mm_v2``, which names the scales' kinds; ``b`` is (N, K)."""
    torch._scaled_mm_v2(
        a, b.t(), scale_a, recipe_a, swizzle, scale_b, recipe_b, swizzle, bias, out.dtype,
        out=out,
    )  # fmt: skip


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Call ``torch._int_mm``: int8 (M, K) and (N, K) to int32 (M, N)."""
    return torch._int_mm(a, b.t())


def round_sizes(sizes: tuple[int, int, int], to: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (M, N, K) rounded up to multiples."""
    m, n, k = (round_up(size, multiple) for size, multiple in zip(sizes, to, strict=True))
    return m, n, k
