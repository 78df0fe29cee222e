"""Count what one compile made: graphs, breaks, guards, generated kernels and our opaque calls."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from inductor_ext import _compat

# In the generated wrapper: a kernel's definition, a launch of it, and an opaque call of ours.
_DEFINITION = re.compile(
    r"^(\w+) = async_compile\.(?:cpp_pybinding|cpp|triton)\(.*?r?'''(.*?)'''", re.M | re.S
)
_LAUNCH = re.compile(r"^\s+((?:cpp|triton)_\w+?)(?:\.run)?\(", re.M)
_OURS = re.compile(r"^\s+(?:\w+ = )?(?:torch\.ops\.)?inductor_ext\.(\w+)\.\w+\(", re.M)


@dataclasses.dataclass
class Counts:
    """What Dynamo and Inductor made of one call of a compiled function.

    ``calls`` are our ops that run as opaque kernels: inside the graphs, and, where a graph break
    keeps them out, in eager mode (``eager_calls``).
    """

    graphs: int = 0
    breaks: int = 0
    guards: int = 0
    sources: list[str] = dataclasses.field(default_factory=list)
    eager_calls: int = 0

    @property
    def generated(self) -> int:
        """Launches of kernels that Inductor generated."""
        return sum(len(_LAUNCH.findall(source)) for source in self.sources)

    @property
    def calls(self) -> Counter[str]:
        """Opaque calls of ours in the graphs, by op."""
        return Counter(op for source in self.sources for op in _OURS.findall(source))

    @property
    def ours(self) -> int:
        """Opaque calls of ours, inside and outside of the graphs."""
        return self.calls.total() + self.eager_calls

    @property
    def kernels(self) -> int:
        """Generated kernels and opaque calls of ours together."""
        return self.generated + self.ours


class GuardCounter:
    """A ``guard_filter_fn`` for ``torch.compile`` that keeps every guard and counts them."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, guards: Sequence[Any]) -> list[bool]:
        self.total += len(guards)
        return [True] * len(guards)


def compile_counted(fn: Callable[..., Any]) -> tuple[Callable[..., Any], GuardCounter]:
    """Compile ``fn`` for static shapes; the second value counts the guards of all its graphs."""
    guards = GuardCounter()
    return torch.compile(fn, dynamic=False, options={"guard_filter_fn": guards}), guards


@contextlib.contextmanager
def counting(guards: GuardCounter) -> Iterator[Counts]:
    """Fill the yielded ``Counts`` with what is compiled inside the ``with`` block."""
    counts, counters = Counts(), _compat.counters
    # Read, not cleared: the counters belong to the process.
    before = (*_snapshot(counters), guards.total)
    with mock.patch.object(_compat.GraphLowering, "save_output_code", counts.sources.append):
        yield counts
    after = (*_snapshot(counters), guards.total)
    counts.graphs, counts.breaks, counts.guards = (
        a - b for a, b in zip(after, before, strict=True)
    )


def kernel_sources(source: str) -> dict[str, str]:
    """Return the generated kernels of a wrapper's source, name to body."""
    return dict(_DEFINITION.findall(source))


def call_lines(source: str) -> list[str]:
    """Return the lines of a wrapper that launch a kernel or call an op of ours, in order."""
    lines = (line.strip() for line in source.splitlines())
    return [ln for ln in lines if _LAUNCH.match(" " + ln) or _OURS.match(" " + ln)]


def _snapshot(counters: Any) -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
