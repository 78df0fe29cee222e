"""pytest plugin: where a machine has several GPUs, xdist's workers take them in turns."""

from __future__ import annotations

import os
import subprocess


def _cards() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return len(listed.stdout.splitlines())


_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker and "CUDA_VISIBLE_DEVICES" not in os.environ and (_count := _cards()) > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(_worker.removeprefix("gw")) % _count)
