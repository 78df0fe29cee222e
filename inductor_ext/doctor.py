"""``python -m inductor_ext doctor``: what is here, what is missing, and the command that mends it.

Exit code 0 if the package is usable, 1 if something is broken.  What merely costs speed is a
warning.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import inductor_ext as ixt
from inductor_ext import _compat, _state, config, registry
from inductor_ext.kernels import LoadReport, load

Status = Literal["ok", "info", "warn", "fail"]

_REBUILD = "pip install --force-reinstall --no-deps ."


@dataclass(frozen=True)
class Check:
    """One finding; ``remedy`` is the command that mends it, or empty."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def covers(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether code for ``archs`` ("80", "90a", "100a+PTX") runs on a compute capability.

    Machine code runs on its own major version from its minor on; that of an "a" target on its
    very chip only.  PTX runs on anything from its version on.
    """
    major, minor = capability
    for arch in archs:
        match = re.fullmatch(r"(\d+)(\d)([af]?)(\+PTX)?", arch)
        if match is None:
            continue
        its = int(match[1]), int(match[2])
        same_major = its[0] == major and its[1] <= minor
        runs = its == capability if match[3] == "a" else same_major
        if runs or (match[4] and its <= capability):
            return True
    return False


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions() -> Iterator[Check]:
    """Python, the package, torch and Triton."""
    yield Check("python", "ok", platform.python_version())
    yield Check("inductor_ext", "ok", ixt.__version__)
    tested = ", ".join(_compat.TESTED)
    if _compat.torch_release() in _compat.TESTED:
        yield Check("torch", "ok", f"{torch.__version__} (tested: {tested})")
    else:
        yield Check(
            "torch", "warn", f"{torch.__version__} is not tested (tested: {tested}); ops stay "
            "opaque unless INDUCTOR_EXT_ALLOW_UNTESTED=1", "pip install torch==2.11.0",
        )  # fmt: skip
    if importlib.util.find_spec("triton") is not None:
        yield Check("triton", "ok", _version("triton") or "version unknown")
    elif torch.cuda.is_available():
        yield Check("triton", "fail", "missing: nothing compiles for the GPU",
                    "pip install triton")  # fmt: skip
    else:
        yield Check("triton", "info", "missing; only needed for GPUs, present or pretended",
                    "pip install triton")  # fmt: skip


def gpus() -> Iterator[Check]:
    """The GPUs that torch sees, and the driver."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = driver.partition("\n")[0]
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is " \
        "a CPU build"  # fmt: skip
    if not torch.cuda.is_available():
        if driver and torch.version.cuda is None:
            yield Check(
                "gpu", "warn", f"driver {driver} is here, but {built}", "pip install "
                "--force-reinstall torch==2.11.0 --index-url "
                "https://download.pytorch.org/whl/cu130",
            )  # fmt: skip
        elif driver:
            yield Check("gpu", "warn", f"{built}, which driver {driver} may be too old for",
                        "python -c 'import torch; torch.cuda.init()'")  # fmt: skip
        else:
            yield Check("gpu", "info", f"none; {built}")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        memory = p.total_memory / 2**30
        detail = f"{p.name}, sm_{p.major}{p.minor}, {memory:.0f} GiB; driver {driver or '?'}"
        fp8 = (p.major, p.minor) >= (8, 9)
        yield Check(f"gpu {index}", "ok", detail if fp8 else detail + "; FP8 kernels do not fuse")


def libraries(report: LoadReport) -> Iterator[Check]:
    """The compiled kernels, and whether they run on the GPUs here."""
    for error in report.errors:
        yield Check("library", "fail", error, _REBUILD)
    gxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if report.cpu is not None:
        yield Check("cpu kernels", "ok", str(report.cpu))
    else:
        fix = _REBUILD if gxx else f"apt-get install g++ && {_REBUILD}"
        yield Check("cpu kernels", "warn", "not built: ops run as plain PyTorch, slowly", fix)
    yield from _cuda_library(report, nvcc)
    if gxx:
        yield Check("c++ compiler", "ok", gxx)
    else:
        yield Check("c++ compiler", "fail", "missing: torch.compile needs one on the CPU",
                    "apt-get install g++")  # fmt: skip
    where = f"{nvcc} ({_nvcc_version(nvcc)})" if nvcc else "missing; only needed to build"
    yield Check("nvcc", "ok" if nvcc else "info", where)


def _nvcc_version(nvcc: str) -> str:
    found = re.search(r"release ([\d.]+)", _output(nvcc, "--version"))
    return found[1] if found else "version unknown"


def _cuda_library(report: LoadReport, nvcc: str | None) -> Iterator[Check]:
    have_gpu = torch.cuda.is_available()
    build = (
        _REBUILD
        if nvcc
        else f"install a CUDA toolkit (nvcc) of version 12 or newer, then {_REBUILD}"
    )
    if report.cuda is None:
        if have_gpu:
            yield Check("cuda kernels", "warn", "not built: eager ops on the GPU run as plain "
                        "PyTorch, slowly", build)  # fmt: skip
        else:
            yield Check("cuda kernels", "info", "not built; not needed without a GPU")
        return
    archs = ", ".join(f"sm_{arch}" for arch in report.cuda_archs) or "unknown architectures"
    yield Check("cuda kernels", "ok", f"{report.cuda} for {archs}")
    for index in range(torch.cuda.device_count() if have_gpu else 0):
        major, minor = torch.cuda.get_device_capability(index)
        if not covers(report.cuda_archs, (major, minor)):
            arch = f"{major}{minor}" + ("a" if major >= 9 else "")
            yield Check(
                "cuda kernels", "fail", f"no code for GPU {index} (sm_{major}{minor})",
                f"INDUCTOR_EXT_CUDA_ARCHS={arch} {build}",
            )  # fmt: skip


def settings() -> Iterator[Check]:
    """Flags and environment variables in force, and what stands in the plugin's way."""
    flags = ", ".join(f"{k}={_plain(v)}" for k, v in config.to_dict().items())
    yield Check("config", "info", flags)
    how = "" if config.enabled else "export INDUCTOR_EXT_ENABLED=1"
    state = "on" if _state.mode != "off" else "off (ops are opaque to the compiler)"
    yield Check("plugin", "info", state, how)
    known = {f"INDUCTOR_EXT_{name.upper()}" for name in config.to_dict()}
    known |= {
        f"INDUCTOR_EXT_{n}" for n in ("ALLOW_UNTESTED", "CUDA_ARCHS", "BUILD_CUDA", "TORCH_DIR")
    }
    for name, value in sorted(os.environ.items()):
        if name in known:
            yield Check("environment", "info", f"{name}={value}")
        elif name.startswith("INDUCTOR_EXT_"):
            yield Check("environment", "warn", f"{name} is no variable of this package",
                        f"unset {name}")  # fmt: skip
    mode = os.environ.get("TORCHINDUCTOR_FX_COMPILE_MODE", "").upper()
    if mode and mode != "NORMAL":
        yield Check(
            "environment", "fail", f"TORCHINDUCTOR_FX_COMPILE_MODE={mode} compiles in a process "
            "that knows no lowerings", "unset TORCHINDUCTOR_FX_COMPILE_MODE",
        )  # fmt: skip
    missing = _compat.missing()
    for name, where in missing.items():
        yield Check("private symbol", "fail", f"{where} ({name}) is not in torch "
                    f"{torch.__version__}", "pip install torch==2.11.0")  # fmt: skip
    if not missing:
        yield Check("private symbols", "ok", f"all {len(_compat.SYMBOLS)} found")


def _plain(value: Any) -> str:
    return str(sorted(value)) if isinstance(value, frozenset) else repr(value)


def _sample(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 256, generator=generator).to(device, torch.bfloat16)


def eager(device: str) -> Check:
    """Quantize a little on a device and compare every bit with the reference on the CPU."""
    x = _sample(device)
    reference = registry.contract("inductor_ext::quantize_fp8_row").reference
    expected = reference(x.cpu(), torch.float8_e4m3fn, 0.0, False)
    got = ixt.quantize(x, ixt.FP8())
    codes = got.codes.cpu().view(torch.uint8), expected[0].view(torch.uint8)
    same = torch.equal(*codes) and torch.equal(got.scale_inv.cpu(), expected[1])
    detail = f"quantize on {device} gives the reference's bits"
    if same:
        return Check(f"eager {device}", "ok", detail)
    wrong = int((codes[0] != codes[1]).sum())
    return Check(f"eager {device}", "fail", f"{wrong} of {x.numel()} codes differ", _REBUILD)


def compiled(device: str) -> Check:
    """Compile quantize -> dequantize with the plugin: one kernel, and eager's bits."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        q = ixt.quantize(torch.neg(x), ixt.FP8())
        return ixt.dequantize(q, ixt.FP8())

    x = _sample(device)
    name = f"compile {device}"
    with torch.no_grad(), config.patch(enabled=True):
        told = ixt.explain(chain, x, print=False)
        got = torch.compile(chain)(x)
    outcomes = {f"{op.op} {op.outcome} {op.reason}".strip() for op in told.ops}
    if not torch.equal(got, chain(x)):
        return Check(name, "fail", "compiled and eager differ")
    if len(told.kernels) != 1 or told.externs:
        counts = f"{len(told.kernels)} kernels and {len(told.externs)} opaque calls, not 1 and 0"
        explained = all(
            op.outcome in ("declined", "opaque", "kernel") and op.reason for op in told.ops
        )
        text = f"{counts}: {'; '.join(sorted(outcomes))}"
        return Check(name, "warn" if explained and told.ops else "fail", text)
    return Check(name, "ok", "neg, quantize, dequantize: one kernel, eager's bits")


def _guarded(name: str, check: Callable[[str], Check], device: str) -> Check:
    try:
        return check(device)
    except Exception as error:  # whatever it is, the user needs to see it in the table
        first = (str(error).strip().splitlines() or [""])[0]
        return Check(f"{name} {device}", "fail", f"{type(error).__name__}: {first}")


def live(compile: bool) -> Iterator[Check]:
    """Run the ops on each kind of device that is here."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        yield _guarded("eager", eager, device)
    for device in devices if compile else ():
        if device == "cpu" or importlib.util.find_spec("triton") is not None:
            yield _guarded("compile", compiled, device)


def diagnose(compile: bool = True) -> Iterator[Check]:
    """Yield all findings, the quick ones first."""
    yield from versions()
    yield from gpus()
    yield from libraries(load())
    yield from settings()
    yield from live(compile)


def _print(checks: Iterator[Check]) -> list[Check]:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    style = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
    console = Console()
    table = Table(title="inductor_ext doctor", title_justify="left")
    for column in ("", "what", "found", "to mend it"):
        table.add_column(column, overflow="fold")
    done = []
    with console.status("looking; compiling one small kernel takes up to a minute"):
        for check in checks:
            done.append(check)
            mark = f"[{style[check.status]}]{check.status}[/]"
            table.add_row(mark, check.name, escape(check.detail), escape(check.remedy))
    console.print(table)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return 1 if something is broken, else 0."""
    parser = argparse.ArgumentParser(prog="python -m inductor_ext doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--no-compile", action="store_true", help="skip the compile check")
    options = parser.parse_args(argv)
    checks = diagnose(compile=not options.no_compile)
    done = list(checks) if options.json else _print(checks)
    broken = [check for check in done if check.status == "fail"]
    if options.json:
        findings = [dataclasses.asdict(check) for check in done]
        print(json.dumps({"usable": not broken, "checks": findings}, indent=2))
    else:
        slow = [check for check in done if check.status == "warn"]
        verdict = "broken" if broken else "usable, but see the warnings" if slow else "all is well"
        print(f"{verdict}: {len(broken)} failures, {len(slow)} warnings")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
