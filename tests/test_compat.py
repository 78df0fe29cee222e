"""The one file of private symbols: all of them are there, and an untested torch is survived."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from inductor_ext import CompatError, _compat

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("name", _compat.SYMBOLS)
def test_symbol(name: str) -> None:
    target = _compat.SYMBOLS[name]
    try:
        value = _compat.resolve(target)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} has no {target}: {error}")
    assert getattr(_compat, name) is value
    assert isinstance(value, types.ModuleType) == (":" not in target)


def test_missing_is_empty_here_and_names_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compat.missing() == {}
    monkeypatch.setitem(_compat.SYMBOLS, "gone", "torch._inductor.lowering:gone")
    monkeypatch.setitem(_compat.SYMBOLS, "away", "torch._inductor.away")
    assert set(_compat.missing()) == {"gone", "away"}
    for name in ("gone", "away"):
        with pytest.raises(CompatError, match=rf"torch\._inductor.*{name} \({name}\) is not in"):
            getattr(_compat, name)
    with pytest.raises(AttributeError, match="no attribute 'never_heard_of'"):
        _ = _compat.never_heard_of


def test_this_torch_is_tested() -> None:
    assert _compat.is_tested()


def test_only_compat_names_private_symbols() -> None:
    """Nobody else imports torch._inductor, torch._dynamo, torch._functorch or torch._guards."""
    import ast

    import inductor_ext
    import inductor_ext.decompositions
    import inductor_ext.lowerings

    modules = ("_inductor", "_dynamo", "_functorch", "_guards", "_subclasses", "_decomp")
    private = tuple(f"torch.{module}" for module in modules)
    found = []
    for package in (inductor_ext, inductor_ext.lowerings, inductor_ext.decompositions):
        assert package.__file__ is not None
        for file in Path(package.__file__).parent.rglob("*.py"):
            if file.name == "_compat.py":
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    names = [f"{node.value.id}.{node.attr}"]
                found += [(file.name, name) for name in names if name.startswith(private)]
    assert found == []


UNTESTED = """
import warnings
import torch
from inductor_ext import _compat, config
_compat.TESTED = ("1.0",)
import inductor_ext as ixt
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        ixt.disable()
        ixt.enable()
print([str(w.message) for w in said if "not tested with torch" in str(w.message)])
from inductor_ext._install import installed
print(len(installed()) > 0, "inductor_ext" in _compat.custom_backend_passes)
x = torch.randn(3, 16)
f = torch.compile(lambda x: ixt.quantize(x, ixt.FP8(granularity="row")).codes, fullgraph=True)
eager = ixt.quantize(x, ixt.FP8(granularity="row")).codes
print(torch.equal(f(x).view(torch.uint8), eager.view(torch.uint8)))
print([r.outcome for r in ixt.records()])
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_untested_torch(tmp_path: Path, allowed: bool) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("INDUCTOR_EXT_")}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    env |= {"TORCHINDUCTOR_VEC_ISA_OK": "0", "INDUCTOR_EXT_ALWAYS_LOWER": "1"}
    if allowed:
        env["INDUCTOR_EXT_ALLOW_UNTESTED"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", UNTESTED], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    warned, tables, right, outcomes = done.stdout.splitlines() or [done.stderr] * 4
    assert right == "True", done.stderr
    if allowed:
        assert (warned, tables, outcomes) == ("[]", "True True", "['lowered']")
    else:
        assert warned.count("not tested with torch") == 1
        assert torch.__version__ in warned
        assert "INDUCTOR_EXT_ALLOW_UNTESTED=1" in warned
        assert (tables, outcomes) == ("False False", "[]")
