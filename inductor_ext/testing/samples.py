"""Argument tuples for an op: moved between devices, resized along the batch, described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compare import bits_of, describe

Inputs = Callable[[torch.device], Iterable[tuple[Any, ...]]] | Iterable[tuple[Any, ...]]


@dataclass(frozen=True)
class Sample:
    """One call of an op: its positional arguments, as an input generator yields them."""

    args: tuple[Any, ...]
    number: int

    def __str__(self) -> str:
        devices = {a.device.type for a in self.args if isinstance(a, Tensor)}
        told = ", ".join(describe(a) for a in self.args)
        return f"#{self.number} ({told}) on {'/'.join(sorted(devices)) or 'no device'}"

    def to(self, device: torch.device) -> Sample:
        """Return the same call on another device, with the same strides and storage offsets."""
        return Sample(tuple(_move(a, device) for a in self.args), self.number)

    def clone(self) -> Sample:
        """Return a copy whose tensors have storages of their own."""
        return Sample(tuple(_move(a, None) for a in self.args), self.number)

    def batched(self, size: int) -> Sample:
        """Return the call with ``size`` rows, repeating or dropping rows of this one.

        The batch is dimension 0 of the first tensor that has dimensions, and of every other
        tensor of the same length there.
        """
        length = self.batch()
        return Sample(
            tuple(
                _rows(a, size) if isinstance(a, Tensor) and a.dim() and len(a) == length else a
                for a in self.args
            ),
            self.number,
        )

    def batch(self) -> int | None:
        """Return the length of the batch dimension, None if no tensor has dimensions."""
        return next((len(a) for a in self.args if isinstance(a, Tensor) and a.dim()), None)


def samples(inputs: Inputs, device: torch.device) -> list[Sample]:
    """Collect a generator's argument tuples.

    Raises:
        ValueError: if there are none, or one of them is not a tuple.
    """
    made = inputs(device) if callable(inputs) else inputs
    found = []
    for number, args in enumerate(made):
        if not isinstance(args, tuple):
            raise ValueError(f"`inputs` must yield tuples of arguments, got {type(args).__name__}")
        found.append(Sample(args, number))
    if not found:
        raise ValueError("`inputs` must yield at least one tuple of arguments, got none")
    return found


def differentiable(args: Sequence[Any]) -> list[int]:
    """Return the positions of the tensors that can require a gradient (no fp8, no integers)."""
    return [
        i
        for i, a in enumerate(args)
        if isinstance(a, Tensor)
        and (a.dtype.is_floating_point or a.dtype.is_complex)
        and a.element_size() > 1
    ]


def require_grad(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return copies of the arguments whose differentiable tensors are leaves requiring grad."""
    chosen = set(differentiable(args))
    return tuple(_move(a, None).requires_grad_() if i in chosen else a for i, a in enumerate(args))


def _move(value: Any, device: torch.device | None) -> Any:
    """Copy a tensor's whole storage, so that strides, offset and aliasing of elements stay."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    storage = value.untyped_storage()
    room = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device or value.device)
    if storage.nbytes():
        room.copy_(torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage))
    return torch.empty(0, dtype=value.dtype, device=room.device).set_(
        room.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    )


def _rows(t: Tensor, size: int) -> Tensor:
    pick = torch.arange(size, device=t.device) % max(len(t), 1)
    if len(t) == 0 and size:
        raise ValueError(
            "`inputs` must yield samples with at least one row to vary the batch, got one with none"
        )
    rows = bits_of(t).index_select(0, pick)
    return rows.view(t.dtype) if t.dtype != torch.complex128 else torch.view_as_complex(rows)
