"""Load the compiled kernels. Imports torch only; works, and says so, where nothing was built.

The ops' schemas are defined in Python (`inductor_ext.ops`) and must exist before `load()` runs:
the libraries only add CPU and CUDA implementations to them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["LoadReport", "load"]

_CPU = "libinductor_ext_cpu.so"
_CUDA = "libinductor_ext_cuda.so"
_INFO = "build_info.json"


@dataclass(frozen=True)
class LoadReport:
    """Which libraries are loaded, and what went wrong with the others.

    `cuda_archs` holds the architectures that the CUDA library was built for, such as "90a".
    A library that was not built is None and no error; one that fails to load is an error.
    """

    cpu: Path | None
    cuda: Path | None
    cuda_archs: tuple[str, ...]
    errors: tuple[str, ...]


_lock = threading.Lock()
_report: LoadReport | None = None


def _folders() -> Iterator[Path]:
    """Yield the folders that may hold the libraries: installed, editable, or built in place."""
    seen: set[Path] = set()
    # An editable install keeps the sources and the built files apart and lists both in __path__.
    for entry in [*__path__, str(Path(__file__).parent)]:
        folder = Path(entry, "lib").resolve()
        if folder not in seen:
            seen.add(folder)
            yield folder


def _find(name: str) -> Path | None:
    for folder in _folders():
        path = folder / name
        if path.is_file():
            return path
    return None


def _load_one(name: str, errors: list[str]) -> Path | None:
    path = _find(name)
    if path is None:
        return None
    try:
        torch.ops.load_library(path)
    except Exception as error:  # a broken binary must not break the package: it has references
        errors.append(f"{path}: {error}")
        return None
    return path


def _read_archs(library: Path | None, errors: list[str]) -> tuple[str, ...]:
    if library is None:
        return ()
    path = library.with_name(_INFO)
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        return tuple(str(arch) for arch in info["cuda_archs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        errors.append(f"{path}: {error!r}")
        return ()


def load() -> LoadReport:
    """Load the libraries that were built, once, and return what was found. Never raises."""
    global _report
    with _lock:
        if _report is None:
            errors: list[str] = []
            cpu = _load_one(_CPU, errors)
            cuda = _load_one(_CUDA, errors)
            archs = _read_archs(cuda, errors)
            _report = LoadReport(cpu=cpu, cuda=cuda, cuda_archs=archs, errors=tuple(errors))
        return _report
