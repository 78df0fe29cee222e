"""Tell what torch.compile makes of a function: graphs, breaks, kernels, ops, bytes.

    explanation = ixt.explain(fn, x, w)                    # prints, and returns the same as data
    explanation = ixt.explain(fn, x, w, target="sm_90")    # for a GPU that is not there

This package is itself callable, so that ``inductor_ext.explain(fn, ...)`` works whether or not
``inductor_ext.explain`` was imported as a module.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext import _compat, _state, config
from inductor_ext._codegen import fresh_copy, fresh_runner, isolated, unwrap
from inductor_ext.fake_gpu import fake_session, parse_target
from inductor_ext.registry import add_record, clear_records, records

from ._report import Explanation, Graph, GraphBreak, Kernel, OpOutcome

__all__ = ["Explanation", "Graph", "GraphBreak", "Kernel", "OpOutcome", "explain"]

# Guards on the containers in which `fresh_runner` hands over the arguments.
_OF_RUNNER = re.compile(r"L\['(args|kwargs|fn)'\](?![\[.])")
_HOW = "inductor_ext.enable() or INDUCTOR_EXT_ENABLED=1"


def explain(
    fn: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    dynamic: bool | None = None,
    print: bool = True,
    **kwargs: Any,
) -> Explanation:
    """Compile ``fn(*args, **kwargs)`` and tell what became of it.

    Dynamo and Inductor run afresh, caches bypassed, up to and including code generation; kernels
    are not compiled, and the graphs run op by op, so that this takes seconds.  A training graph
    gives its backward too.  Afterwards Dynamo and Inductor are as before; only functions that
    are compiled on their own, because of a graph break in them, have one more cache entry.

    Args:
        fn: a function or nn.Module, compiled by torch.compile already or not.
        args, kwargs: its arguments.
        target: None for the device that the arguments are on, or "sm_80", "sm_90", "sm_100",
            "sm_120" for a GPU that is not there (see :mod:`inductor_ext.fake_gpu`).
        dynamic: as for torch.compile.
        print: print the result with rich.

    Returns:
        An :class:`Explanation`; ``to_dict()`` gives JSON-able data.

    Raises:
        FakeGpuError: an unknown target, or one that needs something that is missing.
    """
    from ._collect import Collector

    collector = Collector(_why_off)
    watcher = _Dynamo()
    where = f"sm_{parse_target(target)} (not there)" if target else _device_of((fn, args, kwargs))
    # Code generation is redirected process-wide meanwhile: no other thread may compile.
    with _compat.compile_lock, _own_records(), _not_strict(), contextlib.ExitStack() as stack:
        if target is None:
            stack.enter_context(isolated(_options_of(fn)))
            moved: Any = (fresh_copy(unwrap(fn)), args, kwargs)
        else:
            moved = stack.enter_context(fake_session(fn, args, kwargs, target))
        stack.enter_context(collector.watch())
        watcher.run(moved, dynamic)
        ops = collector.outcomes()
    result = Explanation(
        target=where,
        plugin=_plugin(),
        graphs=tuple(collector.graphs),
        graph_breaks=tuple(watcher.breaks),
        guards=tuple(dict.fromkeys(watcher.guards)),
        recompiles=tuple(watcher.recompiles),
        ops=ops,
        notes=tuple(_notes(collector.graphs, ops)),
    )
    if print:
        from ._print import to_console

        to_console(result)
    return result


class _Dynamo:
    """Compiles with Inductor as the backend and notes breaks, guards and recompiles."""

    def __init__(self) -> None:
        self.breaks: list[GraphBreak] = []
        self.guards: list[str] = []
        self.recompiles: list[str] = []

    def run(self, call: tuple[Any, Any, Any], dynamic: bool | None) -> None:
        """Run ``fn(*args, **kwargs)`` once, compiled."""
        counters = _compat.counters["graph_break"]
        counters.clear()  # `isolated` puts the old ones back
        optimize = _compat.dynamo_optimize(
            self._backend,
            guard_export_fn=self._on_guards,
            guard_fail_fn=lambda failure: self.recompiles.append(str(failure.reason)),
            dynamic=dynamic,
        )
        optimize(fresh_runner())(*call)
        seen = {brk.reason for brk in self.breaks}
        for reason in map(_first_lines, list(_compat.counters["graph_break"])):
            if reason not in seen:  # a break with no op before it reaches no backend
                self.breaks.append(GraphBreak(reason, ""))

    def _backend(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        why = getattr(gm, "compile_subgraph_reason", None)
        if why is not None and why.graph_break:
            frames = [f for f in why.user_stack or () if "inductor_ext_run_" not in f.filename]
            where = [f"{f.filename}:{f.lineno} in {f.name}" for f in frames[-1:]]
            self.breaks.append(GraphBreak(_first_lines(str(why.reason)), "".join(where)))
        return _compat.compile_fx(gm, inputs)

    def _on_guards(self, guards: Any) -> None:
        for guard in guards:
            codes = (str(code) for code in guard.code_list or ())
            self.guards += [code for code in codes if not _OF_RUNNER.search(code)]


def _first_lines(reason: str) -> str:
    """Return what Dynamo says of a break up to its hints and links."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    kept = []
    for line in lines:
        if line.startswith(("Hint:", "Developer debug context", "For more details")):
            break
        if line:
            kept.append(line)
    return " ".join(kept)


def _device_of(value: Any) -> str:
    from inductor_ext._fakes import reachable

    kinds = sorted({tensor.device.type for tensor in reachable(value)})
    if kinds == ["cuda"]:
        major, minor = torch.cuda.get_device_capability()
        return f"cuda (sm_{major}{minor})"
    return " and ".join(kinds) or "cpu"


def _options_of(fn: Any) -> dict[str, Any]:
    """Return the Inductor settings that ``torch.compile(fn, mode=..., options=...)`` was given."""
    get = getattr(fn, "get_compiler_config", None)
    try:
        wanted = get() if get is not None else None
    except Exception:  # another backend's compiler
        return {}
    if not isinstance(wanted, dict):
        return {}
    now = _compat.inductor_config.shallow_copy_dict()
    return {name: value for name, value in wanted.items() if name in now and now[name] != value}


@contextlib.contextmanager
def _own_records() -> Iterator[None]:
    """Start with no records, and end with the user's and ours."""
    before = records()
    clear_records()
    try:
        yield
    finally:
        clear_records()
        for record in before:
            add_record(record)


@contextlib.contextmanager
def _not_strict() -> Iterator[None]:
    """Report a decline rather than raise it."""
    if not config.strict:
        yield
        return
    with config.patch(strict=False):
        yield


def _plugin() -> str:
    if _state.mode != "off":
        return f"on, numerics={config.numerics!r}"
    if config.enabled:
        return f"off: torch {torch.__version__} is not tested (INDUCTOR_EXT_ALLOW_UNTESTED=1)"
    return f"off: enable it with {_HOW}"


def _why_off(op: str) -> str:
    if _state.mode == "off":
        return "the plugin is off"
    if op in config.disabled_ops:
        return "in config.disabled_ops"
    return ""


def _notes(graphs: list[Graph], ops: tuple[OpOutcome, ...]) -> Iterator[str]:
    if not graphs:
        yield (
            "Dynamo compiled nothing: the function has no tensor operation, or was compiled for "
            "too many shapes before (torch.compiler.reset() clears those)"
        )
    if _state.mode == "off" and ops:
        yield f"the registered ops stay opaque because the plugin is {_plugin()}"


class _CallableModule(types.ModuleType):
    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
        return explain(fn, *args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
