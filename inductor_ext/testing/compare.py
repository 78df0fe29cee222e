"""Compare tensors bit for bit, and say where and why they first differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParityError(AssertionError):
    """Two ways to compute an op disagree, or an op breaks its contract.

    Attributes: ``op`` and ``check`` name what failed; ``index`` is the first mismatching element
    of ``output`` and ``mismatches`` their number, where a comparison of elements failed.
    """

    def __init__(
        self,
        op: str,
        check: str,
        detail: str,
        *,
        sample: str = "",
        output: int | None = None,
        index: tuple[int, ...] | None = None,
        mismatches: int = 0,
    ) -> None:
        where = f"\n  sample: {sample}" if sample else ""
        super().__init__(f"{op} fails the check `{check}`: {detail}{where}")
        self.op, self.check = op, check
        self.output, self.index, self.mismatches = output, index, mismatches


def bits_of(t: Tensor) -> Tensor:
    """View a tensor's elements as integers of the same size (complex128 as pairs of int64)."""
    if t.dtype == torch.complex128:
        t = torch.view_as_real(t)
    return t.detach().view(_INTEGER[t.element_size()])


def _is_nan(t: Tensor) -> Tensor:
    if not t.dtype.is_floating_point and not t.dtype.is_complex:
        return torch.zeros(t.shape, dtype=torch.bool, device=t.device)
    return t.float().isnan() if t.element_size() == 1 else t.isnan()


def bitwise_mismatches(got: Tensor, expected: Tensor, *, nan_equal: bool = False) -> Tensor:
    """Return a boolean mask of the elements whose bits differ.

    -0 differs from 0, and NaNs of other signs or payloads differ, unless ``nan_equal``.

    Raises:
        ValueError: if the dtypes or shapes differ.
    """
    if got.dtype != expected.dtype:
        raise ValueError(f"`got` must have the dtype {expected.dtype}, got {got.dtype}")
    if got.shape != expected.shape:
        raise ValueError(f"`got` must have the shape {tuple(expected.shape)}, got {_shape(got)}")
    if got.device != expected.device:
        got = got.to(expected.device)
    mask = bits_of(got) != bits_of(expected)
    if mask.dim() > got.dim():
        mask = mask.any(-1)
    if nan_equal:
        mask = mask & ~(_is_nan(got) & _is_nan(expected))
    return mask


def element(t: Tensor, index: tuple[int, ...]) -> str:
    """Return one element as "0x3f80 (1.0)": its bits and its value."""
    one = t[index].detach()
    size = one.element_size()
    if one.dtype == torch.complex128:
        pattern = "+".join(f"0x{int(b) & (1 << 64) - 1:016x}" for b in bits_of(one))
    else:
        pattern = f"0x{int(bits_of(one)) & (1 << 8 * size) - 1:0{2 * size}x}"
    value = one.float() if size == 1 and one.dtype.is_floating_point else one
    return f"{pattern} ({value.item()!r})"


def describe(value: Any) -> str:
    """Return "bfloat16[17, 129]", with strides and offset where they are not the usual ones."""
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if not value.is_contiguous():
        text += f" strides {tuple(value.stride())}"
    if value.storage_offset():
        text += f" offset {value.storage_offset()}"
    return text


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of an op's result, in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def metadata_problem(got: Tensor, expected: Tensor, *, device: bool = True) -> str | None:
    """Compare dtype, shape, strides, storage offset and device; None if they agree.

    The strides of dimensions of size 1, and of tensors without elements, address nothing and are
    not compared.
    """
    for name, one, other in (
        ("dtype", got.dtype, expected.dtype),
        ("shape", tuple(got.shape), tuple(expected.shape)),
        ("strides", _strides(got), _strides(expected)),
        ("storage offset", got.storage_offset(), expected.storage_offset()),
        ("device", got.device, expected.device),
    ):
        if one != other and (device or name != "device"):
            if name == "strides":
                one, other = tuple(got.stride()), tuple(expected.stride())
            return f"expected the {name} {other}, got {one}"
    return None


def require_equal(
    op: str,
    check: str,
    got: Any,
    expected: Any,
    *,
    args: Sequence[Any] = (),
    nan_equal: bool | Sequence[bool] = False,
    sample: str = "",
    same_device: bool = True,
) -> None:
    """Raise :class:`ParityError` unless two results of an op are the same, metadata and bits.

    Args:
        args: the op's arguments; an input whose shape broadcasts to the output's is quoted at
            the first mismatching element.
        nan_equal: for all outputs, or one flag an output.
    """
    ours, theirs = tensors(got), tensors(expected)
    if len(ours) != len(theirs):
        detail = f"expected {len(theirs)} tensors, got {len(ours)}"
        raise ParityError(op, check, detail, sample=sample)
    flags = [nan_equal] * len(ours) if isinstance(nan_equal, bool) else list(nan_equal)
    if len(flags) != len(ours):
        raise ValueError(f"`nan_equal` must have {len(ours)} flags, one an output, got {flags}")
    for number, (one, other, nan) in enumerate(zip(ours, theirs, flags, strict=True)):
        problem = metadata_problem(one, other, device=same_device)
        if problem:
            detail = f"output {number}: {problem}"
            raise ParityError(op, check, detail, sample=sample, output=number)
        _require_bits(op, check, number, one, other, nan, args, sample)


def _require_bits(
    op: str,
    check: str,
    number: int,
    got: Tensor,
    expected: Tensor,
    nan_equal: bool,
    args: Sequence[Any],
    sample: str,
) -> None:
    mask = bitwise_mismatches(got, expected, nan_equal=nan_equal)
    count = int(mask.sum())
    if count == 0:
        return
    flat = int(mask.reshape(-1).to(torch.uint8).argmax())
    index = tuple(int(i) for i in _unravel(flat, tuple(mask.shape)))
    lines = [
        f"output {number}: {count} of {mask.numel()} elements differ, the first at {index}",
        f"  expected {element(expected, index)}, got {element(got, index)}",
    ]
    for position, arg in enumerate(args):
        where = _broadcast_index(arg, index, tuple(mask.shape))
        if where is not None:
            lines.append(f"  input {position} at {where}: {element(arg, where)}")
    raise ParityError(
        op,
        check,
        "\n".join(lines),
        sample=sample,
        output=number,
        index=index,
        mismatches=count,
    )


def _broadcast_index(
    arg: Any, index: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return where an input is read for output ``index``; None if it does not broadcast there."""
    if not isinstance(arg, Tensor) or arg.dim() > len(shape):
        return None
    tail = len(shape) - arg.dim()
    if any(s not in (1, o) for s, o in zip(arg.shape, shape[tail:], strict=True)):
        return None
    return tuple(0 if s == 1 else i for s, i in zip(arg.shape, index[tail:], strict=True))


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, digit = divmod(flat, size)
        index.append(digit)
    return tuple(reversed(index))


def _strides(t: Tensor) -> tuple[int, ...]:
    if 0 in t.shape:
        return ()
    return tuple(st for size, st in zip(t.shape, t.stride(), strict=True) if size != 1)


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
