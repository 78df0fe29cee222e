"""Many calls, one compilation: run calls of ops eagerly, and compiled as one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import blocks
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _pairs, registry


def check_eager(call: blocks.Call, device: str) -> None:
    args = call.on(device)
    call.check(blocks.reference_of(call.op)(*args), f"reference, {device}")
    call.check(blocks.op_of(call.op)(*args), f"eager, {device}")


@contextlib.contextmanager
def plugin() -> Iterator[None]:
    """The plugin on, nothing compiled yet, and no cache: every compilation leaves its records.

    Pairs of orientations stay apart, so that each op's own lowering runs (test_pairs.py joins).
    """
    torch.compiler.reset()
    with (
        mock.patch.object(_pairs, "join", return_value=0),
        ixt.config.patch(enabled=True),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        registry.clear_records()
        yield


def compiled(calls: Sequence[blocks.Call], *, dynamic: bool = False) -> Callable[..., Any]:
    """Compile the ops of several calls that share their tensors, as one graph."""
    plan = [(blocks.op_of(c.op), [(a, isinstance(a, Tensor)) for a in c.args]) for c in calls]

    def run(*tensors: Tensor) -> Any:
        results: list[Tensor] = []
        for function, arguments in plan:
            given = iter(tensors)
            result = function(*(next(given) if tensor else a for a, tensor in arguments))
            results.extend(result if isinstance(result, tuple) else (result,))
        return results

    return torch.compile(run, fullgraph=True, dynamic=dynamic)


def check_compiled(
    run: Callable[..., Any], calls: Sequence[blocks.Call], device: str, *, any_rows: bool = False
) -> None:
    """Compare a compiled graph with the oracle, call by call.

    Args:
        any_rows: let a compilation leave the size of dimension 0 open.
    """
    tensors = max(([a for a in c.on(device) if isinstance(a, Tensor)] for c in calls), key=len)
    if any_rows:
        torch._dynamo.mark_dynamic(tensors[0], 0)
    got = list(run(*tensors))
    for call in calls:
        call.check(tuple(got[: len(call.want)]), f"compiled, {device}")
        del got[: len(call.want)]
    assert not got


def check_apart(calls: Sequence[blocks.Call], device: str) -> None:
    """Compile calls that have tensors of their own as one graph, and compare."""
    arguments = [call.on(device) for call in calls]
    plan = [(blocks.op_of(c.op), [(a, isinstance(a, Tensor)) for a in c.args]) for c in calls]

    def run(tensors: list[list[Tensor]]) -> list[Any]:
        results = []
        for (function, constants), given in zip(plan, tensors, strict=True):
            left = iter(given)
            results.append(function(*(next(left) if tensor else a for a, tensor in constants)))
        return results

    tensors = [[a for a in given if isinstance(a, Tensor)] for given in arguments]
    got = torch.compile(run, fullgraph=True, dynamic=False)(tensors)
    for call, result in zip(calls, got, strict=True):
        call.check(result, f"compiled, {device}")


def require_lowered(count: int) -> None:
    """Every op was lowered, once: other values and sizes compiled nothing again."""
    found = registry.records()
    assert {r.outcome for r in found} == {"lowered"}, found
    assert len(found) == count, f"{len(found)} records, {count} ops"
