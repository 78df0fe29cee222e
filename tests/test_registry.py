"""The contract of ``register``: what it refuses, what it undoes, and what it records."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

import inductor_ext as ixt
from inductor_ext import Autograd, RegistrationError, _compat, _install, config, registry
from inductor_ext.testing import running

pytestmark = pytest.mark.contract
_numbers = itertools.count()
ALL_TWOS = torch.full((4,), 2.0)


def double(x: Tensor) -> Tensor:
    return x * 2


def multiply(x: Any, factor: float, dtype: torch.dtype | None = None, size: Any = None) -> Any:
    """The lowering that the others are made of; ``factor`` tells in the result that it ran."""
    load, own = x.make_loader(), x.get_dtype()
    ops = _compat.ops
    return _compat.ir.Pointwise.create(
        device=x.get_device(),
        dtype=dtype or own,
        inner_fn=lambda index: ops.to_dtype(
            ops.mul(load(index[-1:]), ops.constant(factor, own)), dtype or own
        ),
        ranges=size or x.get_size(),
    )


def triple(x: Any) -> Any:
    return multiply(x, 3.0)


def fivefold(x: Any) -> Any:
    return multiply(x, 5.0)


class Toys:
    """Makes ops of one's own: the op doubles, and counts how often its kernel runs."""

    def __init__(self) -> None:
        self.library = torch.library.Library("ixt_registry", "FRAGMENT")
        self.calls: dict[OpOverload, int] = {}

    def op(self, schema: str = "(Tensor x) -> Tensor") -> OpOverload:
        name = f"op{next(_numbers)}"
        self.library.define(name + schema)

        def real(x: Tensor, *rest: Any) -> Tensor:
            self.calls[made] += 1
            with torch.no_grad():  # as a compiled kernel: no gradient without a rule
                return x * 2

        self.library.impl(name, real, "CPU")
        torch.library.register_fake(
            f"ixt_registry::{name}", lambda x, *rest: torch.empty_like(x), lib=self.library
        )
        made: OpOverload = getattr(torch.ops.ixt_registry, name).default
        self.calls[made] = 0
        return made


@pytest.fixture
def toys() -> Iterator[Toys]:
    made = Toys()
    registry.clear_records()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield made
    for op in made.calls:
        if op in registry.contracts():
            registry.contract(op).unregister()
    assert set(_install.installed()) <= set(registry.contracts())
    made.library._destroy()


def compiled(op: OpOverload, x: Tensor | None = None) -> Tensor:
    """Compile ``op`` anew, whatever was compiled before, and run it on ones."""
    run = running.compiled(running.caller(op))
    result: Tensor = run(torch.ones(4) if x is None else x)
    return result


def factor(op: OpOverload) -> float:
    return float(compiled(op)[0])


def outcomes(op: OpOverload) -> list[tuple[str, str]]:
    name = registry.op_name(op)
    return [(r.outcome, r.reason) for r in registry.records() if r.op == name]


def raised(error: BaseException | None, kind: type[BaseException]) -> BaseException:
    """Find an error of ours in or below what torch.compile raised."""
    while error is not None:
        if isinstance(error, kind):
            return error
        error = error.__cause__ or getattr(error, "inner_exception", None) or error.__context__
    pytest.fail(f"there is no {kind.__name__} in the chain")


def name_of_gradient(result: Tensor) -> str:
    assert result.grad_fn is not None
    return result.grad_fn.name()


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
