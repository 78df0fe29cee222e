"""Run the FP8 attention kernel in Triton's interpreter, in a process of its own.

The interpreter stands in for a card where logic is concerned: indices, masks, ranges of keys, the
scales' places."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Given = tuple[Any, ...]
"""q, k, v, their scales, offsets and offsets_k, scale, left, right, longest."""


def run(
    cases: list[Given], values: list[Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Return out (float32) and lse of each case, and V's bytes with the padded tokens innermost."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((cases, values), Path(folder, "cases.pt"))
        command = [sys.executable, __file__, folder]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        results: tuple[list[tuple[Tensor, Tensor]], list[Tensor]]
        results = torch.load(Path(folder, "results.pt"))
        return results


def _mend() -> None:
    """Round casts to float8 as PTX does, and let ranges end at tensors with any numpy."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar != tl.float8e4nv or src.dtype.scalar != tl.float32:
            return original(self, src, dst_type, rounding_mode)
        codes = torch.from_numpy(src.data.copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return TensorHandle(codes.view(torch.uint8).numpy(), dst_type.scalar)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _main(folder: Path) -> None:
    import inductor_ext  # noqa: F401  (a source checkout finds its kernels)
    from inductor_ext.kernels.triton import attention_fp8 as kernel

    _mend()
    cases, values = torch.load(folder / "cases.pt")
    results, turned = [], []
    for v in values:
        batch, heads, tokens, dim = v.shape
        turned.append(torch.full((batch, heads, dim, -(-tokens // 16) * 16), 7, dtype=torch.uint8))
        grid, given, constants = kernel.transposition(v, turned[-1])
        kernel.tokens_inside_kernel[grid](*given, **constants)
    for q, k, v, *scales, offsets, scale, left, right, longest in cases:
        batch, heads, tokens, dim = q.shape
        out = torch.full((batch, tokens, heads, dim), -7.0).transpose(1, 2)
        lse = torch.full((batch, heads, tokens), -7.0)
        grid, given, constants = kernel.arguments(
            q, k, v, scales, offsets, scale, left, right, longest, out, lse
        )
        kernel.attention_fp8_kernel[grid](*given, **constants)
        results.append((out, lse))
    torch.save((results, turned), folder / "results.pt")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
