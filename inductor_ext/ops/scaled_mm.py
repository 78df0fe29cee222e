"""Scaled FP8 matrix product: an opaque op, cuBLASLt's kernel on CUDA, exact on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import scaled_mm as reference

from ..registry import register
from ..validation import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dtype,
    check_same_device,
    check_tensor,
)
from ._library import LIBRARY, define


def _check_scale(name: str, scale: Tensor, shape: tuple[Any, Any]) -> None:
    check_dtype(name, scale.dtype, (torch.float32,))
    if scale.numel() != 1 and tuple(scale.shape) != shape:
        raise ValueError(
            f"`{name}` must have one element or the shape {shape}, got {tuple(scale.shape)}"
        )


def check_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Raise TypeError or ValueError for arguments that ``scaled_mm`` does not take."""
    tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    for name, tensor in (tensors if bias is None else {**tensors, "bias": bias}).items():
        check_tensor(name, tensor)
        check_same_device(name, tensor, "a", a)
    check_dtype("a", a.dtype, FP8_DTYPES)
    check_dtype("b", b.dtype, FP8_DTYPES)
    check_dtype("dtype", dtype, INPUT_DTYPES)
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError("`a` and `b` must not both be float8_e5m2: no GPU multiplies them")
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dim() != 2:
            raise ValueError(f"`{name}` must have 2 dimensions, got {matrix.dim()}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"`b` must have as many rows as `a` has columns, {a.shape[1]}, got {b.shape[0]}"
        )
    m, n = a.shape[0], b.shape[1]
    _check_scale("scale_a", scale_a, (m, 1))
    _check_scale("scale_b", scale_b, (1, n))
    if bias is not None:
        check_dtype("bias", bias.dtype, (dtype,))
        if bias.dim() != 1 or bias.shape[0] != n:
            raise ValueError(f"`bias` must have the shape ({n},), got {tuple(bias.shape)}")


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    check_scaled_mm(a, b, scale_a, scale_b, bias, dtype)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


scaled_mm = define(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias,"
    " ScalarType dtype, bool fast_accum=False) -> Tensor",
    fake=_fake,
    reference=reference.scaled_mm,
    compiled=False,
)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _row_major(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix contiguous and of the size that cuBLASLt takes; zeros add nothing."""
    if matrix.shape == (rows, columns):
        return matrix.contiguous()
    padded = matrix.new_zeros((rows, columns), dtype=torch.uint8)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix.view(torch.uint8)
    return padded.view(matrix.dtype)


def _for_each(scale: Tensor, count: int, padded: int) -> Tensor:
    """Return ``count`` scales, 1-D and contiguous, followed by zeros up to ``padded``."""
    flat = scale.reshape(-1)
    if flat.shape[0] != count:
        flat = flat.expand(count)
    if padded != count:
        flat = torch.nn.functional.pad(flat, (0, padded - count))
    return flat.contiguous()


@torch.no_grad()  # as a compiled kernel: the op has no gradient rule
def _cuda(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Call torch's scaled GEMM, with operands in the layout and sizes that cuBLASLt takes."""
    check_scaled_mm(a, b, scale_a, scale_b, bias, dtype)
    if torch.cuda.get_device_capability(a.device) < (8, 9):  # no FP8 tensor cores
        return reference.scaled_mm(a, b, scale_a, scale_b, bias, dtype)
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    if m == 0 or n == 0 or k == 0:
        empty = a.new_zeros((m, n), dtype=dtype)
        return empty if bias is None else empty.add_(bias)
    k16, n16 = _round_up(k, 16), _round_up(n, 16)
    a, bt = _row_major(a, m, k16), _row_major(b.t(), n16, k16)
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        scales = scale_a.reshape(()), scale_b.reshape(())
        rowwise = False
    else:
        scales = _for_each(scale_a, m, m).view(m, 1), _for_each(scale_b, n, n16).view(1, n16)
        rowwise = True
    if rowwise and dtype != torch.bfloat16:
        # The row-wise GEMM writes bf16 only: scale its unscaled fp32 product here, in fp32.
        one = torch.ones((), device=a.device)
        product = _gemm(a, bt, (one, one), None, torch.float32, fast_accum)
        result = (product * scales[0] * scales[1])[:, :n]
        return (result if bias is None else result + bias.float()).to(dtype).contiguous()
    if bias is not None and dtype == torch.float32:  # cuBLASLt adds no fp32 bias
        return _gemm(a, bt, scales, None, dtype, fast_accum)[:, :n] + bias
    if bias is not None and n16 != n:
        bias = torch.nn.functional.pad(bias, (0, n16 - n))
    result = _gemm(a, bt, scales, bias, dtype, fast_accum)
    return result if n16 == n else result[:, :n].contiguous()


def _gemm(
    a: Tensor,
    bt: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return torch._scaled_mm(a, bt.t(), *scales, bias, None, dtype, fast_accum)


LIBRARY.impl("scaled_mm", _cuda, "CUDA")


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for m, k, n in ((16, 32, 48), (5, 33, 7)):
        a = torch.randn(m, k, generator=generator, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, generator=generator, device=device).to(torch.float8_e4m3fn).t()
        bias = torch.randn(n, generator=generator, device=device).to(torch.bfloat16)
        one = torch.tensor(0.5, device=device)
        yield a, b, one, one, None, torch.bfloat16
        rows = torch.rand(m, 1, generator=generator, device=device)
        columns = torch.rand(1, n, generator=generator, device=device)
        yield a, b, rows, columns, bias, torch.bfloat16


register(scaled_mm, reference=reference.scaled_mm, opaque=True, autograd=None, inputs=_inputs)
