"""explain() tells the truth, and leaves everything as it was."""

from __future__ import annotations

import importlib
import importlib.util
import json

import pytest
import torch
import torch.nn.functional as F

import inductor_ext as ixt
from inductor_ext import _compat

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def chain(x: torch.Tensor) -> torch.Tensor:
    q = ixt.quantize(F.relu(x), ixt.FP8())
    return torch.neg(ixt.dequantize(q, ixt.FP8()))


X = torch.randn(64, 256, dtype=torch.bfloat16)


def told(fn, *args, **kwargs):
    return ixt.explain(fn, *args, print=False, **kwargs)


def test_bytes_of_a_fused_chain_are_counted_by_hand():
    e = told(lambda a, b: (a + b).relu(), torch.randn(32, 100), torch.randn(100))
    (kernel,) = e.kernels
    assert (kernel.kind, kernel.launches) == ("cpp", 1)
    assert kernel.ops == ("aten::add", "aten::relu")
    assert 'extern "C"' in kernel.source
    assert e.externs == ()
    assert e.bytes_moved == e.floor_bytes == 4 * (2 * 32 * 100 + 100)
    assert e.ratio == 1.0


def test_bytes_of_two_kernels_exceed_the_floor():
    a = torch.randn(32, 16)
    e = told(lambda a: (a.relu() @ a.t()).sin(), a)
    (gemm,) = e.externs
    assert gemm.name == "extern_kernels.mm"
    assert gemm.ops == ("aten::mm",)
    assert [k.ops for k in e.kernels] == [("aten::relu",), ("aten::sin",)]
    assert e.floor_bytes == 4 * (32 * 16 + 32 * 32)
    assert e.bytes_moved > 2 * e.floor_bytes * 0.9


def test_an_expanded_input_is_read_once():
    row = torch.randn(1, 64).expand(128, 64)
    assert told(lambda x: x + 1, row).floor_bytes == 4 * (64 + 128 * 64)


def test_without_the_plugin_our_ops_are_opaque_and_it_says_how_to_enable():
    e = told(chain, X)
    assert [op.outcome for op in e.ops] == ["opaque", "opaque"]
    assert e.ops[0].reason == "the plugin is off"
    assert e.ops[0].kernels == ("torch.ops.inductor_ext.quantize_fp8_row.default",)
    assert e.plugin.startswith("off")
    assert any("inductor_ext.enable()" in note for note in e.notes)
    assert "inductor_ext::quantize_fp8_row" not in e.kernels[0].ops
    assert len(e.externs) == 2
    assert e.ratio > 2


@pytest.mark.parametrize("target", [None, pytest.param("sm_90", marks=needs_triton)])
def test_with_the_plugin_our_ops_are_lowered_into_one_kernel(target):
    with ixt.config.patch(enabled=True):
        e = told(chain, X, target=target)
    (kernel,) = e.kernels
    assert kernel.kind == ("triton" if target else "cpp")
    assert kernel.ops == ("aten::relu", "inductor_ext::quantize_fp8_row",
                          "inductor_ext::dequantize_fp8", "aten::neg")  # fmt: skip
    assert {op.op: op.outcome for op in e.ops} == {
        "inductor_ext::quantize_fp8_row": "lowered",
        "inductor_ext::dequantize_fp8": "lowered",
    }
    assert all(op.kernels == (kernel.name,) for op in e.ops)
    assert e.externs == ()
    assert e.ratio < (1.1 if target else told(chain, X).ratio)
    assert e.plugin.startswith("on")
    assert e.target == ("sm_90 (not there)" if target else "cpu")


@needs_triton
@pytest.mark.parametrize("strict", [False, True])
def test_a_decline_gives_its_reason_and_does_not_raise(strict):
    with ixt.config.patch(enabled=True, strict=strict):
        e = told(chain, X, target="sm_80")
        assert ixt.config.strict is strict
    assert [op.outcome for op in e.ops] == ["declined", "declined"]
    assert "sm_80" in e.ops[0].reason
    assert e.ops[0].kernels == ("torch.ops.inductor_ext.quantize_fp8_row.default",)


def test_a_disabled_op_says_so():
    with ixt.config.patch(enabled=True, disabled_ops={"inductor_ext::dequantize_fp8"}):
        e = told(chain, X)
    assert [(op.outcome, op.reason) for op in e.ops] == [
        ("lowered", ""),
        ("opaque", "in config.disabled_ops"),
    ]


@pytest.fixture
def own_op():
    """An op that is not ours: doubles a tensor."""
    with torch.library._scoped_library("ixt_explain_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("ixt_explain_test::double", torch.empty_like, lib=library)
        yield torch.ops.ixt_explain_test.double.default


def _fails(x):
    raise RuntimeError("no such luck")


@pytest.mark.filterwarnings("ignore:the lowering of ixt_explain_test")
@pytest.mark.parametrize(
    ("strategy", "outcome", "kernels"),
    [
        ({"decomposition": lambda x: x + x}, "decomposed", 1),
        ({"opaque": True}, "opaque", 2),
        ({"lowering": _fails}, "failed", 2),
    ],
)
def test_each_strategy_and_its_outcome(own_op, strategy, outcome, kernels):
    contract = ixt.register(
        own_op, reference=lambda x: x * 2, autograd=None, version=outcome, **strategy
    )
    try:
        with ixt.config.patch(enabled=True):
            e = told(lambda x: own_op(x.sin()).cos(), torch.randn(64))
    finally:
        contract.unregister()
    (op,) = e.ops
    assert (op.op, op.outcome) == ("ixt_explain_test::double", outcome)
    assert len(e.kernels) == kernels
    if outcome == "decomposed":
        assert op.kernels == (e.kernels[0].name,)
        assert op.op in e.kernels[0].ops
    else:
        assert op.kernels == (e.externs[0].name,)
    if outcome == "failed":
        assert "no such luck" in op.reason


def test_graph_breaks_have_a_reason_and_a_place():
    def fn(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    e = told(fn, torch.randn(8))
    assert [graph.kind for graph in e.graphs] == ["inference", "inference"]
    (found,) = e.graph_breaks
    assert "graph_break()" in found.reason
    assert "test_explain.py" in found.where
    assert found.where.endswith(" in fn")


def test_recompiles_within_the_call_are_told():
    @torch._dynamo.disable
    def outside():
        return None

    def inner(x):
        outside()
        return x.sin()

    def fn(x):
        return [inner(x[:n]) for n in (2, 5)]

    e = told(fn, torch.randn(8))
    assert e.recompiles
    assert "size mismatch" in e.recompiles[0]


def test_guards_are_those_of_the_function():
    def fn(x, flag):
        return x.sin() if flag else x.cos()

    e = told(fn, torch.randn(8), True)
    assert len(e.guards) > 3
    assert not [g for g in e.guards if g.startswith("len(L['args'])") or "L['kwargs']" in g]
    with ixt.config.patch(enabled=True):
        assert any("_state.mode == 'on:" in guard for guard in told(chain, X).guards)


def test_training_gives_forward_and_backward():
    with torch.enable_grad():
        x = torch.randn(64, requires_grad=True)
        e = told(lambda x: (x.sin() * 3).sum(), x)
    assert [graph.kind for graph in e.graphs] == ["forward", "backward"]
    assert x.grad is None


def test_modules_and_compiled_functions_are_unwrapped():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    x = torch.randn(4, 16)
    plain, compiled = told(model, x), told(torch.compile(model), x)
    assert [k.name for k in plain.kernels] == [k.name for k in compiled.kernels] != []
    assert len(told(torch.compile(chain), X).kernels) == 2


def test_options_of_a_compiled_function_are_used():
    def fn(x):
        return x.sin().sum(-1) + x.cos().sum(-1)

    x = torch.randn(32, 32)
    default, unfused = told(fn, x), told(torch.compile(fn, options={"max_fusion_size": 1}), x)
    assert len(default.graphs[0].source) != len(unfused.graphs[0].source)


def test_results_are_right_and_side_effects_happen_once():
    seen = []

    def fn(x, scale=1.0):
        y = x.sin() * scale
        torch._dynamo.graph_break()
        seen.append(y)
        return y

    x = torch.randn(8)
    told(fn, x, scale=2.0)
    torch.testing.assert_close(seen, [x.sin() * 2.0])


def test_everything_is_left_as_it_was():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(chain, backend=counter)
    with ixt.config.patch(enabled=True):
        compiled(X)
        torch.compile(chain)(X)
        records = ixt.records()
        counters = {name: dict(c) for name, c in _compat.counters.items()}
        told(compiled, X)
        told(chain, X[:3], dynamic=True)
        assert ixt.records() == records
        assert {name: dict(c) for name, c in _compat.counters.items()} == counters
        compiled(X)
    assert counter.frame_count == 1
    assert _compat.inductor_config.force_disable_caches is False


def test_a_cached_compile_still_has_records():
    with ixt.config.patch(enabled=True):
        torch.compile(chain)(X)
        assert [op.outcome for op in told(chain, X).ops] == ["lowered", "lowered"]


def test_nothing_to_compile_is_noted():
    e = told(lambda x: x, torch.randn(8))
    assert e.graphs == ()
    assert "compiled nothing" in e.notes[0]
    assert e.to_dict()["ratio"] is None


def test_as_data_and_as_text(capsys):
    e = ixt.explain(chain, X)
    printed = capsys.readouterr().out
    data = json.loads(json.dumps(e.to_dict()))
    assert data["graphs"][0]["kernels"][0]["name"] == e.graphs[0].kernels[0].name
    assert data["bytes_moved"] == e.bytes_moved
    for text in (printed, str(e)):
        assert "torch.compile for cpu" in text
        assert "Registered ops" in text
        assert "opaque" in text
    assert "\x1b" not in str(e)


def test_explain_is_callable_as_function_and_as_package():
    package = importlib.import_module("inductor_ext.explain")
    for explain in (ixt.explain, package, package.explain):
        assert explain(lambda x: x + 1, torch.randn(4), print=False).kernels


def test_an_unknown_target_is_refused():
    with pytest.raises(ixt.InductorExtError, match="sm_90"):
        told(chain, X, target="sm_1")


@pytest.mark.gpu
def test_on_a_gpu():
    with ixt.config.patch(enabled=True):
        e = told(chain, X.cuda())
    (kernel,) = e.kernels
    assert kernel.kind == "triton"
    assert e.externs == ()
    assert e.target.startswith("cuda (sm_")
    assert e.ratio < 1.1
