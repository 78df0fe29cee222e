"""Argument checks shared by the fakes and the public API: "`name` must ..., got ..."."""

from __future__ import annotations

import torch
from torch import Tensor

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def name_of(dtype: torch.dtype) -> str:
    """Return "bfloat16" for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def names_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return "a, b or c"."""
    names = [name_of(d) for d in dtypes]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a dense (strided) tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a Tensor, got {type(value).__name__}")
    # In an autograd.Function's backward Dynamo breaks the graph at `layout`; the op's fake looks.
    if torch.compiler.is_dynamo_compiling():
        return
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"`{name}` must be a dense tensor, got a {kind} one")


def check_eps(eps: float) -> None:
    """Raise ValueError unless ``eps`` is a non-negative fp32 number."""
    largest = torch.finfo(torch.float32).max
    if not 0.0 <= eps <= largest:
        raise ValueError(f"`eps` must be at least 0 and at most {largest:g}, got {eps!r}")


def check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless ``dtype`` is one of ``allowed``."""
    if dtype not in allowed:
        raise TypeError(f"`{name}` must be {names_of(allowed)}, got {name_of(dtype)}")


def check_same_device(name: str, value: Tensor, other: str, reference: Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if value.device != reference.device:
        raise ValueError(
            f"`{name}` must be on the device of `{other}`, {reference.device}, got {value.device}"
        )


def check_like(name: str, value: Tensor, other: str, reference: Tensor) -> None:
    """Raise TypeError or ValueError unless shape, dtype and device are those of ``reference``."""
    check_tensor(name, value)
    check_dtype(name, value.dtype, (reference.dtype,))
    check_same_device(name, value, other, reference)
    if value.shape != reference.shape:
        raise ValueError(
            f"`{name}` must have the shape of `{other}`, {tuple(reference.shape)}, got "
            f"{tuple(value.shape)}"
        )


def check_no_grad(name: str, value: object, op: str) -> None:
    """Raise ValueError if autograd would silently lose the gradient of ``value``."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"`{name}` must not require grad: {op} has no gradient rule. Call it under "
            "torch.no_grad(), on x.detach(), or inside an autograd.Function"
        )


def check_scale(name: str, scale: Tensor, x_name: str, x: Tensor) -> bool:
    """Check a scale that belongs to the whole of ``x`` or to each of its rows.

    Args:
        scale: float32, one element (whole tensor) or ``(*x.shape[:-1], 1)`` (a scale a row).

    Returns:
        True when there is a scale a row.

    Raises:
        TypeError, ValueError: on another dtype, shape or device.
    """
    check_tensor(name, scale)
    check_dtype(name, scale.dtype, (torch.float32,))
    check_same_device(name, scale, x_name, x)
    if is_row_scale(scale, x):
        return True
    if scale.numel() != 1:
        expected = (*x.shape[:-1], 1) if x.dim() else ()
        raise ValueError(
            f"`{name}` must have one element or the shape {tuple(expected)}, a scale for each "
            f"row of `{x_name}`, got {tuple(scale.shape)}"
        )
    return False


def is_row_scale(scale: Tensor, x: Tensor) -> bool:
    """Return whether ``scale`` has the shape ``(*x.shape[:-1], 1)`` of a scale a row."""
    if x.dim() == 0 or scale.dim() != x.dim():
        return False
    return bool(scale.shape[-1] == 1 and scale.shape[:-1] == x.shape[:-1])
