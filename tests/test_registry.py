"""The contract of ``register``: what it refuses, what it undoes, and what it records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import registry_toys
import torch
from registry_toys import (
    ALL_TWOS,
    Toys,
    double,
    factor,
    fivefold,
    name_of_gradient,
    outcomes,
    triple,
)
from torch import Tensor
from torch._ops import OpOverload

import inductor_ext as ixt
from inductor_ext import Autograd, RegistrationError, _install, _sources, config, registry

pytestmark = pytest.mark.contract
toys = registry_toys.toys


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategies", "said"),
    [
        ({}, "none"),
        ({"lowering": triple, "decomposition": double}, "lowering and decomposition"),
        ({"lowering": triple, "opaque": True}, "lowering and opaque"),
        ({"decomposition": double, "opaque": True}, "decomposition and opaque"),
    ],
)
def test_exactly_one_strategy(toys: Toys, strategies: dict[str, Any], said: str) -> None:
    op = toys.op()
    with pytest.raises(RegistrationError, match=rf"op\d+: give exactly one of .*, got {said}$"):
        ixt.register(op, reference=double, autograd=None, **strategies)
    assert op not in registry.contracts()


@pytest.mark.parametrize(
    "make",
    [
        lambda op: lambda: op.overloadpacket,
        lambda op: lambda: str(op),
        lambda op: op.overloadpacket,
        lambda op: str(op),
    ],
    ids=["factory of packet", "factory of name", "packet", "name"],
)
def test_only_overloads(toys: Toys, make: Callable[[OpOverload], Any]) -> None:
    with pytest.raises(RegistrationError, match="`op` must be an OpOverload such as"):
        ixt.register(make(toys.op()), reference=double, opaque=True, autograd=None)


def test_factory(toys: Toys) -> None:
    op = toys.op()
    assert ixt.register(lambda: op, reference=double, opaque=True, autograd=None).op is op


def test_autograd_must_be_said(toys: Toys) -> None:
    with pytest.raises(TypeError, match="autograd"):
        ixt.register(toys.op(), reference=double, opaque=True)  # type: ignore[call-arg]
    with pytest.raises(RegistrationError, match='`autograd` must be an Autograd rule, "native"'):
        ixt.register(toys.op(), reference=double, opaque=True, autograd="yes")  # type: ignore


def test_duplicate_and_override(toys: Toys) -> None:
    op = toys.op()
    first = ixt.register(op, reference=double, lowering=triple, autograd=None)
    with pytest.raises(RegistrationError, match=r"registered already; pass override=True"):
        ixt.register(op, reference=double, lowering=fivefold, autograd=None)
    with config.patch(enabled=True):
        assert factor(op) == 3.0
        second = ixt.register(op, reference=double, lowering=fivefold, autograd=None, override=True)
        assert factor(op) == 5.0
        first.unregister()  # it is in force no more; nothing happens
        assert registry.contract(op) is second
        assert factor(op) == 5.0


def test_unreadable_source_needs_a_version(toys: Toys) -> None:
    namespace: dict[str, Any] = {"__name__": "typed_in"}
    exec("def typed(x):\n    return x * 7", namespace)
    op = toys.op()
    arguments = {"reference": double, "decomposition": namespace["typed"], "autograd": None}
    with pytest.raises(RegistrationError, match=r"source of typed_in:typed cannot be read.*vers"):
        ixt.register(op, **arguments)
    assert op not in registry.contracts()
    one = ixt.register(op, version="1", **arguments)
    two = ixt.register(op, version="2", override=True, **arguments)
    assert one.digest != two.digest
    with config.patch(enabled=True):
        assert factor(op) == 7.0


def test_missing_module_is_refused(toys: Toys) -> None:
    with pytest.raises(RegistrationError, match="no module 'nowhere_at_all'"):
        ixt.register(toys.op(), reference=double, lowering="nowhere_at_all:f", autograd=None)


# --- coming and going ------------------------------------------------------------------------


def test_late_registration_reaches_compiled_functions(toys: Toys) -> None:
    """Through a function that reads the mode, as our API does, without a reset."""
    op = toys.op()

    def api(x: Tensor) -> Tensor:
        ixt.api._guard_mode()
        return op(x)

    run = torch.compile(api, fullgraph=True)
    with config.patch(enabled=True):
        assert run(torch.ones(4))[0] == 2.0
        contract = ixt.register(op, reference=double, lowering=triple, autograd=None)
        assert run(torch.ones(4))[0] == 3.0
        contract.unregister()
        assert run(torch.ones(4))[0] == 2.0


def test_unregister_restores_everything(toys: Toys) -> None:
    op = toys.op()
    x = torch.ones(4, requires_grad=True)
    before = factor(op)
    without_a_rule = name_of_gradient(op(x))
    rule = Autograd(lambda ctx, grad: grad * 2)
    contract = ixt.register(
        op, reference=double, lowering=triple, autograd=rule, version="a lambda"
    )
    assert "WarnNotImplemented" in without_a_rule
    assert name_of_gradient(op(x)) != without_a_rule
    with config.patch(enabled=True):
        assert factor(op) == 3.0
        assert op in _install.installed()
        contract.unregister()
        assert op not in _install.installed()
        assert factor(op) == before == 2.0
    assert op not in registry.contracts()
    assert name_of_gradient(op(x)) == without_a_rule
    ixt.register(op, reference=double, lowering=triple, autograd=rule)  # and it can come again
    op(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, ALL_TWOS)


# --- what is recorded ------------------------------------------------------------------------


def test_records(toys: Toys) -> None:
    lowered, decomposed, opaque = toys.op(), toys.op(), toys.op()
    ixt.register(lowered, reference=double, lowering=triple, autograd=None)
    ixt.register(decomposed, reference=double, decomposition=double, autograd=None)
    ixt.register(opaque, reference=double, opaque=True, autograd=None)
    assert [factor(op) for op in (lowered, decomposed, opaque)] == [2.0, 2.0, 2.0]
    assert registry.records() == []  # the plugin is off
    assert sum(toys.calls.values()) == 3
    with config.patch(enabled=True):
        assert [factor(op) for op in (lowered, decomposed, opaque)] == [3.0, 2.0, 2.0]
    assert list(toys.calls.values()) == [1, 1, 2]
    assert outcomes(lowered) == [("lowered", "")]
    assert set(outcomes(decomposed)) == {("decomposed", "")}
    assert outcomes(opaque) == [("opaque", "registered as opaque")]
    ixt.clear_records()
    assert ixt.records() == []


def test_disabled_op(toys: Toys) -> None:
    op = toys.op()
    ixt.register(op, reference=double, lowering=triple, autograd=None)
    with config.patch(enabled=True, disabled_ops=[registry.op_name(op)]):
        assert factor(op) == 2.0
    assert outcomes(op) == []


def test_lookup_by_name() -> None:
    found = registry.contract("inductor_ext::quantize_fp8_row")
    assert found.op is torch.ops.inductor_ext.quantize_fp8_row.default
    with pytest.raises(KeyError, match=r"no::such is not registered.*quantize_fp8_row"):
        registry.contract("no::such")


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MAX_RECORDS", 3)
    registry.clear_records()
    for number in range(5):
        registry.add_record(registry.Record("a::b", "declined", str(number)))
    assert [r.reason for r in registry.records()] == ["2", "3", "4"]
    registry.clear_records()


def test_digest_tells_strategy_and_recomputability_apart(toys: Toys) -> None:
    """Both change the code that is generated, and neither stands in a source file."""
    op = toys.op()
    digests = set()
    for choice in ({"lowering": triple}, {"decomposition": triple}, {"opaque": True}):
        for recomputable in (True, False):
            made = ixt.register(
                op, reference=double, autograd=None, recomputable=recomputable, **choice
            )
            digests.add(made.digest)
            made.unregister()
    assert len(digests) == 6


def test_package_digest_reads_the_plugin_alone() -> None:
    """A source checkout has its virtual environment beside the package."""
    folders = _sources._package_folders()
    assert [folder.name for folder in folders] == ["inductor_ext", "lowerings", "decompositions"]
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_a_missing_package_is_a_registration_error(toys: Toys) -> None:
    with pytest.raises(RegistrationError, match="there is no module"):
        ixt.register(
            toys.op(), reference=double, autograd=None, lowering="no_such_package.module:f"
        )
