"""Run the Triton kernels of attention over a KV cache on the CPU, in Triton's own interpreter.

What the interpreter does otherwise than a GPU is replaced: products of bf16 (it multiplies their
bits), and a scalar as the end of a loop.  It cuts bf16 off where a GPU rounds.  Started as a
program in a process of its own, since the interpreter is chosen on import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def run(calls: list[tuple[Any, ...]]) -> list[tuple[Tensor, Tensor]]:
    """Return (out, lse) of each call of ``kernels/triton/decode_attention.py``."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(calls, Path(folder, "calls.pt"))
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        command = [sys.executable, "-W", "ignore", __file__, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        results: list[tuple[Tensor, Tensor]] = torch.load(Path(folder, "results.pt"))
        return results


def _mend(interpreter: Any) -> None:
    import numpy as np
    import triton.language as tl

    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    dot = builder.create_dot

    def as_floats(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        floats = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(floats, tl.float32)

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    builder.create_dot = lambda self, a, b, *r: dot(self, as_floats(a), as_floats(b), *r)
    interpreter._patch_lang_tensor = patched


def _main(folder: Path) -> None:
    from triton.runtime import interpreter

    from inductor_ext.kernels.triton.decode_attention import decode_attention

    _mend(interpreter)
    calls = torch.load(folder / "calls.pt")
    torch.save([decode_attention(*call) for call in calls], folder / "results.pt")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
