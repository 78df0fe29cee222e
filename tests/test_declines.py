"""Lowerings that decline, raise or contradict the fake: the kernel runs, and the reason is kept."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import registry_toys
import torch
from registry_toys import (
    ALL_TWOS,
    Toys,
    compiled,
    double,
    multiply,
    outcomes,
    raised,
    triple,
)
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, _lowering, config, registry

pytestmark = pytest.mark.contract
toys = registry_toys.toys


def declines(x: Any) -> Any:
    raise ixt.Decline("the moon is full")


def fails(x: Any) -> Any:
    raise ZeroDivisionError("in the lowering")


def wrong_dtype(x: Any) -> Any:
    return multiply(x, 3.0, dtype=torch.float64)


def wrong_shape(x: Any) -> Any:
    return multiply(x, 3.0, size=[2, 4])


def wrong_length(x: Any) -> Any:
    return multiply(x, 3.0, size=[3])


def two_results(x: Any) -> Any:
    return triple(x), triple(x)


def no_result(x: Any) -> Any:
    return None


def not_ir(x: Any) -> Any:
    return 3.0


FAILURES: dict[Callable[..., Any], str] = {
    fails: "ZeroDivisionError: in the lowering",
    wrong_dtype: "result 0 is torch.float64, the fake says torch.float32",
    wrong_shape: "result 0 has the shape [2, 4], the fake says [4]",
    wrong_length: "result 0 has the shape [3], the fake says [4]",
    two_results: "it returned 2 results, the fake says 1",
    no_result: "result 0 is a NoneType, not Inductor IR",
    not_ir: "result 0 is a float, not Inductor IR",
}


@pytest.mark.parametrize("lowering", FAILURES, ids=lambda f: f.__name__)
def test_bad_lowering(toys: Toys, lowering: Callable[..., Any]) -> None:
    """Falls back, warns once, gives the right numbers; strict mode raises."""
    op, reason = toys.op(), FAILURES[lowering]
    ixt.register(op, reference=double, lowering=lowering, autograd=None)
    with config.patch(enabled=True):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert torch.equal(compiled(op), ALL_TWOS)
            assert torch.equal(compiled(op), ALL_TWOS)
        told = [str(w.message) for w in said if issubclass(w.category, ixt.InductorExtWarning)]
        assert len(told) == 1
        assert registry.op_name(op) in told[0]
        assert reason in told[0]
        assert outcomes(op) == [("failed", reason)] * 2
        assert toys.calls[op] == 2
        with config.patch(strict=True), pytest.raises(Exception, match="lowering of") as caught:
            compiled(op)
    error = raised(caught.value, ixt.LoweringError)
    assert str(error) == (
        f"the lowering of {registry.op_name(op)} failed: {reason}. Mend the lowering, or set "
        "inductor_ext.config.strict = False to run the opaque kernel instead."
    )


def breaks(x: Tensor) -> Tensor:
    raise ZeroDivisionError("in the decomposition")


def test_decomposition_that_raises(toys: Toys) -> None:
    op = toys.op()
    ixt.register(op, reference=double, decomposition=breaks, autograd=None)
    with config.patch(enabled=True):
        with pytest.warns(ixt.InductorExtWarning, match="ZeroDivisionError: in the decomposition"):
            assert torch.equal(compiled(op), ALL_TWOS)
        assert set(outcomes(op)) == {("failed", "ZeroDivisionError: in the decomposition")}
        with config.patch(strict=True), pytest.raises(Exception, match="in the decomp") as caught:
            compiled(op)
    raised(caught.value, ixt.LoweringError)


def supports_raises(x: Any) -> bool:
    raise KeyError("in supports")


@pytest.mark.parametrize("strategy", ["lowering", "decomposition"])
def test_supports_that_raises(toys: Toys, strategy: str) -> None:
    op = toys.op()
    way = {strategy: triple if strategy == "lowering" else double}
    ixt.register(op, reference=double, autograd=None, supports=supports_raises, **way)
    with config.patch(enabled=True):
        with pytest.warns(ixt.InductorExtWarning, match="KeyError: 'in supports'"):
            assert torch.equal(compiled(op), ALL_TWOS)
        assert {outcome for outcome, _ in outcomes(op)} == {"failed"}


def says_no(x: Any) -> bool:
    return False


def says_why(x: Any) -> str:
    assert isinstance(x, Tensor)  # the predicate sees (fake) tensors, whatever the strategy
    return f"{x.dim()} dimensions are too few"


DECLINES: dict[str, tuple[dict[str, Any], str]] = {
    "lowering raises Decline": ({"lowering": declines}, "the moon is full"),
    "decomposition raises Decline": ({"decomposition": declines}, "the moon is full"),
    "supports says no": (
        {"lowering": triple, "supports": says_no},
        "its `supports` predicate returned False",
    ),
    "supports says why": (
        {"lowering": triple, "supports": says_why},
        "1 dimensions are too few",
    ),
    "supports of a decomposition": (
        {"decomposition": double, "supports": says_why},
        "1 dimensions are too few",
    ),
}


@pytest.mark.parametrize("way", DECLINES)
def test_decline(toys: Toys, way: str) -> None:
    """Stays opaque without a warning; strict mode names op, reason and remedy."""
    arguments, reason = DECLINES[way]
    op = toys.op()
    ixt.register(op, reference=double, autograd=None, **arguments)
    with config.patch(enabled=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error", ixt.InductorExtWarning)
            assert torch.equal(compiled(op), ALL_TWOS)
        assert toys.calls[op] == 1
        assert set(outcomes(op)) == {("declined", reason)}
        with config.patch(strict=True), pytest.raises(Exception, match="declined") as caught:
            compiled(op)
    error = raised(caught.value, ixt.DeclinedError)
    assert isinstance(error, ixt.DeclinedError)
    assert (error.op, error.reason) == (registry.op_name(op), reason)
    assert str(error).startswith(
        f"{registry.op_name(op)} declined to be lowered: {reason}. Change the arguments, add the "
        "op to inductor_ext.config.disabled_ops, or set inductor_ext.config.strict = False to "
        "run its opaque kernel."
    )


def test_decline_keeps_the_strides_that_eager_gives(toys: Toys) -> None:
    """The kernel behind a decline sees its input as eager mode would have handed it over."""
    library, seen = toys.library, []
    library.define("strides(Tensor x) -> Tensor")

    def real(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.contiguous() * 2

    library.impl("strides", real, "CPU")
    torch.library.register_fake(
        "ixt_registry::strides", lambda x: x.new_empty(x.shape), lib=library
    )
    op = torch.ops.ixt_registry.strides.default
    contract = ixt.register(op, reference=double, lowering=declines, autograd=None)

    def chain(x: Tensor) -> Tensor:
        return op((x + 1).t())

    with config.patch(enabled=True):
        x = torch.arange(6.0).view(2, 3)
        result = torch.compile(chain, fullgraph=True)(x)
    contract.unregister()
    assert torch.equal(result, (x + 1).t() * 2)
    assert seen == [(1, 3)]


def test_architecture_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_80 has no conversion to float8: declined with a reason, sm_89 and later accepted."""
    supports = registry.contract(ixt.ops.fp8.quantize_fp8_row).supports
    assert supports is not None

    class Elsewhere:
        device = torch.device("cuda", 0)

    for capability, accepted in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None, c=capability: c)
        answer = supports(Elsewhere(), torch.float8_e4m3fn)
        assert (answer is True) == accepted
        if not accepted:
            assert f"this device is sm_{capability[0]}{capability[1]}" in str(answer)
    assert supports(torch.ones(2), torch.float8_e4m3fn) is True


@pytest.mark.parametrize("kind", ["xpu", "hip"])
def test_other_gpus_stay_opaque(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowerings hold PTX: on other back ends they would fail after the point of return."""
    monkeypatch.setattr(torch.version, "hip", "6.4" if kind == "hip" else None)
    x = types.SimpleNamespace(device=torch.device("cuda" if kind == "hip" else kind))
    said = ixt.ops.fp8.triton_casts_to_fp8(x)
    assert said == f"the lowerings are written for the CPU and for CUDA, not for {said.split()[-1]}"
    assert said.endswith("ROCm" if kind == "hip" else "xpu")


@pytest.mark.parametrize(
    ("strides", "same"),
    [((128, 16, 1), True), ((7, 16, 1), True), ((128, 1, 8), False)],
)
def test_strides_are_compared_where_they_show(strides: tuple[int, ...], same: bool) -> None:
    graphs = types.SimpleNamespace(
        graph=types.SimpleNamespace(
            sizevars=types.SimpleNamespace(statically_known_equals=lambda a, b: a == b)
        )
    )
    with mock.patch.object(_compat, "V", graphs, create=True):
        assert _lowering._same_strides(strides, torch.empty(1, 8, 16)) is same
