"""Inductor's Triton source and PTX for a GPU that is not there.

    from inductor_ext import fake_gpu
    graphs = fake_gpu.capture(fn, (x, w), target="sm_90", asm=True)    # x, w: CPU tensors
    print(graphs[0].kernels["triton_poi_fused_add_0"].ptx)

Nothing is launched or allocated: inputs and parameters become fake tensors, Inductor generates
code, and the graph then runs op by op on fakes so that a graph break does not end the capture.
Everything patched in PyTorch and Triton is put back.  Needs the `triton` package; training graphs
without a GPU also need g++ (a shim of 60 lines is compiled once, see ``_fake_cuda.cc``).
Not possible: benchmarking (``max_autotune`` with more than one choice), CUDA graphs, running.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import _compat
from ._codegen import (
    codegen_only,
    externs_in,
    fresh_copy,
    fresh_runner,
    graph_kind,
    isolated,
)
from ._fakes import Mover, needs_grad
from .errors import InductorExtError

__all__ = ["FakeGpuError", "GeneratedGraph", "KernelCode", "capture", "pretend"]


class FakeGpuError(InductorExtError, RuntimeError):
    """Code for a GPU that is not there cannot be generated here; the message says what to do."""


@dataclass(frozen=True)
class KernelCode:
    """One Triton kernel.

    ``ptx`` is that of the first autotuning configuration; ``asm`` holds every configuration's
    "ttir", "ttgir", "llir", "ptx" and "cubin".  Both are empty unless asked for.
    """

    name: str
    source: str
    ptx: str | None = None
    asm: tuple[dict[str, Any], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class GeneratedGraph:
    """The code of one graph: the Python wrapper, its kernels, and the calls it leaves to others.

    ``kind`` is "inference", "forward" or "backward"; forward comes before backward.
    """

    kind: str
    source: str
    kernels: dict[str, KernelCode]
    externs: tuple[str, ...]


# name, SMs, threads per SM, shared memory per block (opt-in) and per SM, L2, memory
_KIB, _GIB = 1 << 10, 1 << 30
_CARDS: dict[int, tuple[str, int, int, int, int, int, int]] = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 2048, 163 * _KIB, 164 * _KIB, 40 << 20, 80 * _GIB),
    89: ("NVIDIA L40S", 142, 1536, 99 * _KIB, 100 * _KIB, 96 << 20, 48 * _GIB),
    90: ("NVIDIA H100 80GB HBM3", 132, 2048, 227 * _KIB, 228 * _KIB, 50 << 20, 80 * _GIB),
    100: ("NVIDIA B200", 148, 2048, 227 * _KIB, 228 * _KIB, 126 << 20, 180 * _GIB),
    120: ("NVIDIA GeForce RTX 5090", 170, 1536, 99 * _KIB, 100 * _KIB, 96 << 20, 32 * _GIB),
}


def parse_target(target: str | int) -> int:
    """Return 90 for "sm_90", "sm_90a" or 90; FakeGpuError for a target that is not known."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)[af]?", str(target))
    arch = int(match[1]) if match else -1
    if arch not in _CARDS:
        known = ", ".join(f'"sm_{arch}"' for arch in _CARDS)
        raise FakeGpuError(f"`target` must be one of {known}, got {target!r}")
    return arch


def _properties(arch: int) -> types.SimpleNamespace:
    name, sms, threads, per_block, per_sm, l2, memory = _CARDS[arch]
    return types.SimpleNamespace(
        name=name, major=arch // 10, minor=arch % 10, multi_processor_count=sms, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=threads,
        max_threads_per_block=1024, total_memory=memory, L2_cache_size=l2, gcnArchName="",
        shared_memory_per_block=48 * _KIB, shared_memory_per_block_optin=per_block,
        shared_memory_per_multiprocessor=per_sm, is_integrated=False,
    )  # fmt: skip


def _fake_interface(properties: Any, arch: int) -> type:
    def always(value: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: value)

    worker = type("Worker", (), {
        "set_device": always(None), "current_device": always(0),
        "get_device_properties": always(properties),
    })  # fmt: skip
    return type("FakeCudaInterface", (_compat.device_interface.CudaInterface,), {
        "Worker": worker, "current_device": always(0), "set_device": always(None),
        "device_count": always(1), "synchronize": always(None), "exchange_device": always(0),
        "maybe_exchange_device": always(0), "get_raw_stream": always(0),
        "get_device_properties": always(properties), "is_available": always(True),
        "get_compute_capability": always(arch), "is_triton_capable": always(True),
        "raise_if_triton_unavailable": always(None), "is_bf16_supported": always(True),
    })  # fmt: skip


def _fake_driver(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_capability=lambda device=None: (arch // 10, arch % 10),
    )


def _clear_device_caches() -> None:
    """Forget what PyTorch remembered about the device, real or fake."""
    _compat.DeviceProperties.create.cache_clear()
    for module in (_compat.triton_utils, _compat.inductor_utils, _compat.cuda_env):
        for value in list(vars(module).values()):
            clear = getattr(value, "cache_clear", None)
            if callable(clear):
                clear()


@contextlib.contextmanager
def pretend(target: str | int = "sm_90", training: bool = False) -> Iterator[None]:
    """Let PyTorch generate code as if a GPU of this architecture were there.

    Args:
        target: "sm_80", "sm_89", "sm_90", "sm_100" or "sm_120".
        training: autograd will trace on the fake device (needs g++ where there is no GPU).

    Raises:
        FakeGpuError: an unknown target, no Triton, or no compiler for the shim.
    """
    arch = parse_target(target)
    if importlib.util.find_spec("triton") is None:
        raise FakeGpuError("code for a GPU needs Triton, which is missing: pip install triton")
    from triton.runtime.driver import driver

    real_gpu = torch.cuda.is_available()
    properties = _properties(arch)
    interface = _fake_interface(properties, arch)
    _compat.device_interface.get_interface_for_device("cuda")  # fills the table that is patched
    with contextlib.ExitStack() as stack:
        if training and not real_gpu:
            stack.enter_context(_shim())
        if torch.version.cuda is None:
            stack.enter_context(_patterns_traced_on_cpu())
        interfaces = _compat.device_interface.device_interfaces
        stack.enter_context(mock.patch.dict(interfaces, {"cuda": interface, "cuda:0": interface}))
        for name, value in {
            "is_available": False,  # True would make preserve_rng_state call the driver
            "device_count": 1, "current_device": 0, "get_device_properties": properties,
            "get_device_capability": (properties.major, properties.minor),
            "get_device_name": properties.name, "_lazy_init": None, "synchronize": None,
        }.items():  # fmt: skip
            stub = mock.patch.object(torch.cuda, name, lambda *a, _value=value, **k: _value)
            stack.enter_context(stub)
        cuda = torch.version.cuda or "13.0"
        stack.enter_context(mock.patch.object(torch.version, "cuda", cuda))
        stack.enter_context(
            mock.patch.object(_compat.triton_helpers, "set_driver_to_gpu", return_value=None)
        )
        stack.enter_context(mock.patch.object(driver, "_active", _fake_driver(arch)))
        stack.callback(_clear_device_caches)
        _clear_device_caches()
        yield


@contextlib.contextmanager
def _patterns_traced_on_cpu() -> Iterator[None]:
    """Let Inductor trace its own patterns on the CPU; on a CPU build "cuda" has no random ops."""
    original = _compat.joint_graph.lazy_init

    def lazy_init(input_device: Any = None) -> Any:
        return original(torch.device("cpu"))

    with mock.patch.object(_compat.joint_graph, "lazy_init", lazy_init):
        yield


@contextlib.contextmanager
def _shim() -> Iterator[None]:
    library = _load_shim()
    # Start autograd's threads while it sees no device: a thread for a fake one would stay, and
    # forbid autograd in forked children (data loaders) from then on.
    torch.ones((), requires_grad=True).sin().backward()
    library.fake_cuda_install()
    try:
        yield
    finally:
        library.fake_cuda_restore()


def _load_shim() -> ctypes.CDLL:
    """Compile (once a torch version) and load the C++ half of the fake device."""
    source = Path(__file__).with_name("_fake_cuda.cc")
    torch_dir = Path(torch.__file__).parent
    text = source.read_bytes() + torch.__version__.encode() + str(torch_dir).encode()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    library = Path(cache, "inductor_ext", f"fake_cuda-{hashlib.sha256(text).hexdigest()[:16]}.so")
    if not library.is_file():
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            raise FakeGpuError(
                "a training graph for a GPU that is not there needs a C++ compiler: install g++ "
                "(Debian: apt-get install g++) or name one in CXX; or capture under "
                "torch.no_grad(), which needs none"
            )
        _compile_shim(compiler, source, torch_dir, library)
    return ctypes.CDLL(str(library))


def _compile_shim(compiler: str, source: Path, torch_dir: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O1", f"-I{torch_dir}/include",
                   str(source), "-o", str(made), f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu",
                   f"-Wl,-rpath,{torch_dir}/lib"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise FakeGpuError(
                f"the fake device's shim does not compile with {compiler}; captures under "
                f"torch.no_grad() work without it:\n{done.stderr[-2000:]}"
            )
        made.replace(library)  # atomic: other processes may be doing the same


_FAKE_CONFIG = {
    "joint_graph_constant_folding": False,  # it would run aten.full on the device
    "use_static_cuda_launcher": False,  # it drops the assembly
}
"""Inductor settings that keep it from touching the device."""


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...] | Callable[[], tuple[Any, ...]],
    target: str | int = "sm_90",
    dynamic: bool | None = None,
    config: dict[str, Any] | None = None,
    asm: bool = False,
) -> list[GeneratedGraph]:
    """Return the code Inductor generates for ``fn(*args)`` on a GPU that is not there.

    Args:
        fn: a function or nn.Module; its CPU (or CUDA) tensors become fake ones of the same shape,
            strides and dtype, also those in its closure, its globals and its modules.
        args: the arguments, or a function that returns them and is called where
            ``torch.empty(..., device="cuda")`` makes fake tensors.
        target: "sm_80", "sm_89", "sm_90", "sm_100" or "sm_120".
        dynamic: as for torch.compile.
        config: Inductor settings, for instance ``{"eager_numerics.division_rounding": True}``.
        asm: compile the kernels too (Triton brings its own ptxas), for PTX and cubin.

    Returns:
        A :class:`GeneratedGraph` for each graph; a training graph gives forward and backward.

    Raises:
        FakeGpuError: see :func:`pretend`.
    """
    found: list[tuple[str, str]] = []

    def keep(graph: Any, source: str) -> None:
        found.append((graph_kind(graph), source))

    # The redirections are process-wide: no other thread may compile meanwhile.
    with _compat.compile_lock, fake_session(fn, args, {}, target, config) as (moved, values, _):
        with codegen_only(keep):
            torch.compile(fresh_runner(), dynamic=dynamic)(moved, values, {})
        if not found:
            raise FakeGpuError(
                "Dynamo compiled nothing of this function: it has no tensor operation, or was "
                "compiled for too many shapes before (torch.compiler.reset() clears those)"
            )
        return [
            GeneratedGraph(kind, source, kernels_in(source, asm), externs_in(source))
            for kind, source in sorted(found, key=lambda pair: pair[0] == "backward")
        ]


@contextlib.contextmanager
def fake_session(
    fn: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    target: str | int,
    config: dict[str, Any] | None = None,
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yield function and arguments moved to the fake device, inside all that this needs."""
    mode = _compat.FakeTensorMode(shape_env=_compat.ShapeEnv())
    with contextlib.ExitStack() as stack:
        training = torch.is_grad_enabled() and needs_grad((fn, args, kwargs))
        if callable(args):  # what it makes is only known inside
            training = torch.is_grad_enabled()
            with pretend(target), mode:
                made = args()
                args = made if isinstance(made, tuple) else (made,)
                training = training and needs_grad((fn, args, kwargs))
        stack.enter_context(pretend(target, training))
        stack.enter_context(isolated({**_FAKE_CONFIG, **(config or {})}))
        stack.enter_context(mode)
        mover = Mover(_compat.FakeTensor, keep_grad=training)
        moved = fresh_copy(mover.move(fn)), tuple(mover.move(list(args))), mover.move(kwargs)
        stack.enter_context(mover.globals_moved())
        yield moved


_TRITON = re.compile(r"^(\w+) = async_compile\.triton\('\1', '''(.*?)''', device_str", re.S | re.M)


def kernels_in(source: str, asm: bool = False) -> dict[str, KernelCode]:
    """Return the Triton kernels that a wrapper defines, compiled if ``asm``."""
    kernels = {}
    for name, text in _TRITON.findall(source):
        variants = _compile_triton(name, text) if asm else ()
        ptx = variants[0].get("ptx") if variants else None
        kernels[name] = KernelCode(name, text, ptx, variants)
    return kernels


def _compile_triton(name: str, source: str) -> tuple[dict[str, Any], ...]:
    kernel = getattr(_compat.PyCodeCache.load(source), name)
    kernel.precompile(warm_cache_only=True)
    return tuple(dict(result.kernel.asm) for result in kernel.compile_results)
