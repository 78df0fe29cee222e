"""What :func:`inductor_ext.explain` returns: plain data, printable and JSON-able."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

KernelKind = Literal["triton", "cpp", "extern"]


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo could not go on: the reason, and "file:line in function"."""

    reason: str
    where: str


@dataclass(frozen=True)
class Kernel:
    """One kernel of a graph: generated ("triton", "cpp") or ready-made ("extern").

    ``ops`` names the original ops it computes, for instance "aten::gelu"; ``bytes_moved`` is what
    its launches read and write, as Inductor's scheduler counts it.
    """

    name: str
    kind: KernelKind
    graph: int
    ops: tuple[str, ...]
    bytes_moved: int
    launches: int
    source: str = dataclasses.field(default="", repr=False)


@dataclass(frozen=True)
class Graph:
    """One compiled graph ("inference", "forward" or "backward").

    ``floor_bytes`` reads each input once and writes each output once.
    """

    index: int
    kind: str
    kernels: tuple[Kernel, ...]
    floor_bytes: int
    source: str = dataclasses.field(default="", repr=False)

    @property
    def bytes_moved(self) -> int:
        """What all kernels of the graph read and write."""
        return sum(kernel.bytes_moved for kernel in self.kernels)


@dataclass(frozen=True)
class OpOutcome:
    """What became of one call of a registered op.

    ``outcome`` is "lowered", "decomposed", "declined", "failed", "opaque" or "kernel" (nothing to
    fuse with); ``kernels`` names the kernels that compute it (its own, where it stayed opaque).
    """

    op: str
    outcome: str
    reason: str
    kernels: tuple[str, ...]
    graph: int


@dataclass(frozen=True)
class Explanation:
    """What torch.compile makes of a function; see :func:`inductor_ext.explain`."""

    target: str
    plugin: str
    graphs: tuple[Graph, ...]
    graph_breaks: tuple[GraphBreak, ...]
    guards: tuple[str, ...]
    recompiles: tuple[str, ...]
    ops: tuple[OpOutcome, ...]
    notes: tuple[str, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The generated kernels of all graphs."""
        return tuple(k for graph in self.graphs for k in graph.kernels if k.kind != "extern")

    @property
    def externs(self) -> tuple[Kernel, ...]:
        """The calls of ready-made kernels in all graphs: GEMMs, opaque ops."""
        return tuple(k for graph in self.graphs for k in graph.kernels if k.kind == "extern")

    @property
    def bytes_moved(self) -> int:
        """What all kernels read and write."""
        return sum(graph.bytes_moved for graph in self.graphs)

    @property
    def floor_bytes(self) -> int:
        """Each graph's inputs read once and outputs written once."""
        return sum(graph.floor_bytes for graph in self.graphs)

    @property
    def ratio(self) -> float:
        """``bytes_moved / floor_bytes``: 1.0 is perfect fusion; nan without tensors."""
        return self.bytes_moved / self.floor_bytes if self.floor_bytes else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able data, the totals included."""
        data = dataclasses.asdict(self)
        return {
            **data,
            "bytes_moved": self.bytes_moved,
            "floor_bytes": self.floor_bytes,
            "ratio": self.ratio if self.floor_bytes else None,
        }

    def __str__(self) -> str:
        from ._print import to_text

        return to_text(self)
