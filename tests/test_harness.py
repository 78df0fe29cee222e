"""The parity harness must be able to fail: each check meets an op that breaks what it checks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat
from inductor_ext.testing import ALL, ParityError, check_op
from inductor_ext.testing.checks import Context, across_devices
from inductor_ext.testing.samples import Sample

_numbers = itertools.count()
X = torch.arange(1.0, 13.0).view(3, 4)


def _inputs(device: torch.device) -> Iterator[tuple[Tensor]]:
    yield (X.to(device),)


def _double(x: Tensor) -> Tensor:
    return x * 2


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _lower_double(x: Any) -> Any:
    return _pointwise(x, lambda value: _compat.ops.mul(value, _constant(2.0)))


def _constant(value: float) -> Any:
    return _compat.ops.constant(value, torch.float32)


def _pointwise(x: Any, function: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Any:
    load = x.make_loader()
    return _compat.ir.Pointwise.create(
        device=x.get_device(),
        dtype=dtype,
        inner_fn=lambda index: function(load(index)),
        ranges=x.get_size(),
    )


class Toys:
    """Makes an op with a kernel, a fake and a contract of its own, and takes them back."""

    def __init__(self) -> None:
        self.contracts: list[ixt.OpContract] = []
        self.libraries: list[torch.library.Library] = []

    def __call__(
        self,
        kernel: Callable[..., Any] = _double,
        fake: Callable[..., Any] = _like,
        schema: str = "(Tensor x) -> Tensor",
        key: str = "CPU",
        **contract: Any,
    ) -> ixt.OpContract:
        library = torch.library.Library("ixt_toys", "FRAGMENT")
        name = f"toy{next(_numbers)}"
        library.define(name + schema)
        library.impl(name, torch.no_grad()(kernel) if key == "CPU" else kernel, key)
        torch.library.register_fake(f"ixt_toys::{name}", fake, lib=library)
        self.libraries.append(library)
        settings = {"reference": _double, "autograd": None, "inputs": _inputs} | contract
        if not {"lowering", "decomposition", "opaque"} & settings.keys():
            settings["opaque"] = True
        made = ixt.register(getattr(torch.ops.ixt_toys, name).default, **settings)
        self.contracts.append(made)
        return made


@pytest.fixture
def toy() -> Iterator[Toys]:
    made = Toys()
    yield made
    for contract in made.contracts:
        contract.unregister()
    for library in made.libraries:
        library._destroy()


def _failure(contract: ixt.OpContract, check: str, **options: Any) -> ParityError:
    with pytest.raises(ParityError) as caught:
        check_op(contract, checks=(check,), **options)
    message = str(caught.value)
    assert contract.name in message
    assert check in message
    return caught.value


# ---- an op that keeps its contract ----


@pytest.mark.parametrize("strategy", ["lowering", "decomposition", "opaque"])
def test_a_sound_op_passes_every_check(toy: Toys, strategy: str) -> None:
    how = {"lowering": _lower_double, "decomposition": _double, "opaque": True}[strategy]
    contract = toy(**{strategy: how})
    report = check_op(contract)
    assert report.ran == dict.fromkeys(ALL, 1) | {"across_devices": 0}
    assert contract.name in str(report)


def test_a_sound_gradient_passes(toy: Toys) -> None:
    rule = ixt.Autograd(lambda ctx, grad: grad * 2)
    contract = toy(lowering=_lower_double, autograd=rule)
    check_op(contract, grad_reference=_double)


# ---- fake ----


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (lambda x: x.new_empty_strided(x.shape, (1, 3)), r"strides \(4, 1\), got \(1, 3\)"),
        (lambda x: x.new_empty(x.shape, dtype=torch.float64), "dtype torch.float32, got"),
        (lambda x: x.new_empty((4, 3)), r"shape \(3, 4\), got \(4, 3\)"),
        (lambda x: x.new_empty(13)[1:].view(3, 4), "storage offset 0, got 1"),
        (lambda x: torch.empty(x.shape, device="meta"), "device cpu, got meta"),
    ],
    ids=["strides", "dtype", "shape", "offset", "device"],
)
def test_wrong_fake(toy: Toys, fake: Callable[..., Any], words: str) -> None:
    error = _failure(toy(fake=fake), "fake")
    assert error.output == 0
    assert re.search(words, str(error))


def test_raising_fake(toy: Toys) -> None:
    def fake(x: Tensor) -> Tensor:
        raise NotImplementedError("no fake today")

    assert "no fake today" in str(_failure(toy(fake=fake), "fake"))


def test_wrong_number_of_outputs(toy: Toys) -> None:
    contract = toy(reference=lambda x: (x * 2, x))
    assert "expected 2 tensors, got 1" in str(_failure(contract, "reference"))


# ---- values ----


def test_first_mismatch_is_described(toy: Toys) -> None:
    def reference(x: Tensor, scale: Tensor) -> Tensor:
        right = x * scale
        right[1, 2] = 21.5
        right[2, 0] = -0.0
        return right

    contract = toy(
        lambda x, scale: x * scale,
        lambda x, scale: _like(x),
        "(Tensor x, Tensor scale) -> Tensor",
        reference=reference,
        inputs=lambda device: [(X, torch.tensor([[1.0], [3.0], [5.0]]))],
    )
    error = _failure(contract, "reference")
    assert (error.index, error.mismatches, error.output) == ((1, 2), 2, 0)
    message = str(error)
    assert "2 of 12 elements differ, the first at (1, 2)" in message
    assert "expected 0x41ac0000 (21.5), got 0x41a80000 (21.0)" in message
    assert "input 0 at (1, 2): 0x40e00000 (7.0)" in message
    assert "input 1 at (1, 0): 0x40400000 (3.0)" in message
    assert "float32[3, 4], float32[3, 1]" in message


def test_negative_zero_is_not_zero(toy: Toys) -> None:
    contract = toy(
        lambda x: x * 0.0,
        reference=lambda x: x.abs() * 0.0,
        inputs=lambda device: [(torch.tensor([1.0, -1.0]),)],
    )
    assert _failure(contract, "reference").index == (1,)


def test_nan_payloads_count_unless_told(toy: Toys) -> None:
    bits = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32)
    contract = toy(
        lambda x: bits.view(torch.float32).clone(),
        reference=lambda x: torch.tensor([float("nan"), 1.0]),
        inputs=lambda device: [(torch.ones(2),)],
    )
    assert "got 0x7fc00001 (nan)" in str(_failure(contract, "reference"))
    check_op(contract, checks=["reference"], nan_equal=True)
    check_op(contract, checks=["reference"], nan_equal=(True,))
    with pytest.raises(ValueError, match="must have 1 flags"):
        check_op(contract, checks=["reference"], nan_equal=(True, False))


def test_mutated_input(toy: Toys) -> None:
    contract = toy(lambda x: x.mul_(2).clone())
    assert "input 0 after the call" in str(_failure(contract, "pure"))
    assert torch.equal(X, torch.arange(1.0, 13.0).view(3, 4)), "the caller's inputs are spared"


def test_mutated_input_fails_opcheck(toy: Toys) -> None:
    assert "OpCheckError" in str(_failure(toy(lambda x: x.mul_(2).clone()), "opcheck"))


def _unsteady() -> Callable[..., Tensor]:
    calls = itertools.count()
    return lambda x: x + float(next(calls))


def test_different_bits_each_time(toy: Toys) -> None:
    assert _failure(toy(_unsteady()), "pure").index == (0, 0)
    assert _failure(toy(_unsteady()), "compiled_off").index == (0, 0)


def test_wrong_decomposition(toy: Toys) -> None:
    contract = toy(decomposition=lambda x: x + x + 1.0)
    assert "expected 0x40000000 (2.0), got 0x40400000 (3.0)" in str(
        _failure(contract, "decomposition")
    )
    assert _failure(contract, "compiled_on").mismatches == 12


def test_devices_that_disagree(toy: Toys) -> None:
    contract = toy(_unsteady())
    one = Sample((X,), 0)
    with pytest.raises(ParityError, match="across_devices"):
        across_devices(Context(contract, False, (1, 2), None), one, one)


# ---- compiled ----


def _one_ulp_up(x: Any) -> Any:
    def function(value: Any) -> Any:
        bits = _compat.ops.to_dtype_bitcast(
            _compat.ops.mul(value, _constant(2.0)), torch.int32, torch.float32
        )
        bits = _compat.ops.add(bits, _compat.ops.constant(1, torch.int32))
        return _compat.ops.to_dtype_bitcast(bits, torch.float32, torch.int32)

    return _pointwise(x, function)


def test_lowering_one_ulp_off(toy: Toys) -> None:
    error = _failure(toy(lowering=_one_ulp_up), "compiled_on")
    assert error.mismatches == 12
    assert "expected 0x40000000 (2.0), got 0x40000001 (2.000000238" in str(error)
    assert "input 0 at (0, 0): 0x3f800000 (1.0)" in str(error)


def _declining(x: Any) -> Any:
    raise ixt.Decline("not on a Sunday")


def _wrong_dtype(x: Any) -> Any:
    return _pointwise(x, lambda v: _compat.ops.to_dtype(v, torch.float64), torch.float64)


def _broken(x: Any) -> Any:
    raise RuntimeError("lost my index")


@pytest.mark.filterwarnings("ignore::inductor_ext.InductorExtWarning")
@pytest.mark.parametrize(
    ("lowering", "words"),
    [
        (_declining, r"is lowered, but it declined \(not on a Sunday\)"),
        (_wrong_dtype, r"is lowered, but it failed \(.*float64"),
        (_broken, r"is lowered, but it failed \(RuntimeError: lost my index\)"),
    ],
    ids=["declines", "dtype", "raises"],
)
def test_lowering_that_is_not_used(toy: Toys, lowering: Callable[..., Any], words: str) -> None:
    """The fallback gives the right bits, so only the records tell."""
    assert re.search(words, str(_failure(toy(lowering=lowering), "compiled_on")))


def test_declared_decline_is_accepted(toy: Toys) -> None:
    contract = toy(lowering=_lower_double, supports=lambda x: "never")
    check_op(contract, checks=["compiled_on", "dynamic"])
    contract = toy(decomposition=_double, supports=lambda x: x.shape[0] > 100)
    check_op(contract, checks=["compiled_on"])


def test_disabled_op_is_checked_all_the_same(toy: Toys) -> None:
    contract = toy(lowering=_one_ulp_up)
    with ixt.config.patch(disabled_ops={contract.name}):
        assert _failure(contract, "compiled_on").mismatches == 12
        assert ixt.config.disabled_ops == {contract.name}


def test_decomposition_that_specialises(toy: Toys) -> None:
    contract = toy(decomposition=lambda x: x * 2 if x.shape[0] == 2 else x + x)
    assert "batches 2, 3, 17 took" in str(_failure(contract, "dynamic"))


def _lower_for_this_size_only(x: Any) -> Any:
    rows = _compat.V.graph.sizevars.guard_int(x.get_size()[0])
    assert rows >= 0
    return _lower_double(x)


def test_lowering_that_specialises(toy: Toys) -> None:
    contract = toy(lowering=_lower_for_this_size_only)
    assert "compilations, at most" in str(_failure(contract, "dynamic"))


def test_lowering_wrong_for_one_size(toy: Toys) -> None:
    """Only the batch of one is wrong: a scalar broadcast instead of a row."""

    def lowering(x: Any) -> Any:
        return _lower_double(x) if x.get_size()[0] != 1 else _one_ulp_up(x)

    assert "float32[1, 4]" in str(_failure(toy(lowering=lowering), "dynamic"))


# ---- gradients ----


def test_missing_gradient(toy: Toys) -> None:
    contract = toy(autograd="native")
    assert "the contract has an autograd rule" in str(_failure(contract, "autograd"))


def test_undeclared_gradient(toy: Toys) -> None:
    contract = toy(key="CompositeExplicitAutograd", autograd=None)
    assert "the contract says autograd=None" in str(_failure(contract, "autograd"))


def test_wrong_gradient(toy: Toys) -> None:
    rule = ixt.Autograd(lambda ctx, grad: grad * 3)
    contract = toy(lowering=_lower_double, autograd=rule)
    check_op(contract, checks=["autograd"])  # the rule is at least the same everywhere
    error = _failure(contract, "autograd", grad_reference=_double)
    assert "gradient of input 0" in str(error)
    assert error.index == (0, 0)


def test_raising_gradient(toy: Toys) -> None:
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no way back")

    error = _failure(toy(autograd=ixt.Autograd(backward)), "autograd")
    assert "the backward (eager) raised RuntimeError: no way back" in str(error)


# ---- the harness's own arguments ----


def test_arguments(toy: Toys) -> None:
    contract = toy(inputs=None)
    with pytest.raises(ValueError, match="`inputs` must be given"):
        check_op(contract)
    with pytest.raises(ValueError, match="at least one tuple"):
        check_op(contract, [])
    with pytest.raises(ValueError, match="must yield tuples"):
        check_op(contract, [X])
    with pytest.raises(ValueError, match="`checks` must be out of"):
        check_op(contract, [(X,)], checks=["everything"])
    with pytest.raises(ValueError, match="at least one device"):
        check_op(contract, [(X,)], devices=())
    with pytest.raises(KeyError, match="not registered"):
        check_op("nobody::knows")
    assert check_op(contract.op, [(X,)], checks=["reference"]).ran == {"reference": 1}
    assert check_op(contract.name, [(X,)], checks=["reference"]).ran == {"reference": 1}


def test_compile_samples(toy: Toys) -> None:
    wide = [(X,), (X + 1,), (X.double(),)]
    ran = check_op(toy(), wide, checks=["fake", "compiled_off"], compile_samples=2).ran
    assert ran == {"fake": 3, "compiled_off": 2}
