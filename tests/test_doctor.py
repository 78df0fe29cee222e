"""The doctor finds what is broken, says how to mend it, and sets the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import inductor_ext as ixt
from inductor_ext import _compat, doctor
from inductor_ext.kernels import LoadReport

NOTHING = LoadReport(cpu=None, cuda=None, cuda_archs=(), errors=())


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["90a"], (9, 0), True),
        (["90a"], (10, 0), False),
        (["90"], (9, 0), True),
        (["80"], (8, 6), True),
        (["86"], (8, 0), False),
        (["80"], (9, 0), False),
        (["80+PTX"], (9, 0), True),
        (["90a+PTX"], (12, 0), True),
        (["90a+PTX"], (8, 0), False),
        (["100a"], (10, 3), False),
        (["100f"], (10, 3), True),
        (["80", "90a", "120a"], (12, 0), True),
        (["nonsense"], (9, 0), False),
        ([], (9, 0), False),
    ],
)
def test_which_code_runs_where(archs, capability, runs):
    assert doctor.covers(archs, capability) is runs


def test_a_healthy_installation_is_usable(capsys):
    assert doctor.main(["--json", "--no-compile"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["usable"] is True
    found = {check["name"]: check for check in data["checks"]}
    assert {"python", "torch", "cpu kernels", "config", "eager cpu"} <= found.keys()
    assert torch.__version__ in found["torch"]["detail"]
    assert found["eager cpu"]["status"] == "ok"


def test_the_table_names_failures_and_remedies(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(_compat, "missing", lambda: {"ops": "torch._inductor.gone:ops"})
    assert doctor.main(["--no-compile"]) == 1
    out = capsys.readouterr().out
    assert "torch._inductor.gone:ops" in out
    assert "pip install torch==" in out
    assert "broken: 1 failures" in out


def test_a_library_that_does_not_load_is_a_failure(monkeypatch, capsys):
    broken = LoadReport(cpu=None, cuda=None, cuda_archs=(), errors=("lib.so: undefined symbol",))
    monkeypatch.setattr(doctor, "load", lambda: broken)
    assert doctor.main(["--json", "--no-compile"]) == 1
    (check,) = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["status"] == "fail"]
    assert "undefined symbol" in check["detail"]
    assert check["remedy"].startswith("pip install")


def test_without_libraries_it_is_slow_not_broken(monkeypatch):
    found = by_name(doctor.libraries(NOTHING))
    assert found["cpu kernels"].status == "warn"
    assert "pip install" in found["cpu kernels"].remedy


def test_without_a_compiler_the_remedy_installs_one_first(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    found = by_name(doctor.libraries(NOTHING))
    assert found["c++ compiler"].status == "fail"
    assert found["cpu kernels"].remedy.startswith("apt-get install g++ && pip install")
    assert found["nvcc"].status == "info"


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))


@pytest.mark.usefixtures("blackwell")
def test_kernels_for_another_gpu_are_a_failure_with_the_exact_command():
    report = LoadReport(cpu=None, cuda=Path("x.so"), cuda_archs=("90a",), errors=())
    first, second = doctor._cuda_library(report, "/usr/bin/nvcc")
    assert first.status == "ok"
    assert second.status == "fail"
    assert second.remedy == f"INDUCTOR_EXT_CUDA_ARCHS=120a {doctor._REBUILD}"
    good = LoadReport(cpu=None, cuda=Path("x.so"), cuda_archs=("120a",), errors=())
    assert [check.status for check in doctor._cuda_library(good, None)] == ["ok"]


@pytest.mark.usefixtures("blackwell")
def test_a_gpu_without_kernels_is_a_warning():
    (check,) = doctor._cuda_library(NOTHING, None)
    assert check.status == "warn"
    assert check.remedy.startswith("install a CUDA toolkit (nvcc) of version 12 or newer, then pip")


def test_environment(monkeypatch):
    monkeypatch.setenv("INDUCTOR_EXT_ENABLE", "1")
    monkeypatch.setenv("INDUCTOR_EXT_NUMERICS", "exact")
    monkeypatch.setenv("TORCHINDUCTOR_FX_COMPILE_MODE", "SUBPROCESS")
    found = {check.detail: check for check in doctor.settings()}
    assert found["INDUCTOR_EXT_NUMERICS=exact"].status == "info"
    assert found["INDUCTOR_EXT_ENABLE is no variable of this package"].status == "warn"
    (mode,) = [check for check in found.values() if check.status == "fail"]
    assert mode.remedy == "unset TORCHINDUCTOR_FX_COMPILE_MODE"


def test_an_untested_torch_is_a_warning(monkeypatch):
    monkeypatch.setattr(_compat, "TESTED", ("1.0",))
    found = by_name(doctor.versions())
    assert found["torch"].status == "warn"
    assert "torch==" in found["torch"].remedy


def test_wrong_bits_are_a_failure(monkeypatch):
    real = ixt.quantize

    def wrong(x, fmt):
        q = real(x, fmt)
        codes = q.codes.view(torch.uint8) ^ 1
        return q._replace(codes=codes.view(q.codes.dtype))

    monkeypatch.setattr(ixt, "quantize", wrong)
    check = doctor.eager("cpu")
    assert check.status == "fail"
    assert f"{16 * 256} of" in check.detail


def test_a_check_that_raises_is_a_failure():
    def check(device):
        raise ValueError("boom\nand more")

    made = doctor._guarded("eager", check, "cpu")
    assert (made.name, made.status, made.detail) == ("eager cpu", "fail", "ValueError: boom")


def test_compile_check():
    before = ixt.config.enabled
    assert doctor.compiled("cpu").status == "ok"
    with ixt.config.patch(disabled_ops={"inductor_ext::dequantize_fp8"}):
        broken = doctor.compiled("cpu")
    assert broken.status == "fail"
    assert "1 opaque calls" in broken.detail
    assert "disabled_ops" in broken.detail
    assert ixt.config.enabled is before


@pytest.mark.gpu
def test_checks_on_a_gpu():
    assert doctor.eager("cuda").status == "ok"
    assert doctor.compiled("cuda").status == "ok"
