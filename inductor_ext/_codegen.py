"""Let Inductor generate code without compiling it, and without a trace in Dynamo's caches."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from . import _compat

__all__ = ["codegen_only", "externs_in", "fresh_copy", "fresh_runner", "graph_kind", "isolated",
           "unwrap"]  # fmt: skip

_counter = itertools.count()
_EXTERN = re.compile(r"^\s+(?:[\w, ()]+ = )?(torch\.ops\.[\w.]+|extern_kernels\.\w+)\(", re.M)


def fresh_runner() -> Callable[..., Any]:
    """Return a new ``run(fn, args, kwargs)`` to compile.

    Dynamo keeps compiled code on code objects and remembers sizes by file, line and name.  A new
    code object, as if from a new file, starts with neither and leaves nothing behind on the
    user's function (except where a graph break makes Dynamo compile that one on its own).
    """
    name = f"inductor_ext_run_{next(_counter)}"  # code objects that differ only in file are equal
    text = f"def {name}(fn, args, kwargs):\n    return fn(*args, **kwargs)\n"
    space: dict[str, Any] = {}
    exec(compile(text, f"{name}.py", "exec"), space)
    run: Callable[..., Any] = space[name]
    # Dynamo treats a function without a source file as foreign and shares one frame among them.
    linecache.cache[f"{name}.py"] = (len(text), None, text.splitlines(True), f"{name}.py")
    weakref.finalize(run, linecache.cache.pop, f"{name}.py", None)
    return run


def fresh_copy(fn: Any) -> Any:
    """Return the function (or method) with a code object of its own, so without compiled code."""
    if isinstance(fn, types.MethodType):
        return types.MethodType(fresh_copy(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    code = fn.__code__.replace()
    made = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__module__, made.__qualname__ = fn.__module__, fn.__qualname__
    return made


def unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the plain function or module behind ``torch.compile(fn)``."""
    name = "_orig_mod" if isinstance(fn, torch.nn.Module) else "_torchdynamo_orig_callable"
    original: Callable[..., Any] | None = getattr(fn, name, None)
    return original or fn


@contextlib.contextmanager
def isolated(config: dict[str, Any] | None = None) -> Iterator[None]:
    """Compile afresh and in this process, and leave Dynamo's books as they were.

    Caches on disk and in memory are bypassed; counters and the memory of sizes seen ("automatic
    dynamic") are put back.  ``config`` holds further Inductor settings.
    """
    counters = _compat.counters
    before = {name: counter.copy() for name, counter in counters.items()}
    settings = {"force_disable_caches": True, "compile_threads": 1, **(config or {})}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*(force disabled|data pointer of FakeTensor)")
        stack.enter_context(_compat.inductor_config.patch(settings))
        # a backward is generated with its forward, not when it first runs
        stack.enter_context(_compat.functorch_config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(mock.patch.object(_compat.pgo, "_CODE_STATE", None))
        try:
            yield
        finally:
            counters.clear()
            counters.update(before)


@contextlib.contextmanager
def codegen_only(on_graph: Callable[[Any, str], None]) -> Iterator[None]:
    """Let Inductor generate code and hand it over instead of compiling it.

    ``on_graph(graph, source)`` gets each ``GraphLowering`` after code generation.  The compiled
    function then runs the graph op by op, so callers go on as they would have.
    """

    def compile_to_module(self: Any) -> types.ModuleType:
        code = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        on_graph(self, str(getattr(code[0], "value", code[0])))
        module = types.ModuleType("inductor_ext_generated")
        module.__file__ = "<generated, not compiled>"
        graph_module = self.orig_gm

        def call(args: Any) -> Any:
            values = list(args)
            if hasattr(args, "clear"):
                args.clear()  # the caller gives its references away, as to compiled code
            result = torch.fx.Interpreter(graph_module).run(*values)
            return result if isinstance(result, (tuple, list)) else (result,)

        module.call = call  # type: ignore[attr-defined]
        return module

    with mock.patch.object(_compat.GraphLowering, "compile_to_module", compile_to_module):
        yield


def graph_kind(graph: Any) -> str:
    """Return "inference", "forward" or "backward" for a GraphLowering."""
    if graph.is_backward:
        return "backward"
    return "inference" if graph.is_inference else "forward"


def externs_in(source: str) -> tuple[str, ...]:
    """Return the calls of ready-made kernels in a wrapper, in order, without its comments."""
    return tuple(_EXTERN.findall(source))
