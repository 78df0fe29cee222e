"""Scales and bias after an unscaled product: PyTorch's passes, and the kernel bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inductor_ext.ops import _scale_product
from inductor_ext.ops._library import has_cuda_kernel
from inductor_ext.testing import require_equal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [(1, 1), (1, 40), (5, 7), (33, 16), (130, 24), (9, 264), (70, 2056), (3, 4100), (513, 8)]
"""Rows and columns: less and more than a block, vectors that are whole, cut and out of step."""


def special(t: Tensor) -> Tensor:
    """Put numbers into a tensor that have roundings of their own."""
    flat = t.view(-1)
    if t.dtype == torch.int32:
        values = torch.tensor([2**31 - 1, -(2**31), 2**24 + 1, 2**24 + 3, 0])
    else:
        values = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, -0.0])
    count = min(len(values), len(flat) // 2)
    flat[:count] = values[:count].to(t.dtype)
    return t


def arguments(
    size: tuple[int, int], kind: torch.dtype, dtype: torch.dtype, how: int, device: str = "cpu"
) -> Any:
    """Return (out, product, scale_a, scale_b, bias, unit); ``how`` picks which are there."""
    generator, (m, n) = torch.Generator().manual_seed(how), size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    rows, columns = m + (how & 1) * 3, n + (how >> 1 & 1) * 5
    product = special((random(rows, columns) * 1e6).to(kind))
    scale_a = random(m + 1, 1)[1:] if how & 4 else random(1)
    scale_b = random(n, 1) if how & 8 else random()
    if how & 16:
        scale_b = random(1, 2 * n)[:, ::2]
    bias = random(2 * n)[how >> 6 & 1 :: 2].to(dtype) if how & 32 else random(n).to(dtype)
    return (
        torch.full((m, n), torch.nan, dtype=dtype, device=device), product,
        special(scale_a.clone()), scale_b, bias if how & 3 else None,
        1 / 2688 if how & 64 else 1.0,
    )  # fmt: skip


def fp32(t: Tensor) -> np.ndarray:
    return t.numpy().astype(np.float32)


@pytest.mark.parametrize("kind", [torch.int32, torch.float32], ids=str)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid:RuntimeWarning")
def test_passes_round_each_step(kind: torch.dtype) -> None:
    """The definition in numpy's float32; the cast is PyTorch's."""
    for number, (size, dtype) in enumerate(itertools.product(SIZES, DTYPES)):
        args = arguments(size, kind, dtype, number * 37 % 128)
        out, product, scale_a, scale_b, bias, unit = args
        _scale_product.finish(*args)
        factors = [fp32(s) * np.float32(unit) for s in (scale_a.view(-1, 1), scale_b.flatten())]
        want = fp32(product[: size[0], : size[1]]) * factors[0] * factors[1]
        if bias is not None:
            want = want + fp32(bias.float())
        require_equal("finish", f"{args}", out, torch.from_numpy(want).to(dtype), nan_equal=True)


def check_kernel(
    size: tuple[int, int], kind: torch.dtype, dtype: torch.dtype, how: int, device: str
) -> None:
    """Require the bits of the passes."""
    args = arguments(size, kind, dtype, how, device)
    want = torch.empty_like(args[0])
    _scale_product.finish(*args)
    _scale_product.finish_in_passes(want, *args[1:])
    require_equal("finish", f"{size}, {how}", args[0], want, nan_equal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32], ids=str)
def test_kernel_gives_the_passes_bits(kind: torch.dtype, dtype: torch.dtype) -> None:
    assert has_cuda_kernel(_scale_product.NAME)
    for number, size in enumerate(SIZES):
        for how in range(number % 4, 128, 4 if size[1] > 1000 else 1):
            check_kernel(size, kind, dtype, how, "cuda")


@pytest.mark.gpu
def test_kernel_of_a_large_product() -> None:
    """Several blocks in each direction, and offsets beyond 2^31 bytes."""
    for m, n, stride in ((4096, 4096, 4096), (20000, 28672, 28672), (3001, 4099, 4112)):
        product = torch.randint(-(2**24), 2**24, (m, stride), dtype=torch.int32, device="cuda")
        scale_a, scale_b = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
        got, want = (torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        _scale_product.finish(got, product, scale_a, scale_b, None)
        _scale_product.finish_in_passes(want, product, scale_a, scale_b, None)
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_kernel_refuses() -> None:
    out, product = torch.empty(4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")
    one = torch.ones((), device="cuda")
    refused: list[tuple[Any, str]] = [
        ((out.t(), product, one, one, None), "`out` must be a contiguous"),
        ((out, product[:3], one, one, None), "`product` must have rows"),
        ((out, product.long(), one, one, None), "`product` must be int32 or float32"),
        (
            (out, product, product[:3, :1], one, None),
            "`scale_a` must have one element or the shape",
        ),
        (
            (out, product, one, product[:1, :3], None),
            "`scale_b` must have one element or the shape",
        ),
        ((out, product, one.double(), one, None), "`scale_a` must be float32"),
        ((out, product, one, one, product[0, :5]), "`bias` must have the shape"),
        ((out, product, one, one, product[0].half()), "`bias` must be float32"),
    ]
    for args, words in refused:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.inductor_ext._scale_product_(*args, 1.0)
