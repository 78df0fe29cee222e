"""What a measurement depends on besides the code: the card and the versions."""

from __future__ import annotations

import datetime
import platform
import subprocess

import torch

import inductor_ext as ixt


def environment(device: torch.device) -> dict[str, str]:
    """Return the device's name, the driver (on CUDA), versions and the date."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu",
        **({"driver": _driver()} if cuda else {}),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "inductor_ext": ixt.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.partition("\n")[0].strip()
