"""Code for a GPU that is not there, and a process that is as before afterwards."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import torch.nn.functional as F

import inductor_ext as ixt
from inductor_ext import _codegen, _compat, fake_gpu

pytest.importorskip("triton")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

_GLOBAL = torch.randn(64)
_SHIFT = torch.randn(64)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def gelu_rows(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).sum(-1)


@pytest.mark.parametrize(
    ("target", "arch"), [("sm_90", 90), ("sm_90a", 90), (80, 80), ("sm_100a", 100), ("sm120", 120)]
)
def test_targets(target, arch):
    assert fake_gpu.parse_target(target) == arch


@pytest.mark.parametrize("target", ["sm_75", "hopper", "", 9])
def test_an_unknown_target_is_named(target):
    with pytest.raises(fake_gpu.FakeGpuError, match=r"sm_90.*got"):
        fake_gpu.capture(gelu_rows, (torch.randn(4, 64),), target)


def test_source_and_ptx_for_each_target_in_one_process():
    for target, name in (
        ("sm_90", "sm_90a"),
        ("sm_80", "sm_80"),
        ("sm_89", "sm_89"),
        ("sm_120", "sm_120a"),
    ):
        (graph,) = fake_gpu.capture(gelu_rows, (torch.randn(8, 64),), target, asm=True)
        assert graph.kind == "inference"
        assert graph.externs == ()
        (kernel,) = graph.kernels.values()
        assert "gelu" in kernel.name
        assert "libdevice.erf" in kernel.source
        assert f"cc={target[3:]}" in kernel.source
        assert kernel.ptx is not None
        assert f".target {name}\n" in kernel.ptx
        assert isinstance(kernel.asm[0]["cubin"], bytes)


def test_without_asm_nothing_is_compiled():
    (graph,) = fake_gpu.capture(gelu_rows, (torch.randn(8, 64),))
    (kernel,) = graph.kernels.values()
    assert kernel.ptx is None
    assert kernel.asm == ()


def test_extern_calls_are_told_from_comments():
    a, b = torch.randn(32, 16), torch.randn(16, 8)
    (graph,) = fake_gpu.capture(lambda a, b: (a @ b).relu(), (a, b))
    assert graph.externs == ("extern_kernels.mm",)


def test_strides_and_offsets_are_kept():
    x = torch.randn(5, 64, 32)[1:].transpose(1, 2)
    (graph,) = fake_gpu.capture(lambda x: x + 1, (x,))
    assert "(4, 32, 64), (2048, 1, 32)" in graph.source


def test_arguments_made_on_the_fake_device():
    def make():
        return (torch.empty(8, 64, device="cuda", dtype=torch.bfloat16),)

    (graph,) = fake_gpu.capture(gelu_rows, make)
    assert "bf16[8, 64]" in graph.source


def test_dynamic_sizes_stay_symbols():
    (static,) = fake_gpu.capture(gelu_rows, (torch.randn(8, 64),))
    (dynamic,) = fake_gpu.capture(gelu_rows, (torch.randn(8, 64),), dynamic=True)
    assert re.search(r"assert_size_stride\(arg\d_1, \(8, 64\)", static.source)
    assert not re.search(r"assert_size_stride\(arg\d_1, \(8, 64\)", dynamic.source)


def test_sizes_of_one_capture_do_not_make_the_next_dynamic():
    for rows in range(4, 16):  # more than Dynamo's recompile limit
        (graph,) = fake_gpu.capture(gelu_rows, (torch.randn(rows, 64),))
        assert f"({rows}, 64)" in graph.source


def test_what_a_function_reaches_moves_with_it():
    kept, scale = _GLOBAL, torch.randn(64)
    layer = torch.nn.Linear(64, 64)

    def fn(x, *, shift=_SHIFT):
        return layer(x) * scale + _GLOBAL + shift

    (graph,) = fake_gpu.capture(fn, (torch.randn(8, 64),))
    assert len(graph.kernels) == 1
    assert "cpu" not in "".join(k.source for k in graph.kernels.values())
    assert _GLOBAL is kept
    assert scale.device.type == layer.weight.device.type == "cpu"
    assert layer.weight.requires_grad


def test_tied_weights_stay_tied():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, False), torch.nn.Linear(32, 32, False))
    model[1].weight = model[0].weight
    (graph,) = fake_gpu.capture(model, (torch.randn(8, 32),))
    assert set(re.findall(r"\barg\d+_1\b", graph.source)) == {"arg0_1", "arg1_1"}
    assert graph.externs == ("extern_kernels.mm",) * 2


def test_a_graph_break_does_not_end_the_capture():
    def fn(x):
        y = F.gelu(x)
        torch._dynamo.graph_break()
        return y.sum(-1)

    first, second = fake_gpu.capture(fn, (torch.randn(8, 64),))
    assert "gelu" in "".join(first.kernels)
    assert "sum" in "".join(second.kernels)


def test_config_reaches_inductor():
    def fn(x):
        return x / 3.7 / x.amax()

    options = {"eager_numerics.division_rounding": True}
    (plain,) = fake_gpu.capture(fn, (torch.randn(64),), asm=True)
    (exact,) = fake_gpu.capture(fn, (torch.randn(64),), config=options, asm=True)
    ptx = ["".join(k.ptx for k in graph.kernels.values()) for graph in (plain, exact)]
    assert "div.full.f32" in ptx[0]
    assert "div.rn.f32" not in ptx[0]
    assert "div.rn.f32" in ptx[1]


@needs_compiler
def test_training_gives_forward_then_backward_and_leaves_autograd_alone():
    torch.randn(3, requires_grad=True)
    with torch.enable_grad():
        w = torch.randn(64, requires_grad=True)
        graphs = fake_gpu.capture(lambda x, w: F.gelu(x * w).sum(), (_GLOBAL, w), asm=True)
        forward, backward = graphs
        assert (forward.kind, backward.kind) == ("forward", "backward")
        assert any("gelu_backward" in name for name in backward.kernels)
        assert all(k.ptx for k in backward.kernels.values())
        (w * w).sum().backward()
    assert torch.equal(w.grad, 2 * w)


@needs_compiler
def test_a_module_trains():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU())
    with torch.enable_grad():
        graphs = fake_gpu.capture(model, (torch.randn(8, 32),))
    assert [graph.kind for graph in graphs] == ["forward", "backward"]
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_training_without_a_compiler_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    w = torch.randn(64, requires_grad=True)
    with torch.enable_grad(), pytest.raises(fake_gpu.FakeGpuError, match=r"apt-get install g\+\+"):
        fake_gpu.capture(lambda w: w.sin().sum(), (w,))
    assert fake_gpu.capture(lambda w: w.sin().sum(), (w,))  # inference needs none


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fake_gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fake_gpu.FakeGpuError, match="pip install triton"):
        fake_gpu.capture(gelu_rows, (torch.randn(8, 64),))


def _state():
    from triton.runtime.driver import driver

    names = ("is_available", "device_count", "current_device", "get_device_properties",
             "get_device_capability", "get_device_name", "_lazy_init", "synchronize")  # fmt: skip
    return {
        **{name: getattr(torch.cuda, name) for name in names},
        "version": torch.version.cuda,
        "driver": driver._active,
        "interfaces": dict(_compat.device_interface.device_interfaces),
        "compile": _compat.GraphLowering.compile_to_module,
        "patterns": _compat.joint_graph.lazy_init,
        "to_gpu": _compat.triton_helpers.set_driver_to_gpu,
        "caches": _compat.inductor_config.force_disable_caches,
        "folding": _compat.inductor_config.joint_graph_constant_folding,
        "lazy": _compat.functorch_config.force_non_lazy_backward_lowering,
        "sizes": _compat.pgo._CODE_STATE,
        "counters": {name: dict(counter) for name, counter in _compat.counters.items()},
        "moved": _GLOBAL,
    }


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("fails", [False, True])
def test_every_patch_is_undone(fails, training):
    fake_gpu.capture(gelu_rows, (torch.randn(8, 64),))  # what is imported on first use

    def fn(x):
        if fails:
            torch._check(x.shape[0] == 0, lambda: "this one fails")
        return x * _GLOBAL

    before = _state()
    x = torch.randn(8, 64, requires_grad=training)
    with torch.set_grad_enabled(training):
        if fails:
            with pytest.raises(Exception, match="this one fails"):
                fake_gpu.capture(fn, (x,), config={"max_autotune_pointwise": True})
        else:
            fake_gpu.capture(fn, (x,), config={"max_autotune_pointwise": True})
    after = _state()
    assert {k for k in before if before[k] is not after[k] and before[k] != after[k]} == set()
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.empty(1, device="cuda")


def test_compiled_functions_stay_compiled():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def fn(x):
        return x.sin() + 1

    compiled = torch.compile(fn, backend=counter)
    compiled(torch.randn(8, 64))
    assert fake_gpu.capture(fn, (torch.randn(9, 64),))
    assert fake_gpu.capture(compiled, (torch.randn(10, 64),))
    compiled(torch.randn(8, 64))
    assert counter.frame_count == 1


def test_nothing_to_compile_is_an_error():
    with pytest.raises(fake_gpu.FakeGpuError, match="compiled nothing"):
        fake_gpu.capture(lambda x: x, (torch.randn(8),))


def test_a_fresh_copy_behaves_like_the_function():
    def fn(x, y=2, *, z=3):
        return x + y + z + len(_GLOBAL)

    copy = _codegen.fresh_copy(fn)
    assert copy(1) == fn(1) == 70
    assert copy.__code__ is not fn.__code__


def test_our_ops_fuse_for_hopper_and_decline_for_ampere():
    def chain(x):
        q = ixt.quantize(F.relu(x), ixt.FP8())
        return torch.neg(ixt.dequantize(q, ixt.FP8()))

    x = torch.randn(64, 256, dtype=torch.bfloat16)
    with ixt.config.patch(enabled=True):
        (hopper,) = fake_gpu.capture(chain, (x,), "sm_90", asm=True)
        (ampere,) = fake_gpu.capture(chain, (x,), "sm_80")
    (off,) = fake_gpu.capture(chain, (x,), "sm_90")
    opaque = ("torch.ops.inductor_ext.quantize_fp8_row.default",
              "torch.ops.inductor_ext.dequantize_fp8.default")  # fmt: skip
    assert (len(hopper.kernels), hopper.externs) == (1, ())
    assert (len(ampere.kernels), ampere.externs) == (2, opaque)
    assert (len(off.kernels), off.externs) == (2, opaque)
    (kernel,) = hopper.kernels.values()
    assert "e4m3" in kernel.ptx
    assert "div.full" not in kernel.ptx


@pytest.mark.gpu
def test_beside_a_real_gpu():
    torch.ones(2, device="cuda")
    with torch.enable_grad():
        w = torch.randn(64, device="cuda", requires_grad=True)
        graphs = fake_gpu.capture(lambda w: F.gelu(w).sum(), (w,), "sm_120", asm=True)
        assert [graph.kind for graph in graphs] == ["forward", "backward"]
        for graph in graphs:
            for kernel in graph.kernels.values():
                assert ".target sm_120a\n" in kernel.ptx
        torch.compile(lambda w: F.gelu(w).sum())(w).backward()
    assert w.grad is not None
