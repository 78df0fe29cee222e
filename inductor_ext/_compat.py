"""The only file that names private PyTorch symbols.

Each symbol the plugin needs is one row of :data:`SYMBOLS`; ``_compat.<name>`` imports it on first
use, so that ``import inductor_ext`` loads nothing of Inductor.  :func:`missing` probes them all;
``python -m inductor_ext doctor`` and a test print the ones a new PyTorch has moved.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .errors import CompatError

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""PyTorch releases (major.minor) on which the whole test-suite or the contract tests pass."""

SYMBOLS: dict[str, str] = {
    # Lowering tables and what make_fallback() leaves behind in them.
    "lowerings": "torch._inductor.lowering:lowerings",
    "fallbacks": "torch._inductor.lowering:fallbacks",
    "needs_realized_inputs": "torch._inductor.lowering:needs_realized_inputs",
    "layout_constraints": "torch._inductor.lowering:_maybe_layout_constraints",
    "register_lowering": "torch._inductor.lowering:register_lowering",
    "fallback_handler": "torch._inductor.lowering:fallback_handler",
    "constrain_to_fake_tensors": "torch._inductor.lowering:constrain_to_fake_tensors",
    # Inductor's IR.
    "ir": "torch._inductor.ir",
    "ops": "torch._inductor.virtualized:ops",
    "V": "torch._inductor.virtualized:V",
    "FloorDiv": "torch.utils._sympy.functions:FloorDiv",
    "ModularIndexing": "torch.utils._sympy.functions:ModularIndexing",
    # Decomposition table; its copy is cached and must be dropped after a change.
    "decompositions": "torch._inductor.decomposition:decompositions",
    "fast_random_decomps": "torch._inductor.decomposition:fast_random_decomps",
    # Cache key: every custom_backend_passes entry's uuid() is hashed, on all tested versions.
    "custom_backend_passes": "torch._inductor.codegen.common:custom_backend_passes",
    "CustomGraphModulePass": "torch._inductor.custom_graph_pass:CustomGraphModulePass",
    "TracingContext": "torch._guards:TracingContext",
    "BypassAOTAutogradCache": (
        "torch._functorch._aot_autograd.autograd_cache:BypassAOTAutogradCache"
    ),
    # Partitioner and scheduler choices.
    "partitioners": "torch._functorch.partitioners",
    # Templates.
    "TritonTemplate": "torch._inductor.select_algorithm:TritonTemplate",
    "autotune_select_algorithm": "torch._inductor.select_algorithm:autotune_select_algorithm",
    "extract_read_writes": "torch._inductor.dependencies:extract_read_writes",
    "MemoryDep": "torch._inductor.dependencies:MemoryDep",
    "WrapperHandler": "torch._inductor.ops_handler:WrapperHandler",
    "SimplifyIndexing": "torch._inductor.sizevars:SimplifyIndexing",
    "InductorChoices": "torch._inductor.choices:InductorChoices",
    "ReductionHint": "torch._inductor.runtime.hints:ReductionHint",
    "Grid2DWithYZOverflow": "torch._inductor.runtime.triton_heuristics:Grid2DWithYZOverflow",
    # Dynamo.
    "compile_lock": "torch._dynamo.convert_frame:compile_lock",
    "counters": "torch._dynamo.utils:counters",
    "run_and_get_code": "torch._inductor.utils:run_and_get_code",
    "dynamo_config": "torch._dynamo.config",
    "inductor_config": "torch._inductor.config",
    "functorch_config": "torch._functorch.config",
    # Code generation without compiling (explain, fake_gpu).
    "GraphLowering": "torch._inductor.graph:GraphLowering",
    "PyCodeCache": "torch._inductor.codecache:PyCodeCache",
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "compile_fx_module": "torch._inductor.compile_fx",
    "joint_graph": "torch._inductor.fx_passes.joint_graph",
    "inductor_debug": "torch._inductor.debug",
    "codegen_cpp": "torch._inductor.codegen.cpp",
    "codegen_triton": "torch._inductor.codegen.triton",
    "pgo": "torch._dynamo.pgo",
    "dynamo_optimize": "torch._dynamo.eval_frame:optimize",
    # What stands between Inductor and a GPU (fake_gpu).
    "device_interface": "torch._dynamo.device_interface",
    "DeviceProperties": "torch._inductor.runtime.hints:DeviceProperties",
    "triton_helpers": "torch._inductor.runtime.triton_helpers",
    "triton_utils": "torch.utils._triton",
    "inductor_utils": "torch._inductor.utils",
    "cuda_env": "torch._inductor.codegen.cuda.cuda_env",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    # Whether an eager call may leave the dispatcher out (_call.py).
    "dispatch_modes": "torch._C:_len_torch_dispatch_stack",
    "function_modes": "torch._C:_len_torch_function_stack",
    "transform": "torch._C:_functorch.peek_interpreter_stack",
    "profiler_runs": "torch._C:_autograd._profiler_enabled",
    "jit_trace": "torch._C:_get_tracing_state",
    # The parity harness (inductor_ext.testing).
    "dispatch_has_kernel": "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "fx_config": "torch.fx.experimental._config",
}


def resolve(target: str) -> Any:
    """Import ``"module"`` or ``"module:attribute"`` and return it."""
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value


def __getattr__(name: str) -> Any:
    target = SYMBOLS.get(name)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = resolve(target)
    except (ImportError, AttributeError) as error:
        raise CompatError(
            f"{target} ({name}) is not in torch {torch.__version__}; inductor_ext is tested with "
            f"torch {', '.join(TESTED)}"
        ) from error
    globals()[name] = value
    return value


def missing() -> dict[str, str]:
    """Return the rows of :data:`SYMBOLS` that this PyTorch does not have, name to target."""
    absent = {}
    for name, target in SYMBOLS.items():
        try:
            resolve(target)
        except (ImportError, AttributeError):
            absent[name] = target
    return absent


def torch_release() -> str:
    """Return "major.minor" of the running PyTorch."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


def is_tested() -> bool:
    """Return whether this PyTorch is tested, or INDUCTOR_EXT_ALLOW_UNTESTED=1 says to try."""
    return torch_release() in TESTED or os.environ.get("INDUCTOR_EXT_ALLOW_UNTESTED") == "1"


@contextlib.contextmanager
def no_compile_running() -> Iterator[None]:
    """Hold Dynamo's compile lock, if Dynamo is loaded, so that no compile is halfway through."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        yield
        return
    with __getattr__("compile_lock"):
        yield


def clear_decomposition_cache() -> None:
    """Drop Inductor's cached copy of the decomposition table (a late entry would be ignored)."""
    clear = getattr(__getattr__("fast_random_decomps"), "cache_clear", None)
    if clear is not None:
        clear()
