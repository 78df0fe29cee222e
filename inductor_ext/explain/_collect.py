"""Watch Inductor generate code: which FX nodes went into which kernel, and how many bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from inductor_ext import _compat
from inductor_ext._codegen import codegen_only, graph_kind
from inductor_ext.fake_gpu import kernels_in
from inductor_ext.registry import Record, clear_records, contracts, op_name, records

from ._report import Graph, Kernel, KernelKind, OpOutcome

_CPP = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''(.*?)'''\)", re.S | re.M)


@dataclass
class _Launch:
    name: str
    extern: bool
    nodes: tuple[torch.fx.Node, ...]
    bytes_moved: int


@dataclass
class Collector:
    """Gathers graphs and op outcomes while :meth:`watch` is active."""

    off_reason: Callable[[str], str]
    graphs: list[Graph] = field(default_factory=list)
    ops: list[OpOutcome] = field(default_factory=list)
    _launches: list[_Launch] = field(default_factory=list)
    _decomposed: list[Record] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Patch Inductor so that each generated graph is handed to this collector."""
        original = _compat.inductor_debug.set_kernel_post_grad_provenance_tracing

        def spy(node_schedule: Any, kernel_name: str, *args: Any, **kwargs: Any) -> Any:
            extern = kwargs.get("is_extern", args[0] if args else False)
            self._launches.append(_launch(node_schedule, kernel_name, bool(extern)))
            return original(node_schedule, kernel_name, *args, **kwargs)

        with contextlib.ExitStack() as stack:
            for module in (_compat.inductor_debug, _compat.codegen_cpp, _compat.codegen_triton):
                stack.enter_context(
                    mock.patch.object(module, "set_kernel_post_grad_provenance_tracing", spy)
                )
            stack.enter_context(codegen_only(self._on_graph))
            yield

    def _on_graph(self, graph: Any, source: str) -> None:
        index = len(self.graphs)
        launches, self._launches = self._launches, []
        new = records()
        clear_records()
        self._decomposed += [r for r in new if r.outcome == "decomposed"]
        waiting = [r for r in new if r.outcome != "decomposed"]
        known = contracts()
        opaque: set[torch.fx.Node] = set()
        for node in graph.module.graph.nodes:
            if node.target not in known:
                continue
            name = op_name(node.target)
            record = next((r for r in waiting if r.op == name), None)
            if record is None:
                record = Record(name, "opaque", self.off_reason(name))
            else:
                waiting.remove(record)
            if record.outcome != "lowered":
                opaque.add(node)
            inside = [la for la in launches if node in la.nodes and la.extern == (node in opaque)]
            names = tuple(dict.fromkeys(la.name for la in inside))
            self.ops.append(OpOutcome(name, record.outcome, record.reason, names, index))
        kernels = _kernels(launches, source, index, opaque)
        floor = _floor_bytes(graph.module.graph)
        self.graphs.append(Graph(index, graph_kind(graph), kernels, floor, source))

    def outcomes(self) -> tuple[OpOutcome, ...]:
        """Return all outcomes, those of decompositions included."""
        done = []
        for name in dict.fromkeys(record.op for record in self._decomposed):
            for graph in self.graphs:
                kernels = tuple(k.name for k in graph.kernels if name in k.ops)
                if kernels:
                    done.append(OpOutcome(name, "decomposed", "", kernels, graph.index))
        return tuple(self.ops + done)


def _launch(node_schedule: Any, name: str, extern: bool) -> _Launch:
    """Read the FX nodes and bytes of a launch off what the scheduler is generating code for."""
    scheduler = _compat.V.graph.scheduler
    if extern:
        origins = list(node_schedule.origins)
        # a copy of its input also counts among the origins of a call; keep to what is called
        called = [node for node in origins if name.endswith(f".{node.target}")]
        exact = node_schedule.origin_node
        origins = called or (origins if exact is None else [exact])
        names = [node_schedule.get_operation_name()]
    else:
        # the schedule also holds markers (EnableReduction, ...) that are no nodes
        nodes = [n for n in node_schedule if getattr(n, "node", None) is not None]
        origins = [origin for n in nodes for origin in n.node.origins]
        names = [n.get_name() for n in nodes]
    fused = {id(f): f for f in map(scheduler.name_to_fused_node.get, names) if f is not None}
    moved = sum(f.get_read_write_buffers_sizes() for f in fused.values())
    return _Launch(name, extern, tuple(dict.fromkeys(origins)), int(moved))


def _kernels(
    launches: list[_Launch], source: str, graph: int, opaque: set[torch.fx.Node]
) -> tuple[Kernel, ...]:
    """Merge the launches of each kernel.

    Inductor counts an opaque op among the origins of the kernel that lays out its input; it is
    not computed there, so it is left out.
    """
    triton = {name: kernel.source for name, kernel in kernels_in(source).items()}
    cpp = dict(_CPP.findall(source))
    made: dict[str, Kernel] = {}
    for launch in launches:
        kind: KernelKind = "cpp" if launch.name in cpp else "triton"
        kind = "extern" if launch.extern else kind
        before = made.get(launch.name)
        ops = dict.fromkeys(before.ops if before else ())
        nodes = [node for node in launch.nodes if launch.extern or node not in opaque]
        ops.update(dict.fromkeys(_original_op(node) for node in sorted(nodes)))
        made[launch.name] = Kernel(
            name=launch.name,
            kind=kind,
            graph=graph,
            ops=tuple(op for op in ops if op),
            bytes_moved=launch.bytes_moved + (before.bytes_moved if before else 0),
            launches=1 + (before.launches if before else 0),
            source=triton.get(launch.name) or cpp.get(launch.name, ""),
        )
    return tuple(made.values())


def _original_op(node: torch.fx.Node) -> str:
    """Return the op that the user's code called, "aten::gelu", not what it decomposed into."""
    if node.op != "call_function":
        return ""
    op = node.meta.get("original_aten") or node.target
    if isinstance(op, torch._ops.OpOverload):
        return op_name(op).partition(".")[0]
    return str(getattr(op, "__name__", op))


def _floor_bytes(graph: torch.fx.Graph) -> int:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    outputs: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "output":
            outputs.update(dict.fromkeys(node.all_input_nodes))
    wanted = dict.fromkeys([node for node in inputs if node.users])
    return sum(map(_bytes_of, {**wanted, **outputs}))


def _bytes_of(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    elements: int = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if not _is_zero(stride):  # an expanded dimension is one element in memory
            elements *= _hint(size)
    return elements * int(value.element_size())


def _is_zero(stride: Any) -> bool:
    return isinstance(stride, int) and stride == 0


def _hint(size: Any) -> int:
    """Return the size, or the one it was traced with; 0 where only the data will tell."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 0 if hint is None else int(hint)
