"""Run the Triton kernels of generated code on the CPU, in Triton's own interpreter.

It stands in for a card where logic is concerned: indices, masks, layouts, the order of bytes.  What
the interpreter does otherwise than a GPU is replaced: PTX, and casts, which it does not round to
nearest.  The interpreter is chosen on import, so a process of its own imports it, once, and each
run is a fork of that process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.S)
_CALL = re.compile(r"^    def call\(self, args\):\n.*?^        return [^\n]*\n", re.S | re.M)
_IMPORT = re.compile(r"^import inductor_ext\S*$", re.M)
_META = re.compile(r"^(meta\d+) = (.*)$", re.M)
_PRELUDE = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from interpreter import _round_bf16, _stored, _to_e4m3, _to_e5m2, _pack4 as ixt_pack4
from interpreter import _scales as ixt_scales
"""


def run(source: str, *inputs: Tensor) -> list[Tensor]:
    """Run the only graph of generated code, of templates and fills alone; return its results."""
    (results,) = run_each(source, [inputs])
    return results


def run_each(source: str, given: Sequence[tuple[Tensor | int, ...]]) -> list[list[Tensor]]:
    """Run it as :func:`run` does on several inputs, sizes that are not known first of each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "source.py").write_text(source, encoding="utf-8")
        torch.save(given, path / "inputs.pt")
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        print(folder, file=server.stdin, flush=True)
        assert server.stdout.readline() == "done\n", (path / "log.txt").read_text()
        results: list[list[Tensor]] = torch.load(path / "results.pt")
        return results


@cache
def _server() -> subprocess.Popen[str]:
    """Return the process that runs what lies in the folders that it is told, one by one."""
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def _serve() -> None:
    importlib.import_module("torch._inductor.runtime.triton_helpers")  # seconds, but once

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_in_fork(Path(line.rstrip("\n")))
        _, status = os.waitpid(child, 0)
        print("done" if status == 0 else "failed", flush=True)


def _run_in_fork(folder: Path) -> NoReturn:
    with open(folder / "log.txt", "w", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            _main(folder)
        except BaseException:
            traceback.print_exc(file=log)
            os._exit(1)
    os._exit(0)


def _tensor(array: Any, dtype: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.core.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def _values(x: Any) -> Tensor:
    return torch.from_numpy(x.handle.data.astype("float32"))


def _round_bf16(x: Any) -> Any:
    import triton.language as tl

    return _tensor(_values(x).bfloat16().float().numpy(), tl.float32)


def _stored(x: Any, pointer: Any) -> Any:
    import triton.language as tl

    return _round_bf16(x) if pointer.dtype.element_ty == tl.bfloat16 else x


def _codes(x: Any, dtype: torch.dtype) -> Tensor:
    values, limit = _values(x), torch.finfo(dtype).max
    codes = values.clamp(-limit, limit).to(dtype).view(torch.uint8)
    return torch.where(values.isnan(), torch.full_like(codes, 0x7F), codes)


def _to_e4m3(x: Any) -> Any:
    import triton.language as tl

    return _tensor(_codes(x, torch.float8_e4m3fn).numpy(), tl.float8e4nv)


def _to_e5m2(x: Any) -> Any:
    import triton.language as tl

    return _tensor(_codes(x, torch.float8_e5m2).numpy(), tl.float8e5)


def _pack4(a: Any, b: Any, c: Any, d: Any, e5m2: Any) -> Any:
    import triton.language as tl

    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    word = torch.zeros(a.handle.data.shape, dtype=torch.int64)
    for place, part in enumerate((a, b, c, d)):
        word |= _codes(part, dtype).to(torch.int64) << (8 * place)
    return _tensor(word.to(torch.int32).numpy(), tl.int32)  # the cast keeps the low 32 bits


def _scales(amax: Any, e5m2: Any, eps: Any, limit: Any, pow2: Any) -> tuple[Any, Any]:
    import triton.language as tl

    values, largest = _values(amax), 57344.0 if e5m2 else 448.0
    values = torch.where(values < float(eps), torch.full_like(values, float(eps)), values)
    scale = torch.full_like(values, largest) / values
    scale = torch.where(scale.isinf(), torch.full_like(scale, float(limit)), scale)
    if pow2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    usual = (values > 0) & values.isfinite()
    scale = torch.where(usual, scale, torch.ones_like(scale))
    inverse = torch.ones_like(scale) / scale
    return _tensor(scale.numpy(), tl.float32), _tensor(inverse.numpy(), tl.float32)


def _module(kernel: str, folder: Path, name: str) -> Any:
    text = kernel[kernel.index("@triton.jit") :]
    for function in ("pack4", "scales"):
        pattern = rf"@triton\.jit\ndef ixt_{function}.*?(?=\n@triton|\Z)"
        text = re.sub(pattern, "", text, flags=re.S)
    divide = "@triton.jit\ndef ixt_div(a, b):\n    return a / b\n"
    text = re.sub(r"@triton\.jit\ndef ixt_div.*?(?=\n@triton|\Z)", divide, text, flags=re.S)
    # Programs run one after another here: what a program would wait for is there, or never comes.
    waits = r"tl\.inline_asm_elementwise\([^()]*AGAIN.*?pack=1\)"
    text = re.sub(waits, "bits", text, flags=re.S)
    quotient = r"tl\.inline_asm_elementwise\('[^']*rcp[^']*', '[^']*', \[(\w+), (\w+)\][^)]*\)"
    text = re.sub(quotient, r"(\1 / \2)", text)
    text = re.sub(r"codes = (.*)\.to\(tl\.float8e4nv\)", r"codes = _to_e4m3(\1)", text)
    text = re.sub(r"codes = (.*)\.to\(tl\.float8e5\)", r"codes = _to_e5m2(\1)", text)
    text = re.sub(r"(\w+)\.to\((KEPT_\d+)\.dtype\.element_ty\)", r"_stored(\1, \2)", text)
    text = re.sub(r"(\w+) = (\w+)\.to\(tl\.bfloat16\)", r"\1 = _round_bf16(\2)", text)
    text = text.replace("libdevice.", "tl.math.")
    file = folder / f"{name}.py"
    file.write_text(_PRELUDE + text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Kernel:
    """What the wrapper calls instead of a compiled kernel."""

    def __init__(self, module: Any, name: str) -> None:
        self.kernel, self.of_loops = getattr(module, name), "_poi_" in name

    def run(self, *given: Any, stream: int) -> None:
        if self.of_loops:  # Inductor's own, of one dimension: its last argument counts elements
            self.kernel[(-(-given[-1] // 64),)](*given, XBLOCK=64)
        else:
            *given, x, y, z = given  # type: ignore[assignment]
            self.kernel[(x, y, z)](*given)


def _mend() -> None:
    """Let maxima of a number and NaN be the number, as on a GPU, and ranges end at tensors."""
    import numpy
    from triton.runtime import interpreter

    def create_maxnumf(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, numpy.fmax)

    interpreter.InterpreterBuilder.create_maxnumf = create_maxnumf
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _main(folder: Path) -> None:
    _mend()
    source = (folder / "source.py").read_text(encoding="utf-8")
    call = _CALL.search(source)
    assert call is not None
    known: dict[str, Any] = {
        "torch": torch,
        "assert_size_stride": lambda *_: None,
        "get_raw_stream": lambda _: 0,
        "reinterpret_tensor": torch.as_strided,
        "empty_strided_cuda": lambda size, stride, kind: torch.empty_strided(
            size, stride, dtype=kind
        ),
    }
    for module in _IMPORT.findall(source):
        exec(module, known)
    for name, text in _KERNEL.findall(source):
        known[name] = _Kernel(_module(text, folder, name), name)
    known |= {name: eval(value) for name, value in _META.findall(source)}
    text = re.sub(r"with torch\.cuda\._DeviceGuard\(0\):", "if True:", textwrap.dedent(call[0]))
    exec(text.replace("torch.cuda.set_device(0)", "pass"), known)
    given = torch.load(folder / "inputs.pt")
    results = [list(known["call"](None, list(inputs))) for inputs in given]
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
