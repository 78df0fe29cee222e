"""Somebody else's package with a C++ op of its own plugs in by ``inductor_ext.register`` alone."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, _install, _state, config, registry
from inductor_ext.testing import check_op, running

pytestmark = pytest.mark.contract

KERNEL = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

static at::Tensor leaky(const at::Tensor& x, double slope) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "leaky takes float32");
  at::Tensor in = x.contiguous(), out = at::empty(x.sizes(), x.options());
  const float* from = in.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); ++i)
    to[i] = from[i] > 0 ? from[i] : from[i] * static_cast<float>(slope);
  return out;
}

TORCH_LIBRARY(ixt_third, m) { m.def("leaky(Tensor x, float slope) -> Tensor"); }
TORCH_LIBRARY_IMPL(ixt_third, CPU, m) { m.impl("leaky", &leaky); }
"""

PACKAGE = '''
"""A package that knows inductor_ext, and that inductor_ext does not know."""

from pathlib import Path

import torch

import inductor_ext as ixt

torch.ops.load_library(Path(__file__).parent / "libleaky.so")
leaky = torch.ops.ixt_third.leaky.default


@torch.library.register_fake("ixt_third::leaky")
def fake(x, slope):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def reference(x, slope):
    return torch.where(x > 0, x, x * slope).contiguous()


def supports(x, slope):
    return slope >= 0 or "a negative slope is not lowered"


def inputs(device):
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 40), (5,), (2, 3, 4)):
        yield torch.randn(shape, generator=generator).to(device), 0.125
    yield torch.randn(4, 6, generator=generator).t().to(device), 0.5


def register():
    return ixt.register(
        leaky,
        reference=reference,
        lowering="third_party_leaky.lowering:leaky",
        autograd=None,
        supports=supports,
        inputs=inputs,
        version="1.0",
    )
'''

LOWERING = """
from torch._inductor import ir
from torch._inductor.virtualized import ops


def leaky(x, slope):
    load, dtype = x.make_loader(), x.get_dtype()

    def element(index):
        value = load(index)
        below = ops.mul(value, ops.constant(slope, dtype))
        return ops.where(ops.gt(value, ops.constant(0.0, dtype)), value, below)

    return ir.Pointwise.create(
        device=x.get_device(), dtype=dtype, inner_fn=element, ranges=x.get_size()
    )
"""


def build(source: Path, library: Path) -> None:
    """Compile against torch's headers: no ninja, no Python headers, no optimisation."""
    from torch.utils.cpp_extension import include_paths

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    libraries = Path(torch.__file__).parent / "lib"
    command = [compiler, "-shared", "-fPIC", "-O0", "-std=c++20", "-w", str(source)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("site")
    home = folder / "third_party_leaky"
    home.mkdir()
    (home / "kernel.cpp").write_text(KERNEL)
    (home / "__init__.py").write_text(PACKAGE)
    (home / "lowering.py").write_text(LOWERING)
    build(home / "kernel.cpp", home / "libleaky.so")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("third_party_leaky")
    sys.path.remove(str(folder))


@pytest.fixture
def op(package: ModuleType) -> Iterator[Any]:
    contract = package.register()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield contract.op
    contract.unregister()


def chain(x: Tensor) -> Tensor:
    y: Tensor = torch.ops.ixt_third.leaky.default(x + 1, 0.25)
    return y * 3


def source_of(x: Tensor) -> tuple[Tensor, str]:
    sources: list[str] = []
    with mock.patch.object(_compat.GraphLowering, "save_output_code", sources.append):
        result = running.compiled(running.own_code(chain, "chain"))(x)
    assert len(sources) == 1
    return result, sources[0]


def test_fuses(op: Any) -> None:
    """Fuses into one kernel with the plugin; two kernels and an opaque call without."""
    x = torch.randn(4, 32)
    expected = chain(x)
    off, source_off = source_of(x)
    with config.patch(enabled=True, strict=True):
        on, source_on = source_of(x)
    assert torch.equal(off, expected)
    assert torch.equal(on, expected)
    kernel, call = "= async_compile.cpp_pybinding(", "torch.ops.ixt_third.leaky.default("
    assert (source_off.count(kernel), source_off.count(call)) == (2, 1)
    assert (source_on.count(kernel), source_on.count(call)) == (1, 0)


def test_fingerprint_covers_it(package: ModuleType) -> None:
    with config.patch(enabled=True):
        before = _state.mode
        contract = package.register()
        assert _state.mode != before
        assert contract.op in _install.installed()
        contract.unregister()
        assert _state.mode == before


def test_changed_lowering_changes_the_digest(package: ModuleType) -> None:
    assert package.__file__ is not None
    file = Path(package.__file__).with_name("lowering.py")
    first = package.register()
    first.unregister()
    file.write_text(LOWERING + "\n# another version\n")
    second = package.register()
    second.unregister()
    file.write_text(LOWERING)
    third = package.register()
    third.unregister()
    assert first.digest == third.digest != second.digest


def test_decline(op: Any) -> None:
    def negative(x: Tensor) -> Tensor:
        y: Tensor = op(x, -1.0)
        return y

    x = torch.tensor([-2.0, 3.0])
    registry.clear_records()
    with config.patch(enabled=True):
        result = running.compiled(running.own_code(negative, "negative"))(x)
    assert torch.equal(result, torch.tensor([2.0, 3.0]))
    assert [(r.op, r.outcome, r.reason) for r in ixt.records()] == [
        ("ixt_third::leaky", "declined", "a negative slope is not lowered")
    ]


def test_parity_harness(op: Any) -> None:
    report = check_op(op, compile_samples=2)
    assert report.op == "ixt_third::leaky"
    assert report.ran["compiled_on"] == report.ran["dynamic"] == 2
    assert report.ran["reference"] == 4
