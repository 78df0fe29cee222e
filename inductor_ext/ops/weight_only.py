"""Products of bf16/fp16 activations with quantized weights: opaque ops, one a format.

Arithmetic: ``decompositions/weight_only.py``; kernels for few rows: ``kernels/cuda/weights_*.cu``;
which code runs: ``_routes_weight_only.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from inductor_ext.decompositions import weight_only as reference

from ..registry import register
from ..validation import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dtype,
    check_same_device,
    check_tensor,
)
from . import fp8, fp8_block, int4, int8, mxfp8, nvfp4
from ._gemm_calls import aligned
from ._library import LIBRARY, define
from ._routes_weight_only import Call, choose_weight_only

Weight = tuple[Any, ...]
"""The tensors and numbers of a quantized weight, in the order of the op's arguments."""

_ops = torch.ops.inductor_ext
DECODE = "_weight_only_decode"
LIBRARY.define(
    f"{DECODE}(Tensor x, Tensor codes, Tensor? bias, str kind, Tensor? scale, Tensor? packed, "
    "Tensor? last, int group, int rows) -> Tensor"
)


@dataclass(frozen=True)
class Family:
    """What the op of a format needs beside its formula.

    Args:
        arguments: of the weight, as the schema has them.
        check: raises TypeError or ValueError for a weight and a dtype that do not fit.
        dequantize: the weight in a dtype.
        decode: (kind, scale, packed, last, group, rows) for the kernels: fp32 scales of groups,
            bytes of groups (e8m0, e4m3, zero points), what whole rows are multiplied by (nvfp4:
            amax), elements and rows of a group.
        bits: of a code.
    """

    arguments: str
    check: Callable[[Any, torch.dtype], Any]
    dequantize: Callable[[Any, torch.dtype], Tensor]
    decode: Callable[[Any], tuple[Any, ...]]
    bits: int = 8

    def call(self, x: Tensor, weight: Weight) -> Call:
        """Return what the route is chosen by."""
        layout = next((a for a in weight if isinstance(a, str)), "plain")
        n, rows = weight[0].shape[0], math.prod(x.shape[:-1])
        return Call(rows, n, x.shape[-1], x.dtype, self.bits, layout)


def _fp8_kind(codes: Tensor) -> str:
    return "e4m3" if codes.dtype == torch.float8_e4m3fn else "e5m2"


def _int8_decode(w: Weight) -> tuple[Any, ...]:
    _, scale, group = w
    return ("int8", scale, None, None, group, 1) if group else ("int8", None, None, scale, 0, 1)


FAMILIES = {
    "fp8": Family(
        "Tensor codes, Tensor scale_inv",
        lambda w, dtype: fp8.check_dequantize(w[0], w[1], dtype),
        lambda w, dtype: _ops.dequantize_fp8(*w, dtype),
        lambda w: (_fp8_kind(w[0]), None, None, w[1], 0, 1),
    ),
    "fp8_block": Family(
        "Tensor codes, Tensor scale_inv, int block_m, int block_k, str layout",
        lambda w, dtype: fp8_block.check_dequantize(w[0], w[1], w[2], w[3], dtype, w[4]),
        lambda w, dtype: _ops.dequantize_fp8_block(*w[:4], dtype, w[4]),
        lambda w: (_fp8_kind(w[0]), w[1], None, None, w[3], w[2]),
    ),
    "mxfp8": Family(
        "Tensor codes, Tensor scales, int block_m, int block_k, str layout",
        lambda w, dtype: mxfp8.check_dequantize(w[0], w[1], w[2], w[3], dtype, w[4]),
        lambda w, dtype: _ops.dequantize_mxfp8(*w[:4], dtype, w[4]),
        lambda w: (_fp8_kind(w[0]), None, w[1], None, w[3], w[2]),
    ),
    "nvfp4": Family(
        "Tensor codes, Tensor scales, Tensor amax, int block_m, int block_k, str layout",
        lambda w, dtype: nvfp4.check_dequantize(w[0], w[1], w[2], w[3:5], dtype, w[5]),
        lambda w, dtype: _ops.dequantize_nvfp4(*w[:5], dtype, w[5]),
        lambda w: ("e2m1", None, w[1].view(torch.uint8), w[2], w[4], w[3]),
        bits=4,
    ),
    "int8": Family(
        "Tensor codes, Tensor scale, int group",
        lambda w, dtype: int8.check_dequantize(w[0], w[1], w[2], dtype),
        lambda w, dtype: _ops.dequantize_int8(*w, dtype),
        _int8_decode,
    ),
    "int4": Family(
        "Tensor codes, Tensor scale, Tensor? zero, int group",
        lambda w, dtype: int4.check_dequantize(w[0], w[1], w[2], w[3], dtype),
        lambda w, dtype: _ops.dequantize_int4(*w, dtype),
        lambda w: ("int4", w[1], w[2], None, w[3], 1),
        bits=4,
    ),
}


def _check(family: Family, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Check all arguments; return an empty result."""
    check_tensor("x", x)
    check_dtype("x", x.dtype, INPUT_DTYPES)
    family.check(weight, x.dtype)
    codes = weight[0]
    check_same_device("codes", codes, "x", x)
    if codes.dim() != 2:
        raise ValueError(f"`codes` must have 2 dimensions, (N, K), got {codes.dim()}")
    if "int block_k" in family.arguments and weight[-2] == 1:
        raise ValueError("`block_k` must be the length of blocks along K, got 1")
    n, k = codes.shape[0], codes.shape[1] * 8 // family.bits
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(
            f"`x` must have a last dimension of {k}, as `codes` has columns, got {tuple(x.shape)}"
        )
    if bias is not None:
        check_tensor("bias", bias)
        check_dtype("bias", bias.dtype, (x.dtype,))
        check_same_device("bias", bias, "x", x)
        if bias.dim() != 1 or bias.shape[0] != n:
            raise ValueError(f"`bias` must have the shape ({n},), got {tuple(bias.shape)}")
    return x.new_empty((*x.shape[:-1], n))


def _split(family: Family, rest: tuple[Any, ...]) -> tuple[Weight, Tensor | None]:
    """Return the weight's arguments and the bias, which callers may leave out."""
    count = family.arguments.count(",") + 1
    return rest[:count], rest[count] if len(rest) > count else None


def _fake(family: Family, x: Tensor, *rest: Any) -> Tensor:
    return _check(family, x, *_split(family, rest))


@torch.no_grad()  # as a compiled kernel: the op has no gradient rule
def _cuda(family: Family, x: Tensor, *rest: Any) -> Tensor:
    weight, bias = _split(family, rest)
    _check(family, x, weight, bias)
    route, _ = choose_weight_only(family.call(x, weight))
    if route == "dequantize":
        return F.linear(x, family.dequantize(weight, x.dtype), bias)
    kind, *tensors, group, rows = family.decode(weight)
    # what the kernels read is contiguous and on 16 bytes
    matrix, codes = aligned(x.reshape(-1, x.shape[-1])), aligned(weight[0])
    scale, packed, last, added = (None if t is None else aligned(t) for t in (*tensors, bias))
    multiply = getattr(_ops, DECODE)
    result: Tensor = multiply(matrix, codes, added, kind, scale, packed, last, group, rows)
    return result.reshape(*x.shape[:-1], codes.shape[0])


def _why(family: Family, x: Tensor, *rest: Any, **named: Any) -> str:
    """Return the route of a call and the reason, for records and ``explain``."""
    if x.device.type != "cuda":
        return "reference: the CPU and other devices have no kernel"
    if not isinstance(math.prod(x.shape[:-1]), int):
        return "decided when it runs, by the rows of x"
    weight, _ = _split(family, rest)
    try:
        return ": ".join(choose_weight_only(family.call(x, weight)))
    except ValueError as refusal:  # raised when it runs
        return str(refusal)


def _exact(family: str, shape: tuple[int, int], integers: Any, dtype: torch.dtype) -> Weight:
    """Return a weight of small codes and scales that are powers of two."""
    n, k = shape
    if family == "int4":
        scale = torch.exp2(integers(0, 1, n, k // 32).float())
        zero = integers(0, 15, n, k // 32).to(torch.uint8) if dtype is FP8_DTYPES[0] else None
        return integers(0, 255, n, k // 2).to(torch.uint8), scale, zero, 32
    if family == "nvfp4":
        scales = torch.exp2(integers(0, 1, n, k // 16).float()).to(torch.float8_e4m3fn)
        amax = torch.full((n, 1), 2688.0, device=scales.device)  # the factor is the scale
        return integers(0, 255, n, k // 2).to(torch.uint8), scales, amax, 1, 16, "plain"
    codes = integers(-8, 8, n, k)
    if family == "int8":
        return codes.to(torch.int8), torch.exp2(integers(0, 1, n, 1).float()), 0
    if family == "fp8":
        return codes.to(dtype), torch.exp2(integers(0, 1, n, 1).float())
    count = -(-k // 32)
    if family == "mxfp8":
        return codes.to(dtype), integers(127, 128, n, count).to(torch.uint8), 1, 32, "plain"
    return codes.to(dtype), torch.exp2(integers(0, 1, n, count).float()), 1, 32, "plain"


def _inputs(family: str, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yield calls whose sums are exact in any order, in fp32 and even in bf16.

    Most of x is 0 and the rest 1 or -1, weights are multiples of 1/2, so that no sum has more than
    eight bits.
    """
    generator = torch.Generator(device=device).manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device=device)

    for number, (m, n, k) in enumerate(((3, 40, 256), (18, 24, 64), (1, 16, 320))):
        x = (integers(-1, 1, m, k) * (integers(0, 15, m, k) == 0)).to(INPUT_DTYPES[number])
        weight = _exact(family, (n, k), integers, FP8_DTYPES[number % 2])
        bias = integers(-9, 9, n).to(x.dtype) if number % 2 else None
        yield (x, *weight, bias)
    yield (x[..., None, :].expand(m, 2, k), *weight, None)


def _register(name: str, family: Family) -> OpOverload:
    full = f"weight_only_mm_{name}"
    formula = getattr(reference, full)
    schema = f"{full}(Tensor x, {family.arguments}, Tensor? bias=None) -> Tensor"
    op = define(schema, fake=partial(_fake, family), reference=formula, compiled=False)
    LIBRARY.impl(full, partial(_cuda, family), "CUDA")
    register(
        op,
        reference=formula,
        opaque=True,
        autograd=None,
        why=partial(_why, family),
        inputs=partial(_inputs, name),
    )
    return op


OPS = {name: _register(name, family) for name, family in FAMILIES.items()}
