"""Rotary position embedding and its backward: schemas, fakes, gradient and contracts.

Arithmetic, and the compiled form, since Inductor fuses it with its neighbours:
``decompositions/rope.py``; kernel: ``kernels/cuda/rope.cu``.  On the CPU the ops run as PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import rope as reference

from ..registry import Autograd, register
from ..validation import INPUT_DTYPES, check_dtype, check_like, check_same_device, check_tensor
from ._library import define

INDEX_DTYPES = (torch.int32, torch.int64)


def _check(
    name: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotary_dim: int,
) -> None:
    """Raise TypeError or ValueError for arguments that the ops do not take."""
    check_tensor(name, x)
    check_dtype(name, x.dtype, INPUT_DTYPES)
    if x.dim() != 4:
        raise ValueError(f"`{name}` must have the shape (B, H, S, D), got {tuple(x.shape)}")
    head = x.shape[3]
    if not 0 <= rotary_dim <= head or rotary_dim % 2:
        raise ValueError(
            f"`rotary_dim` must be even and at most {head}, the last size of `{name}`, got "
            f"{rotary_dim}"
        )
    width = rotary_dim or head
    if width == 0 or width % 2:
        raise ValueError(f"`{name}` must have an even last size above 0, got {head}")
    check_tensor("cos", cos)
    check_dtype("cos", cos.dtype, INPUT_DTYPES)
    check_same_device("cos", cos, name, x)
    check_like("sin", sin, "cos", cos)
    _check_table(name, x, cos, positions, width)


def _rows_of(shape: tuple[int, ...], batch: int, tokens: int) -> bool:
    """Return whether a shape is (S,) or (B, S).

    Sizes are compared in this order only: batch and tokens, which may be equal, need no guard.
    """
    return shape == (tokens,) if len(shape) == 1 else shape == (batch, tokens)


def _check_table(name: str, x: Tensor, cos: Tensor, positions: Tensor | None, width: int) -> None:
    batch, tokens = x.shape[0], x.shape[2]
    shape = tuple(cos.shape)
    if cos.dim() == 0 or shape[-1] not in (width, width // 2):
        raise ValueError(
            f"`cos` must have a last size of {width} or {width // 2}, the rotated elements of "
            f"`{name}` or half of them, got {shape}"
        )
    if positions is None:
        if not _rows_of(shape[:-1], batch, tokens) and shape[:-1] != (1, tokens):
            raise ValueError(
                f"`cos` must have the shape ({tokens}, {shape[-1]}) or ({batch}, {tokens}, "
                f"{shape[-1]}), a row a token of `{name}`, got {shape}"
            )
        return
    if cos.dim() != 2 or shape[0] == 0:
        raise ValueError(
            f"`cos` must be a table (T, {shape[-1]}) of at least one row where `positions` are "
            f"given, got {shape}"
        )
    check_tensor("positions", positions)
    check_dtype("positions", positions.dtype, INDEX_DTYPES)
    check_same_device("positions", positions, name, x)
    if not _rows_of(tuple(positions.shape), batch, tokens):
        raise ValueError(
            f"`positions` must have the shape ({tokens},) or ({batch}, {tokens}), got "
            f"{tuple(positions.shape)}"
        )


def _fake(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
) -> Tensor:
    _check("x", x, cos, sin, positions, rotary_dim)
    return x.new_empty(x.shape)


def _fake_backward(
    grad: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
    token_major: bool = False,
) -> Tensor:
    _check("grad", grad, cos, sin, positions, rotary_dim)
    if token_major:
        batch, heads, tokens, width = grad.shape
        return grad.new_empty((batch, tokens, heads, width)).transpose(1, 2)
    return grad.new_empty(grad.shape)


def _eager(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *rest: Any
) -> Tensor:
    """Run the formula; where looking is cheap, say that a position has no row."""
    if positions is not None and positions.is_cpu and positions.numel():
        largest = int(positions.max())
        if largest >= cos.shape[0]:
            raise ValueError(
                f"`positions` must be below {cos.shape[0]}, the rows of `cos`, got {largest}"
            )
    return reference.rope(x, cos, sin, positions, *rest)


rope = define(
    "rope(Tensor x, Tensor cos, Tensor sin, Tensor? positions=None, int rotary_dim=0,"
    " bool interleaved=False) -> Tensor",
    fake=_fake,
    reference=_eager,
    compiled=False,
)
rope_backward = define(
    "rope_backward(Tensor grad, Tensor cos, Tensor sin, Tensor? positions=None, int rotary_dim=0,"
    " bool interleaved=False, bool token_major=False) -> Tensor",
    fake=_fake_backward,
    reference=reference.rope_backward,
    compiled=False,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, positions, ctx.rotary_dim, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin, positions)
    # As x lies, so that a projection of (B, S, H * D) takes the gradient without a copy.
    ctx.token_major = bool(x.stride(1) < x.stride(2))


def _gradients(ctx: Any, grad: Tensor) -> Any:
    cos, sin, positions = ctx.saved_tensors
    rest = ctx.rotary_dim, ctx.interleaved, ctx.token_major
    return rope_backward(grad, cos, sin, positions, *rest), None, None, None, None, None


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yield tokens in the order of projections, and heads apart; all forms of the tables."""
    generator = torch.Generator(device=device).manual_seed(0)
    for number, dtype in enumerate(INPUT_DTYPES):
        x = torch.randn(2, 5, 3, 32, generator=generator, device=device).to(dtype).transpose(1, 2)
        angle = torch.rand(5, 16, generator=generator, device=device) * 6
        yield x, angle.cos(), angle.sin(), None, 0, bool(number % 2)
        full = angle.repeat(2, 1, 1).repeat(1, 1, 2).bfloat16()
        yield x.contiguous(), full.cos(), full.sin(), None, 0, not number % 2
        positions = torch.tensor([[4, 0, 1, 3, 3], [0, 1, 2, 3, 4]], device=device)
        yield x, angle[:, :12].cos(), angle[:, :12].sin(), positions, 24, bool(number % 2)
        yield x[..., 1:11], angle[:, :3].cos(), angle[:, :3].sin(), positions[0].int(), 6, False


def _inputs_backward(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, arguments in enumerate(_inputs(device)):
        yield (*arguments, bool(number % 2))


register(
    rope,
    reference=reference.rope,
    decomposition="inductor_ext.decompositions.rope:rope",
    autograd=Autograd(_gradients, _setup_context),
    inputs=_inputs,
)
register(
    rope_backward,
    reference=reference.rope_backward,
    decomposition="inductor_ext.decompositions.rope:rope_backward",
    autograd=None,
    inputs=_inputs_backward,
)
