"""Scaled INT8 matrix product, int32 sums and fp32 scales: an opaque op.

Definition: ``decompositions/scaled_mm.py``; which kernel: ``_routes_gemm.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import int8
from inductor_ext.decompositions import scaled_mm as reference

from ..validation import check_dtype
from ._blocks import ceil_div, round_up
from ._gemm import Direct, Gemm, check_operands, check_result
from ._gemm_calls import int_mm, is_prepared, prepared, unscaled_mm, wide_mm
from ._pad import Wanted
from ._routes_gemm import route
from ._scale_product import finish

GROUPS = (0, 32, 64, 128, 256)
LEAST_ROWS = 32
"""``torch._int_mm`` refuses M <= 16."""
MULTIPLE = 16
"""Of N and K; ``torch._int_mm`` takes multiples of 8, the tensor cores 16."""
LONGEST = 131056
"""A multiple of 16 for which int32 holds any sum: 131056 * 128^2 < 2^31."""


def check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    group_a: int = 0,
    group_b: int = 0,
) -> tuple[int, int]:
    """Raise TypeError or ValueError for arguments that ``scaled_mm_int8`` does not take."""
    m, n = check_operands(a, b, (torch.int8,), scale_a=scale_a, scale_b=scale_b, bias=bias)
    for name, scale, rows, group in (("a", scale_a, m, group_a), ("b", scale_b, n, group_b)):
        if group not in GROUPS:
            raise ValueError(f"`group_{name}` must be 0, 32, 64, 128 or 256, got {group}")
        _check_scale(f"scale_{name}", scale, rows, a.shape[1], group)
    check_result(bias, n, dtype)
    return m, n


def _check_scale(name: str, scale: Tensor, rows: int, k: int, group: int) -> None:
    check_dtype(name, scale.dtype, (torch.float32,))
    if group == 0 and scale.numel() == 1:
        return
    columns = ceil_div(k, group) if group else 1
    if scale.dim() != 2 or scale.shape[0] != rows or scale.shape[1] != columns:
        either = "" if group else "one element or "
        raise ValueError(
            f"`{name}` must have {either}the shape {(rows, columns)}, got {tuple(scale.shape)}"
        )


def _choose(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    group_a: int = 0,
    group_b: int = 0,
) -> tuple[str, str]:
    return route("int8", a, max(group_a, group_b))


def _library(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    group_a: int = 0,
    group_b: int = 0,
) -> None:
    (m, n), k = out.shape, a.shape[1]
    rows, n16, k16 = max(m, LEAST_ROWS), round_up(n, MULTIPLE), round_up(k, MULTIPLE)
    a, b = prepared(Wanted(a, rows, k16), Wanted(b, n16, k16))
    if k16 <= LONGEST:
        product = int_mm(a, b)
    else:  # int32 could overflow: sum parts in float64, which holds them all
        product = out.new_zeros((rows, n16), dtype=torch.float64)
        for start in range(0, k16, LONGEST):
            part = slice(start, min(start + LONGEST, k16))
            product += int_mm(a[:, part].contiguous(), b[:, part].contiguous())
        product = product.float()
    finish(out, product, scale_a, scale_b, bias)


def _direct(a: Tensor, b: Tensor, *args: Any) -> Direct | None:
    """Return what calls the library alone where it takes the codes as they are."""
    (m, k), n = a.shape, b.shape[0]
    fits = m >= LEAST_ROWS and n % MULTIPLE == k % MULTIPLE == 0 and k <= LONGEST
    ready = is_prepared(Wanted(a, m, k)) and is_prepared(Wanted(b, n, k))
    return _call if fits and ready else None


def _call(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *groups: int,
    out: Tensor | None,
) -> Tensor:
    product = int_mm(a, b)
    if out is None:
        out = a.new_empty(product.shape, dtype=dtype)
    finish(out, product, scale_a, scale_b, bias)
    return out


def _dequantize(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    group_a: int = 0,
    group_b: int = 0,
) -> None:
    """Round groups' ``code * scale`` to bf16, or keep it in fp32 for an fp32 result, and multiply.

    Without groups the codes are multiplied, which bf16 holds, and the fp32 product is scaled.
    """
    if not group_a and not group_b:
        product = unscaled_mm(a.to(torch.bfloat16), b.to(torch.bfloat16))
        finish(out, product, scale_a, scale_b, bias)
        return
    wide = torch.float32 if dtype == torch.float32 else torch.bfloat16
    dequantize = torch.ops.inductor_ext.dequantize_int8.default
    a, b = dequantize(a, scale_a, group_a, wide), dequantize(b, scale_b, group_b, wide)
    wide_mm(out, a, b, bias)


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator(device=device).manual_seed(0)
    for m, k, n in ((5, 80, 7), (16, 160, 35)):
        x = torch.randn(m, k, generator=generator, device=device)
        w = torch.randn(n, k, generator=generator, device=device)
        bias = torch.randn(n, generator=generator, device=device).to(torch.bfloat16)
        a, scale_a = int8.quantize_int8_row(x)
        b, scale_b = int8.quantize_int8_row(w)
        yield a, b, scale_a, scale_b, bias, torch.bfloat16
        yield a, b, scale_a, scale_b.flatten()[0], None, torch.float16
        b, scale_b = int8.quantize_int8_group(w, 64)
        yield a, b, scale_a, scale_b, None, torch.float32, 0, 64


GEMM = Gemm(
    "scaled_mm_int8",
    "a b scale_a scale_b",
    "int group_a=0, int group_b=0",
    check=check,
    reference=reference.scaled_mm_int8,
    choose=_choose,
    routes={"library": _library, "dequantize": _dequantize},
    inputs=_inputs,
    direct=_direct,
)
