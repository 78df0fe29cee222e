"""Find the headers of a torch that is new enough, without importing it.

The build compiles against torch's stable C ABI only, so the headers of any torch from 2.11 on do.
In an isolated build the interpreter has no torch of its own; the environment that the wheel is
for usually has one, and using it saves a download of gigabytes. Run as a script, this prints the
folder of the torch package, or nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MINIMUM = (2, 11)
ENV_VAR = "INDUCTOR_EXT_TORCH_DIR"

_SITE_QUERY = (
    "import json, site, sys, sysconfig;"
    "p = sysconfig.get_paths();"
    "print(json.dumps([p['purelib'], p['platlib'], *sys.path]))"
)


def _outer_interpreters() -> Iterator[str]:
    """Yield the interpreters outside an isolated build environment, likeliest first."""
    # pip runs isolated builds with the outer interpreter and hides its packages by PYTHONPATH.
    yield sys.executable
    env = os.environ.get("VIRTUAL_ENV")
    if env:
        yield str(Path(env, "bin", "python"))
    conda = os.environ.get("CONDA_PREFIX")
    if conda:
        yield str(Path(conda, "bin", "python"))
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        candidate = Path(folder, "python3")
        if folder and candidate.is_file():
            yield str(candidate)


def _site_folders(interpreter: str) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        result = subprocess.run(
            [interpreter, "-c", _SITE_QUERY],
            capture_output=True,
            text=True,
            env=env,
            timeout=30,
            check=True,
        )
        return [str(p) for p in json.loads(result.stdout)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _candidates() -> Iterator[Path]:
    given = os.environ.get(ENV_VAR)
    if given:
        yield Path(given)
        return
    paths = sysconfig.get_paths()
    for folder in dict.fromkeys([*sys.path, paths["purelib"], paths["platlib"]]):
        yield Path(folder, "torch")
    seen: set[str] = set()
    for interpreter in _outer_interpreters():
        if interpreter in seen:
            continue
        seen.add(interpreter)
        for folder in _site_folders(interpreter):
            if folder:
                yield Path(folder, "torch")


def _version(package: Path) -> tuple[int, int] | None:
    try:
        text = (package / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"__version__\s*(?::[^=]*)?=\s*['\"](\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def find_torch() -> Path | None:
    """Return the folder of an installed torch with stable headers and libtorch_cpu, or None."""
    for package in _candidates():
        version = _version(package)
        if version is None or version < MINIMUM:
            continue
        header = package / "include" / "torch" / "csrc" / "stable" / "library.h"
        library = package / "lib" / "libtorch_cpu.so"
        if header.is_file() and library.is_file():
            return package.resolve()
    return None


if __name__ == "__main__":
    found = find_torch()
    if found is not None:
        print(found)
