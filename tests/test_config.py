"""The flags: types, environment variables, patch, and that a failure changes nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import inductor_ext as ixt
from inductor_ext import _install, config

DEFAULTS = {
    "enabled": False,
    "strict": False,
    "numerics": "exact",
    "disabled_ops": frozenset(),
    "always_lower": True,  # tests/conftest.py
    "templates": True,
    "gemm": "auto",
    "grouped_gemm": "auto",
    "weight_only": "auto",
    "attention": "auto",
    "decode_attention": "auto",
}


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    before = config.to_dict()
    yield
    assert config.to_dict() == before


def fresh(code: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("INDUCTOR_EXT_")}
    env |= {f"INDUCTOR_EXT_{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )


def test_environment(tmp_path: Path) -> None:
    """Variables set the flags, and ENABLED=1 alone is enough to have the ops in the tables."""
    code = (
        "import inductor_ext as ixt; from inductor_ext import _compat\n"
        "d = ixt.config.to_dict(); d['disabled_ops'] = sorted(d['disabled_ops']); print(d)\n"
        "print(ixt.ops.fp8.quantize_fp8_row in _compat.lowerings,"
        " ixt.ops.fp8.dequantize_fp8 in _compat.lowerings)"
    )
    done = fresh(
        code,
        tmp_path,
        ENABLED="1",
        STRICT="on",
        NUMERICS="fast",
        DISABLED_OPS="inductor_ext::dequantize_fp8, a::b",
    )
    flags = DEFAULTS | {
        "enabled": True, "strict": True, "numerics": "fast", "always_lower": False,
        "disabled_ops": ["a::b", "inductor_ext::dequantize_fp8"],
    }  # fmt: skip
    assert done.stdout.splitlines() == [repr(flags), "True False"], done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ENABLED", "maybe", "INDUCTOR_EXT_ENABLED must be 0 or 1, got 'maybe'"),
        ("NUMERICS", "sloppy", 'numerics must be "exact" or "fast", got \'sloppy\''),
        ("DISABLED_OPS", "row", "disabled_ops must hold names like \"namespace::op\", got 'row'"),
    ],
)
def test_bad_environment(tmp_path: Path, name: str, value: str, message: str) -> None:
    done = fresh("import inductor_ext", tmp_path, **{name: value})
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("enabled", 1, TypeError, r"config\.enabled must be a bool, got 1"),
        ("strict", "yes", TypeError, r"config\.strict must be a bool, got 'yes'"),
        ("numerics", "sloppy", ValueError, r'config\.numerics must be "exact" or "fast"'),
        ("numerics", ["fast"], ValueError, r"config\.numerics must be"),
        ("disabled_ops", "a::b", TypeError, r"config\.disabled_ops must be a collection"),
        ("disabled_ops", [1], ValueError, r"config\.disabled_ops must hold names"),
        ("disabled_ops", ["row"], ValueError, r"got 'row'"),
        ("enable", True, AttributeError, r"no flag 'enable'; the flags are enabled, strict"),
    ],
)
def test_bad_values(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        setattr(config, name, value)
    with pytest.raises(error, match=message), config.patch(**{"strict": True, name: value}):
        pytest.fail("the block must not be entered")  # and strict is back, see `unchanged`


def test_flags_cannot_be_deleted() -> None:
    with pytest.raises(AttributeError, match="strict cannot be deleted"):
        del config.strict


def test_defaults_are_off() -> None:
    assert config.to_dict() == DEFAULTS


def test_patch_nests_and_survives_exceptions() -> None:
    with config.patch(numerics="fast", strict=True):
        with config.patch(numerics="exact"):
            assert (config.numerics, config.strict) == ("exact", True)
        assert (config.numerics, config.strict) == ("fast", True)
        inner = config.patch(strict=False, disabled_ops={"a::b"})
        with contextlib.suppress(ZeroDivisionError), inner:
            assert config.disabled_ops == frozenset({"a::b"})
            raise ZeroDivisionError
        assert (config.strict, config.disabled_ops) == (True, frozenset())
    assert config.to_dict() == DEFAULTS


def test_patch_decorates() -> None:
    @config.patch(numerics="fast")
    def inside() -> str:
        return config.numerics

    assert (inside(), config.numerics, inside()) == ("fast", "exact", "fast")


def test_enable_and_disable_are_the_flag() -> None:
    assert not _install.installed()
    ixt.enable()
    try:
        assert config.enabled
        assert ixt.ops.fp8.quantize_fp8_row in _install.installed()
    finally:
        ixt.disable()
    assert not config.enabled
    assert not _install.installed()


def test_disabled_ops_leave_the_tables() -> None:
    row = ixt.ops.fp8.quantize_fp8_row
    with config.patch(enabled=True):
        assert row in _install.installed()
        with config.patch(disabled_ops=["inductor_ext::quantize_fp8_row"]):
            assert row not in _install.installed()
            assert ixt.ops.fp8.quantize_fp8_tensor in _install.installed()
        assert row in _install.installed()


def test_failing_installation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_ext import _compat

    lowerings = dict(_compat.lowerings)
    real, calls = _install._install_op, []

    def broken(contract: Any) -> Any:
        calls.append(contract)
        if len(calls) == 2:
            raise RuntimeError("no room")
        return real(contract)

    monkeypatch.setattr(_install, "_install_op", broken)
    with pytest.raises(RuntimeError, match="no room"):
        config.enabled = True
    assert len(calls) == 2
    assert (config.enabled, _install.installed()) == (False, ())
    assert dict(_compat.lowerings) == lowerings


def test_flags_are_seen_by_other_threads() -> None:
    """Inductor's tables are shared, so the flags are, unlike torch's own from 2.13 on."""
    seen: list[Any] = []
    with config.patch(enabled=True, numerics="fast"):
        thread = threading.Thread(target=lambda: seen.append((config.enabled, config.numerics)))
        thread.start()
        thread.join()
    assert seen == [(True, "fast")]

    def assign() -> None:
        config.strict = True

    thread = threading.Thread(target=assign)
    thread.start()
    thread.join()
    assert config.strict
    config.strict = False


def test_two_togglers_do_not_wait_for_each_other() -> None:
    import torch._dynamo.convert_frame  # noqa: F401  (so that the compile lock is in play)

    def patching() -> None:
        for _ in range(200):
            with config.patch(strict=True):
                pass

    def assigning() -> None:
        for _ in range(200):
            config.disabled_ops = frozenset()

    threads = [threading.Thread(target=f, daemon=True) for f in (patching, assigning) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    config.strict = False
