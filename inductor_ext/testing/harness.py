"""``check_op``: every promise of an op's contract, checked on inputs of its own generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from inductor_ext.registry import OpContract, contract

from .checks import BATCHES, CHECKS, Context, across_devices
from .samples import Inputs, Sample, samples

ALL = (*CHECKS, "across_devices")


@dataclass(frozen=True)
class Report:
    """What :func:`check_op` did: the op, and how many samples each check saw."""

    op: str
    ran: dict[str, int]

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.ran.items())
        return f"{self.op}: {counts}"


def check_op(
    op: OpOverload | OpContract | str,
    inputs: Inputs | None = None,
    devices: Sequence[str] = ("cpu",),
    *,
    checks: Iterable[str] | None = None,
    nan_equal: bool | Sequence[bool] = False,
    batches: Sequence[int] = BATCHES,
    compile_samples: int | None = None,
    grad_reference: Callable[..., Any] | None = None,
) -> Report:
    """Check a registered op against its contract, bit for bit.

    On each device and for each sample: the fake is like the real result (dtype, shape, strides,
    storage offset, device); eager gives the reference's and the decomposition's bits and leaves
    its inputs alone; compiled with the plugin gives eager's bits by the strategy that the
    contract names; compiled without it gives them too; batch sizes do not recompile; gradients
    agree where the contract has a rule; ``torch.library.opcheck`` passes.  With several devices,
    the others give the first one's bits.

    Args:
        op: a registered op, its contract, or its name.
        inputs: ``inputs(device)`` yields tuples of positional arguments; by default the
            contract's.  With several devices the first one's are copied to the others.
        devices: device types or names, such as ``("cpu", "cuda")``.
        checks: names out of ``inductor_ext.testing.ALL``; by default all of them.
        nan_equal: whether any NaN equals any other: for all outputs, or one flag an output.
            Backends differ in NaN payloads; a format that defines its NaN wants False.
        batches: sizes of dimension 0 for the check ``dynamic``.
        compile_samples: how many samples the checks that compile see (all, by default): the
            first ones of different dtypes, then in order.
        grad_reference: a differentiable function of the op's arguments whose gradients the op's
            rule must equal, bit for bit.

    Returns:
        A :class:`Report`.

    Raises:
        ParityError: on the first check that fails; names the op, the check, the sample and the
            first mismatching element with its inputs.
        ValueError, KeyError: if a check or device does not exist, or the op is not registered.
    """
    found = op if isinstance(op, OpContract) else contract(op)
    wanted = _wanted(checks)
    generator = inputs if inputs is not None else found.inputs
    if generator is None:
        raise ValueError(f"`inputs` must be given: the contract of {found.name} has no generator")
    places = [_device(name) for name in devices]
    if not places:
        raise ValueError("`devices` must name at least one device, got none")
    context = Context(found, nan_equal, tuple(batches), grad_reference)
    ran = dict.fromkeys(wanted, 0)
    first = samples(generator, places[0])
    chosen = _to_compile(first, compile_samples)
    for device in places:
        for sample in first:
            here = sample if device == places[0] else sample.to(device)
            for name in wanted:
                if name == "across_devices":
                    if device != places[0]:
                        across_devices(context, sample.clone(), here.clone())
                        ran[name] += 1
                elif name not in _COMPILES or sample.number in chosen:
                    CHECKS[name](
                        context, here.clone()
                    )  # an op that writes to its inputs stays apart
                    ran[name] += 1
    return Report(found.name, ran)


_COMPILES = {"opcheck", "compiled_on", "compiled_off", "dynamic", "autograd"}


def _wanted(checks: Iterable[str] | None) -> tuple[str, ...]:
    names = ALL if checks is None else tuple(checks)
    for name in names:
        if name not in ALL:
            raise ValueError(f"`checks` must be out of {', '.join(ALL)}, got {name!r}")
    return names


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"`devices` must be present, got {name!r} without a CUDA device")
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
    return device


def _to_compile(found: Sequence[Sample], limit: int | None) -> set[int]:
    """Choose the samples that are compiled: those with dtypes not seen yet, then the rest."""
    if limit is None:
        return {sample.number for sample in found}
    seen: set[str] = set()
    fresh: list[int] = []
    rest: list[int] = []
    for sample in found:
        key = repr([getattr(a, "dtype", a) for a in sample.args])
        (rest if key in seen else fresh).append(sample.number)
        seen.add(key)
    return set((fresh + rest)[:limit])
