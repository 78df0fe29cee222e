"""Fresh processes that share a compile cache."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Step = Callable[..., dict[str, Any]]


class Zygote:
    """The parent of all child processes, started with the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, itertools.count()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("INDUCTOR_EXT_")}
        # No vector instructions: finding out which exist takes longer than the rest of a test.
        environment |= {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._errors = (folder / "stderr").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=folder,
            text=True,
        )

    def run(self, step: str, cache: Path, env: dict[str, str] | None = None, **args: Any) -> Any:
        """Run a function of ``steps`` in a new process with the given cache folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = self._folder / f"answer{next(self._number)}.json"
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), **(env or {})}
        request = {"step": step, "args": args, "env": environment, "answer": str(answer)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "done" or not answer.exists():
            self._errors.seek(0)
            pytest.fail(f"the child process died: {self._errors.read()[-4000:]}")
        result = json.loads(answer.read_text())
        if "error" in result:
            pytest.fail(f"step {step}({args}) failed in the child process:\n{result['error']}")
        return result["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._errors.close()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    made = Zygote(tmp_path_factory.mktemp("zygote"))
    yield made
    made.close()


@pytest.fixture
def child(zygote: Zygote, tmp_path: Path) -> Step:
    """Run a step in a new process; all steps of one test share one cache folder."""

    def run(step: str, **args: Any) -> Any:
        return zygote.run(step, tmp_path / "cache", **args)

    return run
