"""Grouped FP8 matrix products for mixtures of experts: opaque ops.

On CUDA torch's grouped GEMM or a Triton kernel of our own, see ``_routes_grouped.py``; on the CPU
the exact definition.  No host reads the offsets on the way to either kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import scaled_grouped_mm as reference

from .. import config
from ..registry import register
from ..validation import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dtype,
    check_same_device,
    check_tensor,
)
from ._blocks import ceil_div
from ._gemm import check_not_both_e5m2
from ._gemm_calls import aligned
from ._library import LIBRARY, define
from ._routes_gemm import capability_of
from ._routes_grouped import choose_grouped_mm

WIDTH = reference.WIDTH


def check_operands(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> None:
    """Raise TypeError or ValueError for what no grouped product takes; scales' shapes apart."""
    tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "offsets": offsets}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        check_same_device(name, tensor, "a", a)
    check_dtype("a", a.dtype, FP8_DTYPES)
    check_dtype("b", b.dtype, FP8_DTYPES)
    check_dtype("scale_a", scale_a.dtype, (torch.float32,))
    check_dtype("scale_b", scale_b.dtype, (torch.float32,))
    check_dtype("offsets", offsets.dtype, (torch.int32,))
    check_dtype("dtype", dtype, INPUT_DTYPES)
    check_not_both_e5m2(a, b)
    if a.dim() != 2:
        raise ValueError(f"`a` must have 2 dimensions, got {a.dim()}")
    if b.dim() not in (2, 3):
        raise ValueError(f"`b` must have 2 or 3 dimensions, got {b.dim()}")
    if a.shape[1] != b.shape[-1]:
        raise ValueError(
            f"`b` must have as many columns as `a`, {a.shape[1]}, got {tuple(b.shape)}"
        )
    if offsets.dim() != 1:
        raise ValueError(f"`offsets` must have 1 dimension, got {offsets.dim()}")
    if b.dim() == 3 and offsets.shape[0] != b.shape[0]:
        raise ValueError(
            f"`offsets` must have an element for each expert of `b`, {b.shape[0]}, got "
            f"{offsets.shape[0]}"
        )


def _check_rows(name: str, scale: Tensor, shape: tuple[Any, ...]) -> None:
    """Raise ValueError unless ``scale`` broadcasts to ``shape``."""
    known = scale.shape
    fits = len(known) <= len(shape) and all(
        size == 1 or size == full
        for size, full in zip(reversed(known), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"`{name}` must broadcast to the shape {shape}, got {tuple(known)}")


def check_rows(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> None:
    """Raise TypeError or ValueError for arguments that ``scaled_grouped_mm`` does not take."""
    check_operands(a, b, scale_a, scale_b, offsets, dtype)
    experts = offsets.shape[0]
    one_each = (a.shape[0], 1) if b.dim() == 3 else (experts, a.shape[0], 1)
    _check_rows("scale_a", scale_a, one_each)
    _check_rows("scale_b", scale_b, (experts, b.shape[-2], 1))


def check_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> None:
    """Raise TypeError or ValueError for what ``scaled_grouped_mm_fp8_block`` does not take."""
    check_operands(a, b, scale_a, scale_b, offsets, dtype)
    across = ceil_div(a.shape[1], WIDTH)
    if tuple(scale_a.shape) != (a.shape[0], across):
        raise ValueError(
            f"`scale_a` must have the shape {(a.shape[0], across)}, a scale for 128 columns of "
            f"each row of `a`, got {tuple(scale_a.shape)}"
        )
    *experts, n = b.shape[:-1]
    vectors, squares = (*experts, n, across), (*experts, ceil_div(n, WIDTH), across)
    if tuple(scale_b.shape) not in (vectors, squares):
        raise ValueError(
            f"`scale_b` must have the shape {squares} (a scale for 128 x 128 elements) or "
            f"{vectors} (for 1 x 128), got {tuple(scale_b.shape)}"
        )


def _empty(a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    if b.dim() == 3:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    return a.new_empty((offsets.shape[0], a.shape[0], b.shape[0]), dtype=dtype)


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    check_rows(a, b, scale_a, scale_b, offsets, dtype)
    return _empty(a, b, offsets, dtype)


def _fake_block(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    check_blocks(a, b, scale_a, scale_b, offsets, dtype)
    return _empty(a, b, offsets, dtype)


scaled_grouped_mm = define(
    "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offsets,"
    " ScalarType dtype, bool fast_accum=False) -> Tensor",
    fake=_fake,
    reference=reference.scaled_grouped_mm,
    compiled=False,
)
scaled_grouped_mm_fp8_block = define(
    "scaled_grouped_mm_fp8_block(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b,"
    " Tensor offsets, ScalarType dtype) -> Tensor",
    fake=_fake_block,
    reference=reference.scaled_grouped_mm_fp8_block,
    compiled=False,
)


def _choose(
    a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype, blocks: bool
) -> tuple[str, str]:
    return choose_grouped_mm(
        capability_of(a.device),
        (a.dtype, b.dtype),
        dtype,
        (offsets.shape[0], b.shape[-2], a.shape[1]),
        blocks=blocks,
        split_k=b.dim() == 2,
        rows=a.shape[0],
        pin=config.grouped_gemm,
    )


def _told(a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype, blocks: bool) -> str:
    """Return the route and why, for records; comparing an unknown size would be a guard."""
    if not all(isinstance(size, int) for size in (*a.shape, *b.shape, *offsets.shape)):
        return "decided when it runs, by the sizes"
    return ": ".join(_choose(a, b, offsets, dtype, blocks))


def _why(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> str:
    return _told(a, b, offsets, dtype, blocks=False)


def _why_block(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> str:
    return _told(a, b, offsets, dtype, blocks=True)


@torch.no_grad()  # as a compiled kernel: the op has no gradient rule
def _cuda(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    check_rows(a, b, scale_a, scale_b, offsets, dtype)
    route, _ = _choose(a, b, offsets, dtype, blocks=False)
    if route == "reference":
        return reference.scaled_grouped_mm(a, b, scale_a, scale_b, offsets, dtype)
    experts = offsets.shape[0]
    whole = (a.shape[0], 1) if b.dim() == 3 else (experts, a.shape[0], 1)
    scale_a, scale_b = scale_a.expand(whole), scale_b.expand(experts, b.shape[-2], 1)
    if route == "library" and a.numel() and b.numel():
        return _library(a, b, scale_a, scale_b, offsets, dtype, fast_accum)
    return _triton(a, b, scale_a, scale_b, offsets, dtype, 1, False, fast_accum)


@torch.no_grad()
def _cuda_block(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    check_blocks(a, b, scale_a, scale_b, offsets, dtype)
    if _choose(a, b, offsets, dtype, blocks=True)[0] == "reference":
        return reference.scaled_grouped_mm_fp8_block(a, b, scale_a, scale_b, offsets, dtype)
    height = 1 if scale_b.shape[-2] == b.shape[-2] else WIDTH
    if b.dim() == 2:
        scale_a, scale_b = (s.expand(offsets.shape[0], *s.shape) for s in (scale_a, scale_b))
    return _triton(a, b, scale_a, scale_b, offsets, dtype, height, True, False)


def _library(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Call torch's grouped GEMM, which wants 16-byte addresses and leaves what no expert has."""
    from inductor_ext.kernels.triton import scaled_grouped_mm as kernel

    ends = kernel.rising(offsets, a.shape[0])
    flat = aligned(scale_a.reshape(-1)), aligned(scale_b.squeeze(2))
    b_t = aligned(b).transpose(1, 2)
    result = torch._scaled_grouped_mm(aligned(a), b_t, *flat, ends, None, None, dtype, fast_accum)
    return kernel.zero_tail(result, ends)


def _triton(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    height: int,
    blocks: bool,
    fast_accum: bool,
) -> Tensor:
    out = _empty(a, b, offsets, dtype)
    if out.numel() == 0 or a.numel() == 0 or offsets.numel() == 0:
        return out.zero_()
    from inductor_ext.kernels.triton import scaled_grouped_mm as kernel

    product = kernel.rows_product if b.dim() == 3 else kernel.columns_product
    scales = scale_a, scale_b
    return product(a, b, *scales, offsets.contiguous(), out, height, blocks, fast_accum)


LIBRARY.impl("scaled_grouped_mm", _cuda, "CUDA")
LIBRARY.impl("scaled_grouped_mm_fp8_block", _cuda_block, "CUDA")


def _codes(device: torch.device, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)


def _scales(device: torch.device, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device)


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32, device=device)
    a, b = _codes(device, 0, 13, 32), _codes(device, 1, 3, 48, 32)
    rows, one = _scales(device, 2, 13, 1), torch.tensor(0.5, device=device)
    yield a, b, rows, _scales(device, 3, 3, 48, 1), offsets, torch.bfloat16
    yield a, b, one, _scales(device, 3, 3, 1, 1), offsets, torch.float32, True
    tokens = _codes(device, 4, 7, 13), _codes(device, 5, 9, 13)
    yield *tokens, _scales(device, 6, 7, 1), _scales(device, 7, 3, 9, 1), offsets, torch.float16


def _inputs_block(device: torch.device) -> Iterator[tuple[Any, ...]]:
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32, device=device)
    a, b = _codes(device, 0, 13, 288), _codes(device, 1, 3, 300, 288)
    scale_a, square = _scales(device, 2, 13, 3), _scales(device, 3, 3, 3, 3)
    yield a, b, scale_a, square, offsets, torch.bfloat16
    yield a, b, scale_a, _scales(device, 4, 3, 300, 3), offsets, torch.float32
    tokens = _codes(device, 5, 7, 13), _codes(device, 6, 9, 13)
    yield *tokens, _scales(device, 7, 7, 1), _scales(device, 8, 9, 1), offsets, torch.float16


register(
    scaled_grouped_mm,
    reference=reference.scaled_grouped_mm,
    opaque=True,
    autograd=None,
    why=_why,
    inputs=_inputs,
)
register(
    scaled_grouped_mm_fp8_block,
    reference=reference.scaled_grouped_mm_fp8_block,
    opaque=True,
    autograd=None,
    why=_why_block,
    inputs=_inputs_block,
)
