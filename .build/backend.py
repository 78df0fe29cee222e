"""Build backend: scikit-build-core, plus torch only where its headers are not at hand.

The kernels need torch's headers and libtorch_cpu to link, from any torch >= 2.11. An isolated
build that always required torch would download gigabytes next to the torch already installed, so
torch becomes a build requirement only if no environment in reach has one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from scikit_build_core import build as _skbuild
from scikit_build_core.build import (  # the hooks that need no change
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

TORCH_REQUIREMENT = "torch>=2.11,<2.16"
ROOT = Path(__file__).resolve().parents[1]


def _find_torch_module() -> ModuleType:
    path = ROOT / "kernels" / "cmake" / "find_torch.py"
    spec = importlib.util.spec_from_file_location("_inductor_ext_find_torch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _has_cxx() -> bool:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return any(shutil.which(name.split()[0]) for name in names if name.strip())


def _torch_requirement() -> list[str]:
    if not _has_cxx():
        return []  # nothing will be compiled
    found = _find_torch_module().find_torch()
    if found is not None:
        print(f"inductor_ext: compiling against {found}", file=sys.stderr)
        return []
    return [TORCH_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return scikit-build-core's requirements, and torch if none is in reach."""
    return [*_skbuild.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return scikit-build-core's requirements, and torch if none is in reach."""
    return [*_skbuild.get_requires_for_build_editable(config_settings), *_torch_requirement()]
