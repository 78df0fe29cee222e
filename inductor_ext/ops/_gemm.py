"""The forms of a scaled GEMM op, and the checks that all of them share.

Each family gives ``name(operands, bias, dtype, options) -> Tensor``, the same as ``name.out``, and
``name_accumulate_(out, operands, options)``, which adds the fp32 product to ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..registry import register
from ..validation import INPUT_DTYPES, check_dtype, check_same_device, check_tensor
from ._blocks import LAYOUTS, ceil_div, check_choice, round_up
from ._library import LIBRARY, define

Route = Callable[..., None]
"""Writes the product to its first argument, which is contiguous and not empty."""


class Gemm(NamedTuple):
    """The ops of a family."""

    op: OpOverload
    out: OpOverload
    accumulate_: OpOverload


def define_gemm(
    name: str,
    operands: str,
    options: str,
    *,
    check: Callable[..., tuple[int, int]],
    reference: Callable[..., Tensor],
    choose: Callable[..., tuple[str, str]],
    routes: Mapping[str, Route],
    inputs: Callable[[torch.device], Iterator[tuple[Any, ...]]],
) -> Gemm:
    """Define and register the ops of a family.

    Args:
        operands: names of the tensors, the codes of A (M, K) first.
        options: the rest of the schema after ``bias`` and ``dtype``, or "".
        check: ``check(*operands, bias, dtype, *options)`` raises, or returns (M, N).
        reference: the exact definition.
        choose: with the same arguments, the name of the route and why (``_routes_gemm``).
        routes: ``route(out, *operands, bias, dtype, *options)`` by name, for CUDA; the reference
            is one of them.
        inputs: sample arguments for the harness.
    """
    names = operands.split()
    count, tail = len(names), f", {options}" if options else ""
    tensors = ", ".join(f"Tensor {each}" for each in names)
    arguments = f"{tensors}, Tensor? bias, ScalarType dtype{tail}"

    def fake(*args: Any) -> Tensor:
        return args[0].new_empty(check(*args), dtype=args[count + 1])

    def fake_out(*args: Any, out: Tensor) -> None:
        _check_out("out", out, args[0], check(*args), args[count + 1])

    def fake_accumulate_(out: Tensor, *args: Any) -> None:
        _check_out("out", out, args[0], check(*whole(args)), torch.float32)

    def whole(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the missing bias and dtype into the arguments of the accumulating form."""
        return (*args[:count], None, torch.float32, *args[count:])

    def reference_out(*args: Any, out: Tensor) -> None:
        out.copy_(reference(*args))

    def reference_accumulate_(out: Tensor, *args: Any) -> None:
        out.add_(reference(*whole(args)))

    ops = Gemm(
        define(f"{name}({arguments}) -> Tensor", fake=fake, reference=reference, compiled=False),
        define(
            f"{name}.out({arguments}, *, Tensor(a!) out) -> ()",
            fake=fake_out, reference=reference_out, compiled=False,
        ),
        define(
            f"{name}_accumulate_(Tensor(a!) out, {tensors}{tail}) -> ()",
            fake=fake_accumulate_, reference=reference_accumulate_, compiled=False,
        ),
    )  # fmt: skip

    def multiply_into(out: Tensor, args: tuple[Any, ...]) -> None:
        if out.numel() == 0:
            return
        if args[0].numel() == 0:  # K = 0
            out.zero_() if args[count] is None else out.copy_(args[count])
            return
        route, _ = choose(*args)
        if route == "reference":
            out.copy_(reference(*args))
        else:
            routes[route](out, *args)

    @torch.no_grad()  # as a compiled kernel: the op has no gradient rule
    def cuda(*args: Any) -> Tensor:
        result = args[0].new_empty(check(*args), dtype=args[count + 1])
        multiply_into(result, args)
        return result

    @torch.no_grad()
    def cuda_out(*args: Any, out: Tensor) -> None:
        fake_out(*args, out=out)
        if out.is_contiguous():
            multiply_into(out, args)
        else:
            out.copy_(cuda(*args))

    @torch.no_grad()
    def cuda_accumulate_(out: Tensor, *args: Any) -> None:
        fake_accumulate_(out, *args)
        out.add_(cuda(*whole(args)))

    LIBRARY.impl(name, cuda, "CUDA")
    LIBRARY.impl(f"{name}.out", cuda_out, "CUDA")
    LIBRARY.impl(f"{name}_accumulate_", cuda_accumulate_, "CUDA")

    def inputs_accumulate_(device: torch.device) -> Iterator[tuple[Any, ...]]:
        for args in inputs(device):
            out = torch.ones(check(*args), device=device)
            yield (out, *args[:count], *args[count + 2 :])

    register(
        ops.op, reference=reference, opaque=True, autograd=None, inputs=inputs,
        why=lambda *args: ": ".join(choose(*args)),
    )  # fmt: skip
    register(
        ops.accumulate_, reference=reference_accumulate_, opaque=True, autograd=None,
        inputs=inputs_accumulate_, why=lambda out, *args: ": ".join(choose(*whole(args))),
    )  # fmt: skip
    return ops


def _check_out(
    name: str, out: Tensor, a: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    check_tensor(name, out)
    check_dtype(name, out.dtype, (dtype,))
    check_same_device(name, out, "a", a)
    if out.dim() != 2 or out.shape[0] != shape[0] or out.shape[1] != shape[1]:
        raise ValueError(f"`{name}` must have the shape {shape}, got {tuple(out.shape)}")
    steps = zip(out.shape, out.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in steps):
        raise ValueError(f"`{name}` must not be expanded: it is written to")


def check_operands(
    a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, ...], **others: Tensor | None
) -> tuple[int, int]:
    """Raise unless ``a`` (M, K) and ``b`` (N, K) are codes that multiply; return (M, N).

    Args:
        dtypes: what the codes may be.
        others: tensors that must be on the device of ``a``.
    """
    for name, matrix in (("a", a), ("b", b)):
        check_tensor(name, matrix)
        check_dtype(name, matrix.dtype, dtypes)
        if matrix.dim() != 2:
            raise ValueError(f"`{name}` must have 2 dimensions, got {matrix.dim()}")
    for name, tensor in (("b", b), *others.items()):
        if tensor is not None:
            check_tensor(name, tensor)
            check_same_device(name, tensor, "a", a)
    check_same_k(a.shape[1], b.shape[1])
    check_not_both_e5m2(a, b)
    return a.shape[0], b.shape[0]


def check_same_k(k_of_a: int, k_of_b: int) -> None:
    """Raise ValueError unless the operands have as many elements to sum."""
    if k_of_a != k_of_b:
        raise ValueError(f"`b` must have the K of `a`, {k_of_a}, got {k_of_b}")


def check_not_both_e5m2(a: Tensor, b: Tensor) -> None:
    """Raise TypeError for two float8_e5m2 operands."""
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError("`a` and `b` must not both be float8_e5m2: no GPU multiplies them")


def check_result(bias: Tensor | None, n: int, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is wide and ``bias`` is None or (N,) of it."""
    check_dtype("dtype", dtype, INPUT_DTYPES)
    if bias is not None:
        check_dtype("bias", bias.dtype, (dtype,))
        if bias.dim() != 1 or bias.shape[0] != n:
            raise ValueError(f"`bias` must have the shape ({n},), got {tuple(bias.shape)}")


def check_block_scale(
    name: str,
    scale: Tensor,
    dtype: torch.dtype,
    codes: tuple[int, int],
    block: tuple[int, int],
    layout: str,
    tiled: bool,
) -> None:
    """Raise unless ``scale`` is what quantizing (rows, K) to such codes gives.

    Args:
        codes: rows and K of the operand.
        block: (1, G) or (G, G), what shares a scale.
        layout: "plain" or "gemm".
        tiled: whether "gemm" means cuBLASLt's tiles of 128 x 4, a scale for every row; else it is
            column-major for (1, G) and padded to a multiple of 4 along K for (G, G).
    """
    check_choice(f"layout_{name[-1]}", layout, LAYOUTS)
    check_dtype(name, scale.dtype, (dtype,))
    rows, along_k = ceil_div(codes[0], block[0]), ceil_div(codes[1], block[1])
    if layout == "gemm" and tiled:
        rows, along_k = round_up(codes[0], 128), round_up(along_k, 4)
    elif layout == "gemm" and block[0] == block[1]:
        along_k = round_up(along_k, 4)
    if scale.dim() != 2 or scale.shape[0] != rows or scale.shape[1] != along_k:
        raise ValueError(
            f"`{name}` must have the shape {(rows, along_k)}, got {tuple(scale.shape)}"
        )
