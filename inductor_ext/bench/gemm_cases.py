"""What ``bench gemm`` multiplies: formats, sizes, and the library's own call for each format."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt

BF16 = torch.bfloat16
BUDGET_MS = {"cuda": 100.0, "cpu": 2.0}
"""What a time may take, roughly."""


class Sizes(NamedTuple):
    """Of a product: (M, K) times (N, K) transposed."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


@dataclass(frozen=True)
class Product:
    """A pair of formats, and whether sums may be taken in the tensor core (FP8 without blocks)."""

    name: str
    op: str
    a: ixt.Format
    b: ixt.Format
    fast: bool = False


_TENSOR, _ROW = (ixt.FP8(granularity=g) for g in ("tensor", "row"))
_BLOCK, _SQUARE = (ixt.FP8(granularity=g, layout="gemm") for g in ("block", "square"))
_MX, _NV = ixt.MXFP8(layout="gemm"), ixt.NVFP4(layout="gemm")
PRODUCTS = (
    Product("FP8 tensor, fast", "scaled_mm", _TENSOR, _TENSOR, True),
    Product("FP8 tensor", "scaled_mm", _TENSOR, _TENSOR),
    Product("FP8 row, fast", "scaled_mm", _ROW, _ROW, True),
    Product("FP8 row", "scaled_mm", _ROW, _ROW),
    Product("FP8 1x128 x 128x128", "scaled_mm_fp8_block", _BLOCK, _SQUARE),
    Product("FP8 1x128 x 1x128", "scaled_mm_fp8_block", _BLOCK, _BLOCK),
    Product("MXFP8", "scaled_mm_mxfp8", _MX, _MX),
    Product("NVFP4", "scaled_mm_nvfp4", _NV, _NV),
    Product("INT8", "scaled_mm_int8", ixt.INT8(), ixt.INT8()),
)

TOKENS = 8192
SIZES = {
    "cuda": {
        "4096": Sizes(4096, 4096, 4096),
        "8192": Sizes(8192, 8192, 8192),
        "anchor": Sizes(16384, 8192, 8192),
        "8B qkv": Sizes(TOKENS, 6144, 4096),
        "8B out": Sizes(TOKENS, 4096, 4096),
        "8B gate, up": Sizes(TOKENS, 28672, 4096),
        "8B down": Sizes(TOKENS, 4096, 14336),
        "70B qkv": Sizes(TOKENS, 10240, 8192),
        "70B out": Sizes(TOKENS, 8192, 8192),
        "70B gate, up": Sizes(TOKENS, 57344, 8192),
        "70B down": Sizes(TOKENS, 8192, 28672),
    },
    "cpu": {"small": Sizes(16, 48, 128)},
}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: tokens of each, and the sizes of each expert's weight (N, K)."""

    name: str
    count: int
    tokens: int
    n: int
    k: int

    def counts(self) -> list[int]:
        """Return tokens an expert: 0, 5, 128, then at random, skewed as routers leave them."""
        rng = random.Random(0)
        given = [0, 5, 128][: self.count - 1]
        weights = [rng.expovariate(1) for _ in range(self.count - len(given))]
        rest = self.tokens - sum(given)
        cuts = [int(rest * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
        cuts[-1] = rest
        return given + [end - start for start, end in zip([0, *cuts], cuts, strict=False)]


EXPERTS = {
    "cuda": (
        Experts("8 experts", 8, 16384, 14336, 4096),
        Experts("64 experts", 64, 16384, 4096, 7168),
        Experts("64 experts, 512 tokens", 64, 512, 4096, 7168),
    ),
    "cpu": (Experts("4 experts", 4, 160, 128, 128),),
}


def operands(
    product: Product, sizes: Sizes, device: torch.device, seed: int = 0
) -> tuple[ixt.Quantized, ixt.Quantized, Tensor, Tensor]:
    """Return A (M, K) and B (N, K), quantized, and as they were in bfloat16."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x, w = (
        torch.randn(rows, sizes.k, generator=generator, device=device, dtype=BF16)
        for rows in (sizes.m, sizes.n)
    )
    return ixt.quantize(x, product.a), ixt.quantize(w, product.b), x, w


def ours(product: Product, a: ixt.Quantized, b: ixt.Quantized) -> Callable[[], Tensor]:
    """Return the call of our public function."""
    return partial(ixt.scaled_mm, a, b, product.a, product.b, fast_accum=product.fast)


def library(product: Product, a: ixt.Quantized, b: ixt.Quantized) -> Callable[[], Tensor]:
    """Return torch's own call for the format; sizes are multiples of 128."""
    codes = a.codes, b.codes.t()
    if product.op == "scaled_mm_int8":
        return partial(torch._int_mm, *codes)  # without scales: int32
    scales = a.scale_inv, b.scale_inv
    if product.op == "scaled_mm":
        if product.a == _TENSOR:
            scales = scales[0].reshape(()), scales[1].reshape(())
        else:
            scales = scales[0], scales[1].t()
        return _mm(codes, scales, product.fast)
    if product.op == "scaled_mm_mxfp8":
        e8m0 = torch.float8_e8m0fnu
        return _mm(codes, (scales[0].view(e8m0), scales[1].view(e8m0)), False)
    kinds, swizzles = F.ScalingType, F.SwizzleType
    if product.op == "scaled_mm_nvfp4":
        assert a.amax is not None
        assert b.amax is not None
        fp4 = torch.float4_e2m1fn_x2
        whole = [amax.reshape(()) * (1 / 2688) for amax in (a.amax, b.amax)]
        recipe = [kinds.BlockWise1x16, kinds.TensorWise]
        swizzle = [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE]
        return partial(
            F.scaled_mm, a.codes.view(fp4), b.codes.view(fp4).t(), [scales[0], whole[0]], recipe,
            [scales[1], whole[1]], recipe, swizzle, swizzle, output_dtype=BF16,
        )  # fmt: skip
    vector, square = kinds.BlockWise1x128, kinds.BlockWise128x128
    if product.b == _SQUARE:
        return _blocks(codes, (scales[0], scales[1].t()), (vector, square))
    return _blocks(codes, scales, (vector, vector))


def _mm(
    codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], fast: bool
) -> Callable[[], Tensor]:
    return partial(torch._scaled_mm, *codes, *scales, out_dtype=BF16, use_fast_accum=fast)


def _blocks(
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    kinds: tuple[F.ScalingType, F.ScalingType],
) -> Callable[[], Tensor]:
    return partial(F.scaled_mm, *codes, scales[0], kinds[0], scales[1], kinds[1], output_dtype=BF16)


def sample(count: int, largest: int, seed: int = 0) -> Iterator[tuple[Product, Sizes]]:
    """Yield products at random sizes up to ``largest``: every format in its turn.

    A half of the sizes are multiples of 128, a quarter of 16, a quarter anything; K of NVFP4 is a
    multiple of 16, which it needs.
    """
    rng = random.Random(seed)

    def size() -> int:
        multiple = rng.choice((128, 128, 16, 1))
        wanted = float(largest ** rng.uniform(0, 1))
        return min(largest, max(1, round(wanted / multiple)) * multiple)

    for number in range(count):
        product = PRODUCTS[number % len(PRODUCTS)]
        m, n, k = size(), size(), size()
        if product.op == "scaled_mm_nvfp4":
            k = max(16, k // 16 * 16)
        yield product, Sizes(m, n, k)
