"""Session set-up: imports between tests, a cache folder a process, `gpu` skipped without a card."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib import mode leaves this to us

# Set before torch reads it; one folder a process, so that no run sees another's compiled code.
_CACHE = tempfile.TemporaryDirectory(prefix="ixt-tests-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE.name
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Tests are about lowerings, also of an op without neighbours; test_alone.py is about that choice.
os.environ.setdefault("INDUCTOR_EXT_ALWAYS_LOWER", "1")

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
