"""Session set-up: imports between tests, a cache folder a process, `gpu` skipped without a card."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

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


HUGE_TEST = 40 << 30
"""Bytes of the card that one test of huge tensors may fill."""


@pytest.fixture
def roomy() -> Iterator[None]:
    """40 GiB of the card: skip where it has less; wait where other workers hold all there are."""
    places = torch.cuda.get_device_properties(0).total_memory // HUGE_TEST
    if not places:
        pytest.skip("needs a card with 40 GiB")
    with _one_of(places):
        yield
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _one_of(places: int) -> Iterator[None]:
    """Hold one of some file locks, which all processes of the user share."""
    folder = Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        names = [folder / f"ixt-tests-roomy-{os.getuid()}-{place}" for place in range(places)]
        files = [stack.enter_context(name.open("w")) for name in names]
        while not any(map(_locked, files)):
            time.sleep(0.05)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
