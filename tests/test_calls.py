"""Eager calls that leave the dispatcher out: only where it would do nothing but call the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_ext as ixt
from inductor_ext import _call, _compat
from inductor_ext.errors import CompatError

ARGUMENTS = (torch.zeros(3), None, torch.bfloat16, True, 1, "gemm")


class Mode(TorchDispatchMode):
    """Notes the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A tensor that wants to see ops."""


def test_plain() -> None:
    assert _call.is_plain(ARGUMENTS)
    with torch.no_grad(), torch.inference_mode():
        assert _call.is_plain(ARGUMENTS)
    assert not _call.is_plain((torch.zeros(3).as_subclass(Subclass), *ARGUMENTS))
    assert not _call.is_plain((*ARGUMENTS, torch.nn.Parameter(torch.zeros(3))))
    with _compat.FakeTensorMode() as mode:
        assert not _call.is_plain(ARGUMENTS)
    assert not _call.is_plain((mode.from_tensor(torch.zeros(3)),))


def test_modes_transforms_and_traces_see_ops() -> None:
    answers: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        answers.append(_call.is_plain((x,)))
        return x + 1

    x = torch.zeros(3)
    with Mode():
        ask(x)
    with torch.device("cpu"):
        ask(x)
    with torch.profiler.profile():
        ask(x)
    torch.vmap(ask)(x)
    torch.func.functionalize(ask)(x)
    torch.func.grad(lambda x: ask(x).sum())(x)
    torch.jit.trace(ask, x, check_trace=False)
    assert answers == [False] * 7
    ask(x)
    assert answers[-1]


def test_a_torch_without_the_symbols() -> None:
    _call._questions.cache_clear()
    with mock.patch.object(_compat, "__getattr__", side_effect=CompatError("moved")):
        kept = vars(_compat).pop("transform", None)
        assert not _call.is_plain(ARGUMENTS)
    if kept is not None:
        vars(_compat)["transform"] = kept
    _call._questions.cache_clear()
    assert _call.is_plain(ARGUMENTS)


@pytest.fixture
def product() -> Callable[[], Tensor]:
    f = ixt.FP8()
    x, w = (ixt.quantize(torch.randn(32, 64, device="cuda"), f) for _ in range(2))
    return lambda: ixt.scaled_mm(x, w, f)


@pytest.mark.gpu
def test_on_a_card(product: Callable[[], Tensor]) -> None:
    """The same bits by either way; who watches sees the op."""
    want, name = product(), "inductor_ext.scaled_mm.default"
    kernel = mock.Mock(side_effect=_call.KERNELS[torch.ops.inductor_ext.scaled_mm.default])
    with mock.patch.dict(_call.KERNELS, {torch.ops.inductor_ext.scaled_mm.default: kernel}):
        assert torch.equal(product(), want)
        assert kernel.call_count == 1
        with Mode() as mode:
            assert torch.equal(product(), want)
        assert name in mode.seen
        with torch.profiler.profile() as profile:
            assert torch.equal(product(), want)
        assert "inductor_ext::scaled_mm" in {event.name for event in profile.events()}
        assert kernel.call_count == 1
