"""Scaled FP8 matrix product with a scale for the tensor or for each row: an opaque op.

Definition: ``decompositions/scaled_mm.py``; which kernel: ``_routes_gemm.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import scaled_mm as reference

from ..validation import FP8_DTYPES, check_dtype, check_same_device, check_tensor
from ._gemm import Direct, Gemm, check_not_both_e5m2, check_result, check_same_k
from ._gemm_calls import (
    for_each,
    is_aligned,
    padded_out,
    prepared,
    round_sizes,
    row_major,
    scaled_mm_v1,
    unscaled_mm,
)
from ._pad import Wanted
from ._routes_gemm import is_hopper, route
from ._scale_product import finish

MULTIPLES = (1, 16, 16)
"""Of (M, N, K), what ``torch._scaled_mm`` takes."""


def _check_scale(name: str, scale: Tensor, rows: int, columns: int) -> None:
    check_dtype(name, scale.dtype, (torch.float32,))
    if scale.numel() == 1:
        return
    if scale.dim() != 2 or scale.shape[0] != rows or scale.shape[1] != columns:
        shape = (rows, columns)
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
    fast_accum: bool = False,
) -> tuple[int, int]:
    """Raise TypeError or ValueError for arguments that ``scaled_mm`` does not take."""
    tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    for name, tensor in (tensors if bias is None else {**tensors, "bias": bias}).items():
        check_tensor(name, tensor)
        check_same_device(name, tensor, "a", a)
    check_dtype("a", a.dtype, FP8_DTYPES)
    check_dtype("b", b.dtype, FP8_DTYPES)
    check_not_both_e5m2(a, b)
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dim() != 2:
            raise ValueError(f"`{name}` must have 2 dimensions, got {matrix.dim()}")
    check_same_k(a.shape[1], b.shape[0])
    m, n = a.shape[0], b.shape[1]
    _check_scale("scale_a", scale_a, m, 1)
    _check_scale("scale_b", scale_b, 1, n)
    check_result(bias, n, dtype)
    return m, n


def _choose(a: Tensor, *args: Any) -> tuple[str, str]:
    return route("fp8", a)


def scales_after(dtype: torch.dtype, b_dtype: torch.dtype, hopper: bool) -> bool:
    """Return whether the scales of rows come after an unscaled fp32 product.

    torch 2.11's row-wise GEMM writes bf16 only, and outside sm_90 it is a CUTLASS kernel whose
    second operand is e4m3.
    """
    return dtype != torch.bfloat16 or (b_dtype == torch.float8_e5m2 and not hopper)


def _library(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> None:
    m, n = out.shape
    rowwise = scale_a.numel() != 1 or scale_b.numel() != 1
    after = rowwise and scales_after(dtype, b.dtype, is_hopper(a.device))
    if after or (bias is not None and dtype == torch.float32):  # cuBLASLt adds no fp32 bias
        _scales_last(out, a, b, scale_a, scale_b, bias, dtype, fast_accum)
        return
    _, n16, k16 = round_sizes((m, n, a.shape[1]), MULTIPLES)
    wanted = [Wanted(a, m, k16), Wanted(b.t(), n16, k16)]
    if bias is not None:
        wanted.append(Wanted(bias[None], 1, n16))
    if rowwise:
        wanted.append(Wanted(for_each(scale_b, n), 1, n16))
    a, bt, *rest = prepared(*wanted)
    if rowwise:
        scales = row_major(for_each(scale_a, m)).view(m, 1), rest.pop()
    else:
        scales = scale_a.reshape(()), scale_b.reshape(())
    result = padded_out(out, m, n16, dtype)
    scaled_mm_v1(result, a, bt, *scales, rest[0][0] if rest else None, fast_accum)
    if result is not out:
        out.copy_(result[:, :n])


def _scales_last(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> None:
    """Let the library multiply the codes into fp32, and do the rest after it."""
    m, n = out.shape
    _, n16, k16 = round_sizes((m, n, a.shape[1]), MULTIPLES)
    product = out.new_empty((m, n16), dtype=torch.float32)
    one = torch.ones((), device=a.device)
    a, bt = prepared(Wanted(a, m, k16), Wanted(b.t(), n16, k16))
    scaled_mm_v1(product, a, bt, one, one, None, fast_accum)
    finish(out, product, scale_a, scale_b, bias)


def _direct(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Direct | None:
    """Return the call of the library alone where it takes everything as it is."""
    k, n = b.shape
    rowwise = scale_a.numel() != 1 or scale_b.numel() != 1
    if rowwise and (scale_a.numel() != a.shape[0] or scale_b.numel() != n):
        return None  # mixed
    if rowwise and scales_after(dtype, b.dtype, is_hopper(a.device)):
        return None
    if bias is not None and dtype == torch.float32:
        return None
    fits = k % MULTIPLES[2] == n % MULTIPLES[1] == 0
    fits = fits and a.stride() == (k, 1) and b.stride() == (1, k)
    rest = [scale_a, scale_b] if bias is None else [scale_a, scale_b, bias]
    ready = all(is_aligned(t) for t in (a, b.t())) and all(
        t.numel() == 1 or is_aligned(t) for t in rest
    )
    return _call if fits and ready else None


def _call(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
    *,
    out: Tensor | None,
) -> Tensor:
    return torch._scaled_mm(a, b, scale_a, scale_b, bias, None, dtype, fast_accum, out=out)


def _dequantize(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> None:
    """Multiply the codes as bf16, which holds every FP8 number, and scale the fp32 product."""
    product = unscaled_mm(a.to(torch.bfloat16), b.t().to(torch.bfloat16))
    finish(out, product, scale_a, scale_b, bias)


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


GEMM = Gemm(
    "scaled_mm",
    "a b scale_a scale_b",
    "bool fast_accum=False",
    check=check_scaled_mm,
    reference=reference.scaled_mm,
    choose=_choose,
    routes={"library": _library, "dequantize": _dequantize},
    inputs=_inputs,
    direct=_direct,
    second=_scales_last,
)
scaled_mm = GEMM.op
