"""The integer, amax and scaling ops next to their oracle: how to call one, what it must return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import calls
import cases
import numpy as np
import torch
from oracle import ints as oracle
from torch import Tensor

from inductor_ext.decompositions import amax as amax_reference
from inductor_ext.decompositions import int4 as int4_reference
from inductor_ext.decompositions import int8 as int8_reference
from inductor_ext.decompositions import scaling as scaling_reference
from inductor_ext.ops import amax, int4, int8, scaling

_MODULES = (
    (amax, amax_reference, ("amax", "amax_row")),
    (
        int8,
        int8_reference,
        ("quantize_int8_tensor", "quantize_int8_row", "quantize_int8_group", "dequantize_int8"),
    ),
    (
        int4,
        int4_reference,
        ("quantize_int4_symmetric", "quantize_int4_asymmetric", "dequantize_int4"),
    ),
    (scaling, scaling_reference, ("update_fp8_scale",)),
)
OPS: dict[str, Any] = {n: getattr(m, n) for m, _, names in _MODULES for n in names}
REFERENCES: dict[str, Any] = {n: getattr(r, n) for _, r, names in _MODULES for n in names}
GROUPS = int8.GROUPS
CODES = {"quantize_int8_tensor", "quantize_int8_row", "quantize_int8_group"}


class Call(calls.Call):
    """A call of an integer op; nothing that is made from data is ever NaN."""

    def nan_equal(self) -> bool:
        return self.op in ("dequantize_int8", "dequantize_int4", "update_fp8_scale")


def own(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments in storages of their own, with the same strides: to be written to."""

    def copy(t: Tensor) -> Tensor:
        room = t.untyped_storage().clone()
        empty = torch.empty(0, dtype=t.dtype, device=t.device)
        return empty.set_(room, t.storage_offset(), t.shape, t.stride())

    return tuple(copy(a) if isinstance(a, Tensor) else a for a in args)


def run(call: Call, device: str) -> None:
    """Check the reference and the eager kernel."""
    args = call.on(device)
    call.check(REFERENCES[call.op](*args), f"reference, {device}")
    call.check(OPS[call.op](*args), f"eager, {device}")


def _bytes(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(array, order="C")).view(dtype)


def _groups(true: oracle.Groups) -> tuple[Tensor, ...]:
    codes = _bytes(true.codes, torch.int8 if true.codes.dtype == np.int8 else torch.uint8)
    scale = cases.f32(true.scale)
    return (codes, scale) if true.zero is None else (codes, scale, _bytes(true.zero, torch.uint8))


def amax_of(x: Tensor, row: bool, label: str = "") -> Call:
    want = cases.f32(oracle.amax(cases.floats(x), row))
    return Call("amax_row" if row else "amax", (x,), (want,), label)


def int8_of(x: Tensor, row: bool, label: str = "") -> Call:
    op = "quantize_int8_row" if row else "quantize_int8_tensor"
    return Call(op, (x,), _groups(oracle.int8(cases.floats(x), row)), label)


def int8_group(x: Tensor, group: int, label: str = "") -> Call:
    want = _groups(oracle.int8_group(cases.floats(x), group))
    return Call("quantize_int8_group", (x, group), want, label)


def int4_of(x: Tensor, group: int, symmetric: bool, label: str = "") -> Call:
    true = (oracle.int4_symmetric if symmetric else oracle.int4_asymmetric)(cases.floats(x), group)
    op = f"quantize_int4_{'symmetric' if symmetric else 'asymmetric'}"
    return Call(op, (x, group), _groups(true), label)


def dequantize_int8(
    codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype, label: str = ""
) -> Call:
    bits = oracle.dequantize_int8(codes.numpy(), cases.floats(scale), group, cases.NAMES[dtype])
    args = (codes, scale, group, dtype)
    return Call("dequantize_int8", args, (cases.from_raw(bits, dtype),), label)


def dequantize_int4(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group: int,
    dtype: torch.dtype,
    label: str = "",
) -> Call:
    zeros = None if zero is None else zero.numpy()
    bits = oracle.dequantize_int4(
        codes.numpy(), cases.floats(scale), zeros, group, cases.NAMES[dtype]
    )
    args = (codes, scale, zero, group, dtype)
    return Call("dequantize_int4", args, (cases.from_raw(bits, dtype),), label)


def update(history: Tensor, scale: Tensor, dtype: torch.dtype, margin: int, algorithm: str) -> Call:
    moved, updated = oracle.update_scale(
        cases.floats(history), cases.floats(scale), torch.finfo(dtype).max, margin, algorithm
    )
    args = (history, scale, dtype, margin, algorithm)
    return Call("update_fp8_scale", args, (cases.f32(moved), cases.f32(updated)))


def of_any_shape(x: Tensor, label: str = "") -> Iterator[Call]:
    """Every op that takes x as it is, whatever its shape."""
    yield amax_of(x, False, label)
    yield int8_of(x, False, label)
    if x.dim():
        yield amax_of(x, True, label)
        yield int8_of(x, True, label)
        for group in (32, 128):
            yield int8_group(x, group, label)


def of_groups(x: Tensor, group: int, label: str = "") -> Iterator[Call]:
    """Every op on groups, for rows of whole groups."""
    yield int8_group(x, group, label)
    yield int4_of(x, group, True, label)
    yield int4_of(x, group, False, label)


def dequantizations(call: Call, dtype: torch.dtype) -> Iterator[Call]:
    """The way back from the result of a quantize op."""
    if call.op in CODES:
        group = call.args[1] if len(call.args) > 1 else 0
        yield dequantize_int8(*call.want, group, dtype, call.label)
    elif call.op.startswith("quantize_int4"):
        zero = call.want[2] if len(call.want) > 2 else None
        yield dequantize_int4(*call.want[:2], zero, call.args[1], dtype, call.label)


def tied(dtype: torch.dtype, steps: int, columns: int) -> Tensor:
    """Rows whose scale is a power of two and whose elements are ties and their neighbours."""
    half = np.arange(-2 * steps, 2 * steps + 1) / 2
    near = np.concatenate([half, np.nextafter(half, 0, dtype=np.float32), half * (1 + 2.0**-8)])
    near = np.clip(near, -steps, steps)
    rows = -(-len(near) // (columns - 1))
    values = np.zeros((rows, columns), np.float32)
    values[:, 0] = steps
    values[:, 1:].flat[: len(near)] = near
    return torch.from_numpy(np.concatenate([values, values * 2.0**-9])).to(dtype)


def extreme_scales(count: int, seed: int = 0) -> Tensor:
    """Scales of the magnitudes that quantization uses, and every extreme one."""
    values = np.exp2(np.random.default_rng(seed).uniform(-20, 20, count)).astype(np.float32)
    extremes = cases.floats(torch.stack(cases.scales()))
    values[::5] = extremes[np.arange(len(values[::5])) % len(extremes)]
    return cases.f32(values)
