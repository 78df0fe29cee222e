"""Turning the plugin on and off in one process: tables, compiled functions, threads, backward."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import Autograd, _cache_key, _compat, _install, _state, config, registry
from inductor_ext.testing import running

pytestmark = pytest.mark.contract
FORMAT = ixt.FP8(granularity="row")


@pytest.fixture(autouse=True)
def no_caches_and_no_rule_traced() -> Iterator[None]:
    """As in a process in which no gradient rule of ours has been traced, whatever ran before."""
    with (
        torch.compiler.config.patch(force_disable_caches=True),
        mock.patch.object(_cache_key, "_rule_was_traced", False),
    ):
        _cache_key.place_fingerprint(config.enabled)
        yield
    _cache_key.place_fingerprint(config.enabled)


def chain(x: Tensor) -> Tensor:
    q = ixt.quantize(x * 2, FORMAT)
    return ixt.dequantize(q, FORMAT, torch.float32) + 1


# --- tables ----------------------------------------------------------------------------------


def tables() -> dict[str, Any]:
    """Everything in PyTorch that we touch, copied."""
    partitioners, choices = _compat.partitioners, _compat.InductorChoices
    lists = partitioners.get_default_op_list()
    return {
        "lowerings": dict(_compat.lowerings),
        "fallbacks": set(_compat.fallbacks),
        "needs_realized_inputs": set(_compat.needs_realized_inputs),
        "layout_constraints": dict(_compat.layout_constraints),
        "decompositions": dict(_compat.decompositions),
        "cached decompositions": dict(_compat.fast_random_decomps()),
        "custom_backend_passes": dict(_compat.custom_backend_passes),
        "get_default_op_list": partitioners.get_default_op_list,
        "recomputable": set(lists.recomputable_ops),
        "fusible": set(lists.fusible_ops),
        "persistent": choices.should_use_persistent_reduction,
    }


def test_what_was_there_comes_back() -> None:
    """Also what a compile without the plugin has left there for our ops."""
    running.compiled(running.caller(ixt.ops.fp8.quantize_fp8_row))(
        torch.ones(2, 8), torch.float8_e4m3fn
    )
    before = tables()
    row = ixt.ops.fp8.quantize_fp8_row
    assert row in before["fallbacks"]  # the implicit fallback
    for _ in range(2):
        ixt.enable()
        on = tables()
        changed = {name for name in before if before[name] != on[name]}
        assert changed >= {
            "lowerings", "fallbacks", "needs_realized_inputs", "layout_constraints",
            "custom_backend_passes", "get_default_op_list", "recomputable", "fusible",
            "persistent",
        }  # fmt: skip
        assert row not in on["fallbacks"]
        assert row not in on["layout_constraints"]
        ixt.disable()
        off = tables()
        assert [name for name in before if before[name] != off[name]] == []


def test_entries_of_others_are_left_alone() -> None:
    """What somebody else has put over our entries meanwhile stays."""
    row, tensor = ixt.ops.fp8.quantize_fp8_row, ixt.ops.fp8.quantize_fp8_tensor
    before = tables()
    partitioners, choices = _compat.partitioners, _compat.InductorChoices
    theirs: Callable[..., Any] = lambda *args: None  # noqa: E731
    try:
        ixt.enable()
        _compat.lowerings[row] = theirs
        _compat.custom_backend_passes["inductor_ext"] = None
        wrapped, chosen = (
            partitioners.get_default_op_list,
            vars(choices)["should_use_persistent_reduction"],
        )
        partitioners.get_default_op_list = their_list = lambda: wrapped()
        choices.should_use_persistent_reduction = staticmethod(theirs)
        ixt.disable()
        assert _compat.lowerings[row] is theirs
        assert tensor not in _compat.lowerings or tensor in before["lowerings"]
        assert _compat.custom_backend_passes["inductor_ext"] is None
        assert partitioners.get_default_op_list is their_list
        assert choices.should_use_persistent_reduction is theirs
        lists = partitioners.get_default_op_list()  # ours lies below and adds nothing
        assert row.overloadpacket not in lists.recomputable_ops
        assert chosen is not None
    finally:
        ixt.disable()
        _compat.lowerings.pop(row, None)
        if row in before["lowerings"]:
            _compat.lowerings[row] = before["lowerings"][row]
        _compat.custom_backend_passes.pop("inductor_ext", None)
        partitioners.get_default_op_list = before["get_default_op_list"]
        choices.should_use_persistent_reduction = staticmethod(before["persistent"])


def explicit_lowering(x: Any) -> Any:
    return x


def ours_for_user_op(x: Any) -> Any:
    return x


def test_a_users_own_lowering_comes_back() -> None:
    library = torch.library.Library("ixt_toggle", "FRAGMENT")
    library.define("users(Tensor x) -> Tensor")
    library.impl("users", torch.clone, "CPU")
    torch.library.register_fake("ixt_toggle::users", torch.empty_like, lib=library)
    op = torch.ops.ixt_toggle.users.default
    _compat.lowerings[op] = explicit_lowering
    _compat.needs_realized_inputs.add(op)
    _compat.layout_constraints[op] = explicit_lowering
    try:
        contract = ixt.register(op, reference=torch.clone, lowering=ours_for_user_op, autograd=None)
        with config.patch(enabled=True):
            assert _compat.lowerings[op] is not explicit_lowering
            assert op not in _compat.needs_realized_inputs
            assert op not in _compat.layout_constraints
        assert _compat.lowerings[op] is explicit_lowering
        assert _compat.layout_constraints[op] is explicit_lowering
        assert op in _compat.needs_realized_inputs
        contract.unregister()
    finally:
        _compat.lowerings.pop(op, None)
        _compat.needs_realized_inputs.discard(op)
        _compat.layout_constraints.pop(op, None)
        library._destroy()


# --- compiled functions ----------------------------------------------------------------------


def called(run: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Run and count the calls of our opaque kernels, also from code compiled long ago."""
    run(*args)  # compiling calls the fakes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = run(*args)
    events = profile.events()
    assert events is not None
    return result, sum(event.name.startswith("inductor_ext::") for event in events)


def test_off_on_off_on_on() -> None:
    """Each mode is compiled once, and every call runs its own mode's code."""
    run = torch.compile(running.own_code(chain, "toggled"), fullgraph=True)
    x = torch.randn(4, 64)
    expected = chain(x)
    opaque_calls, compiles = [], []
    for enabled in (False, True, False, True, True, False):
        config.enabled = enabled
        before = running.graphs()
        result, calls = called(run, x)
        assert torch.equal(result, expected)
        opaque_calls.append(calls)
        compiles.append(running.graphs() - before)
    assert opaque_calls == [2, 0, 2, 0, 0, 2]
    assert compiles == [1, 1, 0, 0, 0, 0]


def test_kernels_of_each_mode() -> None:
    run = torch.compile(running.own_code(chain, "kernels"), fullgraph=True)
    x, kernels = torch.randn(4, 64), []
    sources: list[str] = []
    for enabled in (False, True, False, True):
        sources.clear()
        with (
            config.patch(enabled=enabled),
            mock.patch.object(_compat.GraphLowering, "save_output_code", sources.append),
        ):
            run(x)
        kernels.append([source.count("= async_compile.cpp_pybinding(") for source in sources])
    assert kernels == [[2], [1], [], []]


def test_every_flag_that_changes_code_is_noticed() -> None:
    run = torch.compile(running.own_code(chain, "flags"), fullgraph=True)
    x, seen = torch.randn(4, 64), []
    states: list[dict[str, Any]] = [
        {}, {"numerics": "fast"}, {"disabled_ops": {"inductor_ext::quantize_fp8_row"}}, {},
    ]  # fmt: skip
    for state in states:
        with config.patch(enabled=True, **state):
            before = running.graphs()
            _, calls = called(run, x)
            seen.append((running.graphs() - before, calls))
    assert seen == [(1, 0), (1, 0), (1, 1), (0, 0)]


def test_mode_is_back_after_a_toggle() -> None:
    assert _state.mode == "off"
    with config.patch(enabled=True):
        first = _state.mode
        with config.patch(numerics="fast"):
            assert _state.mode not in ("off", first)
        assert _state.mode == first
    assert _state.mode == "off"


def test_raw_ops_keep_their_code_and_their_numbers() -> None:
    """A direct torch.ops call reads no flag: an already compiled function stays as it is."""
    op = ixt.ops.fp8.quantize_fp8_row
    run = running.compiled(running.caller(op))
    x = torch.randn(4, 64)
    expected = op(x, torch.float8_e4m3fn)
    calls = []
    for enabled in (False, True, False):
        with config.patch(enabled=enabled):
            (codes, scale_inv), count = called(run, x, torch.float8_e4m3fn)
        calls.append(count)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scale_inv, expected[1])
    assert calls == [1, 1, 1]


# --- backward --------------------------------------------------------------------------------

CALLS = {"graded": 0, "tangent": 0}


def times_two(x: Tensor) -> Tensor:
    return x * 2


def lower_times_two(x: Any) -> Any:
    load, ops = x.make_loader(), _compat.ops
    return _compat.ir.Pointwise.create(
        device=x.get_device(),
        dtype=x.get_dtype(),
        inner_fn=lambda index: ops.mul(load(index), ops.constant(2.0, x.get_dtype())),
        ranges=x.get_size(),
    )


def backward_of_graded(ctx: Any, grad: Tensor) -> Tensor:
    result: Tensor = torch.ops.ixt_toggle.tangent.default(grad)
    return result


@pytest.fixture
def graded() -> Iterator[Any]:
    """An op y = 2x with a rule that calls another registered op."""
    library = torch.library.Library("ixt_toggle", "FRAGMENT")
    made = []
    for name, rule in (("tangent", None), ("graded", Autograd(backward_of_graded))):
        library.define(f"{name}(Tensor x) -> Tensor")

        def real(x: Tensor, name: str = name) -> Tensor:
            CALLS[name] += 1
            with torch.no_grad():
                return x * 2

        library.impl(name, real, "CPU")
        torch.library.register_fake(f"ixt_toggle::{name}", torch.empty_like, lib=library)
        op = getattr(torch.ops.ixt_toggle, name).default
        made.append(ixt.register(op, reference=times_two, lowering=lower_times_two, autograd=rule))
    CALLS.update(graded=0, tangent=0)
    yield torch.ops.ixt_toggle.graded.default
    for contract in made:
        contract.unregister()
    library._destroy()


@pytest.mark.parametrize(
    ("forward", "backward", "calls"),
    [
        (True, True, {"graded": 0, "tangent": 0}),
        (True, False, {"graded": 0, "tangent": 1}),
        (False, True, {"graded": 1, "tangent": 0}),
        (False, False, {"graded": 1, "tangent": 1}),
    ],
)
def test_toggle_before_the_lazy_backward(
    graded: Any, forward: bool, backward: bool, calls: dict[str, int]
) -> None:
    x = torch.randn(8, requires_grad=True)
    run = running.compiled(running.caller(graded, "lazy"))
    with config.patch(enabled=forward):
        y = run(x)
    with config.patch(enabled=backward):
        (y * y).sum().backward()
    assert torch.equal(y, 2 * x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 8 * x.detach())
    assert calls == CALLS


# --- threads ---------------------------------------------------------------------------------


def test_compiling_while_another_thread_toggles() -> None:
    before, switch = tables(), sys.getswitchinterval()
    x = torch.randn(4, 32)
    expected = chain(x)
    stop, errors, toggles = threading.Event(), [], itertools.count()
    modes = set()

    def toggle() -> None:
        try:
            while not stop.is_set():
                config.enabled = not config.enabled
                modes.add(_state.mode)
                next(toggles)
                stop.wait(0.002)
        except BaseException as error:
            errors.append(error)

    def compile_many() -> None:
        try:
            for number in range(4):
                run = running.compiled(running.own_code(chain, f"thread{number}"))
                for _ in range(3):
                    torch.testing.assert_close(run(x), expected, rtol=0, atol=0)
        except BaseException as error:
            errors.append(error)

    toggler = threading.Thread(target=toggle, daemon=True)
    compilers = [threading.Thread(target=compile_many, daemon=True) for _ in range(2)]
    sys.setswitchinterval(1e-4)
    try:
        for thread in (toggler, *compilers):
            thread.start()
        for thread in compilers:
            thread.join(timeout=300)
        stop.set()
        toggler.join(timeout=60)
    finally:
        sys.setswitchinterval(switch)
        stop.set()
    assert errors == []
    assert not any(thread.is_alive() for thread in (toggler, *compilers)), "deadlock"
    assert next(toggles) > 4
    assert len(modes) == 2
    ixt.disable()
    after = tables()
    for name in ("custom_backend_passes", "get_default_op_list", "recomputable", "persistent"):
        assert after[name] == before[name], name
    ours = {c.op for c in registry.contracts().values()}
    assert {op for op in ours if op in after["lowerings"]} <= after["fallbacks"]
    assert _install.installed() == ()
