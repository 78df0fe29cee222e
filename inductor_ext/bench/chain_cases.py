"""The chains of ``bench chains``: what a transformer does before it quantizes, and the formulas.

Each chain is written twice: with our ops, and as the same formula in plain PyTorch.  The floor
counts each byte of the inputs and results once; ``n`` is the number of elements, so "3n" is 2 bytes
read and 1 written per element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import inductor_ext as ixt

E4M3 = torch.float8_e4m3fn
TENSOR, ROW = ixt.FP8(granularity="tensor"), ixt.FP8(granularity="row")
BLOCK, SQUARE = ixt.FP8(granularity="block"), ixt.FP8(granularity="square")
MX = ixt.MXFP8()
Function = Callable[..., Any]


@dataclass(frozen=True)
class Chain:
    """A chain of ops: ours, and the same formula in plain PyTorch.

    Attributes:
        floor: bytes moved per element, at least.
        inputs: names of tensors, see :func:`inductor_ext.bench.chains.tensors`.
        goal: percent of the copy's speed that the compiled chain is to reach.
    """

    name: str
    floor: int
    ours: Function
    plain: Function
    inputs: tuple[str, ...]
    goal: int | None = None


# ---- producers ----


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize rows as Llama does: fp32 statistics, rounded, times the weight."""
    v = x.float()
    normal = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normal.to(x.dtype) * weight


def residual_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Add the residual, then normalize."""
    return rms_norm(x + y, weight)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b."""
    return F.silu(a) * b


def d_swiglu(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`swiglu`."""
    s = torch.sigmoid(a)
    return grad * b * (s * (1 + a * (1 - s))), grad * (a * s)


# ---- quantization in plain PyTorch ----


def plain_static(x: Tensor, scale: Tensor) -> Tensor:
    """Cast with a given scale."""
    return (x.float() * scale).clamp(-448, 448).to(E4M3)


def _plain_current(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448.0 / amax.float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale.reciprocal()


def plain_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row."""
    return _plain_current(x, x.abs().amax(-1, keepdim=True))


def plain_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with one scale."""
    return _plain_current(x, x.abs().amax())


def plain_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize vectors of 128."""
    groups = x.view(x.shape[0], -1, 128)
    codes, scale_inv = _plain_current(groups, groups.abs().amax(-1, keepdim=True))
    return codes.view(x.shape), scale_inv.squeeze(-1)


def plain_square(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize squares of 128 x 128."""
    squares = x.view(x.shape[0] // 128, 128, -1, 128)
    codes, scale_inv = _plain_current(squares, squares.abs().amax((1, 3), keepdim=True))
    return codes.view(x.shape), scale_inv.flatten(1)


def plain_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to MXFP8 along K."""
    groups = x.float().view(x.shape[0], -1, 32)
    bits = (groups.abs().amax(-1) / 448).view(torch.int32)
    e = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
    inverse = ((254 - e) << 23).view(torch.float32)
    codes = (groups * inverse[..., None]).clamp(-448, 448).to(E4M3)
    return codes.view(x.shape), e.to(torch.uint8)


def plain_both(along_k: Function) -> Function:
    """Return the quantization of x and of its transpose."""
    return lambda x, *scale: (along_k(x, *scale), along_k(x.t().contiguous(), *scale))


# ---- the same with our ops ----


def _ours(fmt: ixt.Format, way: str = "row") -> Function:
    def quantize(x: Tensor, *scale: Tensor) -> Any:
        q = ixt.quantize(x, fmt, *scale, orientation=way)  # type: ignore[call-overload]
        parts = (q.row, q.column) if way == "both" else (q,)
        return [t for part in parts for t in part[:2]]

    return quantize


def ours_static(x: Tensor, scale: Tensor) -> Tensor:
    """Return the codes for a given scale."""
    return ixt.quantize(x, TENSOR, scale).codes


def ours_static_both(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes for a given scale, and their transpose."""
    q = ixt.quantize(x, TENSOR, scale, orientation="both")
    return q.row.codes, q.column.codes


@dataclass(frozen=True)
class Quantization:
    """One column of the table: floor, both forms, and the goal behind each producer."""

    name: str
    floor: int
    ours: Function
    plain: Function
    extra: tuple[str, ...] = ()
    goals: tuple[int | None, ...] = (None, None, None, None)  # alone, norm, residual, SwiGLU


QUANTIZATIONS = (
    Quantization("static", 3, ours_static, plain_static, ("scale",), (96, 94, None, 95)),
    Quantization("row", 3, _ours(ROW), plain_row, (), (96, 92, 94, 93)),
    Quantization("tensor", 5, _ours(TENSOR), plain_tensor, (), (93, 90, None, 88)),
    Quantization("1x128", 3, _ours(BLOCK), plain_block, (), (94, 92, 95, None)),
    Quantization("128x128", 3, _ours(SQUARE), plain_square, (), (94, 55, None, None)),
    Quantization("MXFP8 K", 3, _ours(MX), plain_mx, (), (94, 91, None, 96)),
    Quantization(
        "MXFP8 M", 3, _ours(MX, "column"), lambda x: plain_mx(x.t().contiguous()), (),
        (85, None, None, None),
    ),
    Quantization(
        "static both", 4, ours_static_both, plain_both(plain_static), ("scale",),
        (92, 80, None, 92),
    ),
    Quantization(
        "1x128 both", 4, _ours(BLOCK, "both"), plain_both(plain_block), (), (88, 80, None, 86)
    ),
    Quantization(
        "128x128 both", 4, _ours(SQUARE, "both"), plain_both(plain_square), (),
        (90, None, None, None),
    ),
    Quantization("MXFP8 both", 4, _ours(MX, "both"), plain_both(plain_mx), (), (85, 75, 78, 82)),
)  # fmt: skip
# name, producer, its inputs, bytes an element that it reads beyond one tensor
PRODUCERS: tuple[tuple[str, Function | None, tuple[str, ...], int], ...] = (
    ("", None, ("x",), 0),
    ("RMSNorm -> ", rms_norm, ("x", "weight"), 0),
    ("residual, RMSNorm -> ", residual_norm, ("x", "y", "weight"), 2),
    ("SiLU*mul -> ", swiglu, ("x", "y"), 2),
)


def chains() -> Iterator[Chain]:
    """Yield the chains in the order of the table."""
    for place, (prefix, producer, inputs, more) in enumerate(PRODUCERS):
        for q in QUANTIZATIONS:
            goal = q.goals[place]
            if goal is None:
                continue
            count = len(inputs)
            yield Chain(
                prefix + q.name,
                q.floor + more,
                _after(producer, q.ours, count),
                _after(producer, q.plain, count),
                (*inputs, *q.extra),
                goal,
            )
    yield Chain(
        "static, with amax", 3,
        lambda x, s: tuple(ixt.quantize(x, TENSOR, s)),
        lambda x, s: (plain_static(x, s), s.reciprocal(), x.abs().amax().float()),
        ("x", "scale"),
    )  # fmt: skip
    yield Chain(
        "residual, RMSNorm -> 1x128, sum kept", 7,
        lambda x, y, w: (h := x + y, _ours(BLOCK)(rms_norm(h, w))),
        lambda x, y, w: (h := x + y, plain_block(rms_norm(h, w))),
        ("x", "y", "weight"), 94,
    )  # fmt: skip
    yield Chain(
        "dSiLU*mul -> static both", 10,
        lambda g, a, b, s: [ours_static_both(d, s) for d in d_swiglu(g, a, b)],
        lambda g, a, b, s: [plain_both(plain_static)(d, s) for d in d_swiglu(g, a, b)],
        ("z", "x", "y", "scale"), 88,
    )  # fmt: skip
    yield Chain(
        "dequantize row", 3,
        lambda q, s: ixt.dequantize((q, s), ROW),
        lambda q, s: (q.float() * s).to(torch.bfloat16),
        ("codes", "row_scale"),
    )  # fmt: skip


def _after(producer: Function | None, quantize: Function, count: int) -> Function:
    """Return quantize(producer(first inputs), other inputs)."""
    if producer is None:
        return quantize

    def chain(*tensors: Tensor) -> Any:
        return quantize(producer(*tensors[:count]), *tensors[count:])

    return chain
