"""Explanation as tables."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ._report import Explanation, Graph

_STYLE = {"lowered": "green", "decomposed": "green", "declined": "yellow", "failed": "red"}


def to_console(explanation: Explanation) -> None:
    """Print to the terminal."""
    Console().print(render(explanation))


def to_text(explanation: Explanation, width: int = 100) -> str:
    """Return the same without colour."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(
        render(explanation)
    )
    return out.getvalue().rstrip()


def human(count: int) -> str:
    """Return a byte count in B, KiB, MiB or GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def render(explanation: Explanation) -> Group:
    """Return the whole report."""
    e = explanation
    parts: list[Any] = [_summary(e)]
    if e.graphs:
        parts.append(_kernels(e.graphs))
    if e.ops:
        parts.append(_ops(e))
    for title, lines in (
        ("Graph breaks", [f"{b.where or 'before an op'}: {b.reason}" for b in e.graph_breaks]),
        ("Recompiles", list(e.recompiles)),
        ("Notes", list(e.notes)),
    ):  # fmt: skip
        if lines:
            parts += [Text(title, style="bold"), *(Text(f"  {line}") for line in lines)]
    return Group(*parts)


def _summary(e: Explanation) -> Table:
    table = Table(title=f"torch.compile for {e.target}", show_header=False, title_justify="left")
    launches = sum(k.launches for k in e.kernels)
    calls = sum(k.launches for k in e.externs)
    table.add_row("plugin", escape(e.plugin))
    table.add_row("graphs", f"{len(e.graphs)} ({', '.join(g.kind for g in e.graphs)})")
    table.add_row("graph breaks", str(len(e.graph_breaks)))
    table.add_row("guards", str(len(e.guards)))
    table.add_row("recompiles", str(len(e.recompiles)))
    table.add_row("generated kernels", f"{len(e.kernels)} (launches: {launches})")
    table.add_row("extern calls", str(calls))
    if e.floor_bytes:
        ratio = f"{human(e.bytes_moved)}, {e.ratio:.2f} x the floor of {human(e.floor_bytes)}"
        table.add_row("bytes moved", ratio)
    return table


def _kernels(graphs: tuple[Graph, ...]) -> Table:
    table = Table(title="Kernels", title_justify="left")
    for name in ("graph", "kernel", "kind", "ops", "bytes moved"):
        right = name == "bytes moved"
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for graph in graphs:
        for kernel in graph.kernels:
            times = f" x{kernel.launches}" if kernel.launches > 1 else ""
            table.add_row(
                f"{graph.index} {graph.kind}", escape(kernel.name) + times, kernel.kind,
                escape(", ".join(op.removeprefix("aten::") for op in kernel.ops)),
                human(kernel.bytes_moved),
            )  # fmt: skip
    return table


def _ops(e: Explanation) -> Table:
    table = Table(title="Registered ops", title_justify="left")
    for name in ("graph", "op", "outcome", "where or why"):
        table.add_column(name, overflow="fold")
    for op in e.ops:
        style = _STYLE.get(op.outcome, "cyan")
        into = ", ".join(op.kernels)
        told = f"in {into}" if op.outcome in ("lowered", "decomposed") else op.reason
        table.add_row(str(op.graph), op.op, f"[{style}]{op.outcome}[/]", escape(told))
    return table
