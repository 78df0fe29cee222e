"""Importing the package: what it loads, what it leaves alone, and that any order works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.contract


def fresh(code: str, tmp_path: Path, **env: str) -> Any:
    """Run code in a new process and return the JSON it prints last."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("INDUCTOR_EXT_")}
    clean |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOADED = """
import json, sys
import torch
before = set(sys.modules)
import inductor_ext
added = set(sys.modules) - before
print(json.dumps(sorted(m for m in added if m.split(".")[0] in ("torch", "triton"))))
"""


def test_import_loads_nothing_of_the_compiler(tmp_path: Path) -> None:
    added = fresh(LOADED, tmp_path)
    heavy = ("torch._inductor", "torch._dynamo", "torch._functorch", "triton")
    assert [name for name in added if name.startswith(heavy)] == []


TABLES = """
import json
import torch
import torch._functorch.partitioners as partitioners
from torch._inductor import choices, compile_fx, decomposition, lowering
from torch._inductor.codegen import common

def look():
    op_types = partitioners.get_default_op_list()
    return (
        dict(lowering.lowerings), set(lowering.fallbacks), set(lowering.needs_realized_inputs),
        dict(lowering._maybe_layout_constraints), dict(decomposition.decompositions),
        dict(common.custom_backend_passes), partitioners.get_default_op_list,
        choices.InductorChoices.should_use_persistent_reduction,
        set(op_types.recomputable_ops), set(op_types.fusible_ops),
        torch._inductor.config.get_config_copy(), torch._functorch.config.get_config_copy(),
        torch._dynamo.config.get_config_copy(),
    )

before = look()
import inductor_ext as ixt
imported = [a == b for a, b in zip(before, look())]
ixt.enable()
enabled = [a == b for a, b in zip(before, look())]
ixt.disable()
disabled = [a == b for a, b in zip(before, look())]
print(json.dumps([imported, enabled, disabled]))
"""


def test_import_changes_no_table(tmp_path: Path) -> None:
    imported, enabled, disabled = fresh(TABLES, tmp_path)
    assert all(imported), imported
    assert all(disabled), disabled
    changed = [not same for same in enabled]
    # lowerings, decompositions, backend passes, the partitioner's list (so its sets), the choice
    assert changed == [1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]


WITHOUT_LIBRARIES = """
import json, warnings
from pathlib import Path
real = Path.is_file
Path.is_file = lambda self: real(self) and self.suffix != ".so"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch, inductor_ext as ixt
    at_import = len([w for w in said if issubclass(w.category, ixt.InductorExtWarning)])
    x = torch.tensor([[448.0, -1.0, 224.0, 0.0]])
    for _ in range(3):
        q = ixt.quantize(x, ixt.FP8(granularity="row"))
        y = ixt.dequantize(q, ixt.FP8(), torch.float32)
Path.is_file = real
from inductor_ext.kernels import load
told = [str(w.message) for w in said if issubclass(w.category, ixt.InductorExtWarning)]
ixt.enable()
f = torch.compile(lambda x: ixt.quantize(x, ixt.FP8(granularity="row")).codes, fullgraph=True)
same = torch.equal(f(x).view(torch.uint8), q.codes.view(torch.uint8))
outcomes = [r.outcome for r in ixt.records()]
print(json.dumps([at_import, str(load().cpu), told, y.tolist(), same, outcomes]))
"""


def test_without_compiled_libraries(tmp_path: Path) -> None:
    at_import, library, told, values, same, outcomes = fresh(WITHOUT_LIBRARIES, tmp_path)
    assert (at_import, library) == (0, "None")
    assert len(told) == 1
    assert "has no compiled kernel" in told[0]
    assert values == [[448.0, -1.0, 224.0, 0.0]]
    assert (same, outcomes) == (True, ["lowered"])


PREPARE = """
import json, torch
{first}
def chain(x):
    q = ixt.quantize(x * 2, ixt.FP8(granularity="row"))
    return ixt.dequantize(q, ixt.FP8(), torch.float32) + 1
"""
COUNT = """
import torch._inductor.config
torch._inductor.config.cpp_cache_precompile_headers = False  # they cost more than they save here
from torch._inductor.utils import run_and_get_code
_, sources = run_and_get_code(torch.compile(chain, fullgraph=True), torch.randn(4, 64))
assert len(sources) == 1
print(json.dumps([sources[0].count("= async_compile.cpp_pybinding("),
                  sources[0].count("torch.ops.inductor_ext")]))
"""
COMPILE_ANOTHER = "torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(3))\n"
FIRST_OPAQUE = """
import torch._inductor.config
torch._inductor.config.cpp_cache_precompile_headers = False
torch.compile(lambda x: chain(x) * 3)(torch.ones(4, 64))
"""
IMPORT, ENABLE = "import inductor_ext as ixt\n", "ixt.enable()\n"
ORDERS = {
    "plugin before the first compile": (IMPORT + ENABLE, COUNT),
    "plugin after the first compile": (COMPILE_ANOTHER + IMPORT + ENABLE, COUNT),
    "enabled after an opaque compile of the same op": (
        IMPORT,
        FIRST_OPAQUE + ENABLE + COUNT,
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_fuses(tmp_path: Path, order: str) -> None:
    first, rest = ORDERS[order]
    kernels, opaque_calls = fresh(PREPARE.format(first=first) + rest, tmp_path)
    assert (kernels, opaque_calls) == (1, 0)


def test_without_enabling_it_does_not_fuse(tmp_path: Path) -> None:
    """The counter-example: the same program, not enabled."""
    kernels, opaque_calls = fresh(PREPARE.format(first=IMPORT) + COUNT, tmp_path)
    assert kernels == 2
    assert opaque_calls >= 2
