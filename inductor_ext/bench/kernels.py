"""Every eager kernel, and the same op compiled alone, against a copy of the same run.

The floor counts each byte of the inputs and of the results once, scales included (``x`` twice
where its amax is needed before any code).  Shares are of the floor at the speed of a large copy,
and of a copy of as many elements.  Compiled alone, an op becomes what the plugin chooses where
there is nothing to fuse with, usually a call of its kernel; and is forced to be lowered
(``config.always_lower``).

With ``--rotate`` ops that have a goal, and the copy, also run over several tensors in turn
(:func:`inductor_ext.bench.timing.rotating_time`): the flush of ``do_bench`` leaves megabytes of
dirty lines in the L2 cache, for which an op that mostly reads pays more than a copy does.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree

import inductor_ext as ixt
from inductor_ext import registry

from .environment import environment
from .kernel_cases import CASES, Case, Input, inputs
from .timing import copy_bandwidth, device_time, rotating_time

SHAPES = {"cuda": ((16384, 8192), (8192, 4096), (4096, 14336)), "cpu": ((256, 1024),)}
LARGE = 16384 * 8192
"""Elements of the large copy, and of the shape that the goals are for."""
SMALLER = 5
"""Points by which the goal of a smaller shape is lower."""
NOISE = 1.02
"""Times that differ by less are taken as equal."""
ROTATING_BYTES = 400 << 20
"""Bytes of ``x`` that calls in rotation go through, several times an L2 cache."""
ROTATING_CALLS = (3, 32)
"""How many those are at least, for large tensors, and at most, for small ones."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class Compiled:
    """An op compiled alone: microseconds (None: it does not compile), and what became of it.

    ``outcome`` is that of :class:`inductor_ext.registry.Record`; or the error.
    """

    us: float | None
    outcome: str


@dataclass(frozen=True)
class Row:
    """One measured case; shares in percent of the floor at the speed of a copy."""

    shape: Shape
    family: str
    case: str
    op: str
    bytes: int
    us: float
    percent: float
    percent_of_equal_copy: float
    goal_percent: int | None
    default: Compiled | None = None
    lowered: Compiled | None = None
    rotating_us: float | None = None
    percent_rotating: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the eager kernel stays below its goal."""
        return self.goal_percent is not None and self.percent < self.goal_percent

    @property
    def choice_is_slow(self) -> bool:
        """Whether the eager kernel or the lowering is faster than what the plugin chose."""
        if self.default is None:
            return False
        rivals = [self.us, *([self.lowered.us] if self.lowered and self.lowered.us else [])]
        return self.default.us is None or self.default.us > NOISE * min(rivals)


@dataclass(frozen=True)
class Copies:
    """Bytes a second, read plus written, of a large copy and of one of the shape's elements.

    ``rotating``: of the latter over several tensors in turn.
    """

    large: float
    equal: float
    rotating: float | None = None


def goal(case: Case, shape: Shape) -> int | None:
    """Return the percentage that the case must reach at this shape."""
    if case.goal is None:
        return None
    return case.goal - (SMALLER if shape[0] * shape[1] < LARGE else 0)


def floor(case: Case, arguments: tuple[Any, ...], results: Any, x: Tensor) -> int:
    """Return the bytes that must be moved; what an op changes in place is also a result."""
    said = overload(case.op)._schema.arguments
    changed = [a for a, s in zip(arguments, said, strict=False) if s.is_write]
    moved = pytree.tree_leaves((arguments, results, changed))
    once = sum(int(t.nbytes) for t in moved if isinstance(t, Tensor))
    return once + (case.reads - 1) * int(x.nbytes)


def overload(name: str) -> Any:
    """Return the op of this name."""
    return getattr(torch.ops.inductor_ext, name).default


def fill(case: Case, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """Return the case's arguments, its inputs put in; a source runs for that."""
    if case.source is not None:
        found = overload(case.source.op)(*_fill(case.source.arguments, tensors))
        tensors = {**tensors, **dict(zip(("codes", "scales", "zero"), found, strict=False))}
    return _fill(case.arguments, tensors)


def _fill(arguments: tuple[Any, ...], tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    return tuple(tensors[a.name] if isinstance(a, Input) else a for a in arguments)


def compiled(op: Any, arguments: tuple[Any, ...], *, always_lower: bool) -> Compiled:
    """Compile the op alone and time it."""
    device = next(a for a in arguments if isinstance(a, Tensor)).device
    torch.compiler.reset()
    registry.clear_records()
    with (
        ixt.config.patch(enabled=True, strict=False, always_lower=always_lower),
        torch.compiler.config.patch(force_disable_caches=True),  # a cache's answer has no record
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        call = partial(torch.compile(op, fullgraph=True, dynamic=False), *arguments)
        try:
            call()
        except RuntimeError as error:
            return Compiled(None, f"does not compile: {str(error).partition(chr(10))[0]}")
        outcomes = dict.fromkeys(record.outcome for record in registry.records())
        return Compiled(round(device_time(call, device), 1), " + ".join(outcomes) or "opaque")


def measure(case: Case, several: list[dict[str, Tensor]], copies: Copies, *, alone: bool) -> Row:
    """Time the eager op and, if asked, the op compiled alone in both ways (if they differ).

    ``several``: what :func:`inputs` returned, once for each call in rotation.
    """
    tensors = several[0]
    x, op, arguments = tensors["x"], overload(case.op), fill(case, tensors)
    size = floor(case, arguments, op(*arguments), x)
    us = device_time(partial(op, *arguments), x.device)
    shape = (x.shape[0], x.shape[1])
    default = lowered = compiled(op, arguments, always_lower=False) if alone else None
    if default and default.outcome != "lowered":
        lowered = compiled(op, arguments, always_lower=True)
    rotating_us = percent_rotating = None
    if copies.rotating and case.goal is not None:
        rotating_us = rotating_time([partial(op, *fill(case, each)) for each in several])
        percent_rotating = round(100 * size / copies.rotating / rotating_us * 1e6, 1)
        rotating_us = round(rotating_us, 2)  # a small tensor takes 1 us
    return Row(
        shape, case.family, case.name, case.op, size, round(us, 1),
        round(100 * size / copies.large / us * 1e6, 1),
        round(100 * size / copies.equal / us * 1e6, 1),
        goal(case, shape) if x.device.type == "cuda" else None,
        default, lowered, rotating_us, percent_rotating,
    )  # fmt: skip


def rotating_inputs(shape: Shape, device: torch.device) -> list[dict[str, Tensor]]:
    """Return the tensors of each call in rotation."""
    least, most = ROTATING_CALLS
    calls = min(most, max(least, -(-ROTATING_BYTES // (2 * shape[0] * shape[1]))))
    return [inputs(shape, device) for _ in range(calls)]


def rotating_copy(several: list[dict[str, Tensor]]) -> float:
    """Return the bytes a second, read plus written, of copies of ``x`` in rotation."""
    us = rotating_time([partial(torch.clone, tensors["x"]) for tensors in several])
    return 2 * float(several[0]["x"].nbytes) / us * 1e6


def table(rows: list[Row], copies: Copies, alone: bool) -> Table:
    """Return the table of one shape; "missed" and "slow" mark what falls short.

    "missed (large)": of the large copy, while the share of an equal copy meets the goal.
    """
    m, k = rows[0].shape
    large, equal = copies.large / 1e12, copies.equal / 1e12
    title = f"{m} x {k} bf16; copy {large:.3f} TB/s, of as many elements {equal:.3f} TB/s"
    head = ["op", "floor", "us", "% of the copy", "% of an equal copy", "goal"]
    if copies.rotating:
        title += f", in rotation {copies.rotating / 1e12:.3f} TB/s"
        head += ["us, in rotation", "% of a copy in rotation"]
    drawn = Table(*head, *(("alone, by default", "alone, lowered") if alone else ()), title=title)
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.family != row.family:
            drawn.add_section()
        rotating = (_text(row.rotating_us), _text(row.percent_rotating)) if copies.rotating else ()
        compiled_cells: tuple[str, ...] = ()
        if alone:
            slow = "  slow" if row.choice_is_slow else ""
            compiled_cells = (_cell(row.default) + slow, _cell(row.lowered))
        style = "bold red" if row.missed or row.choice_is_slow else None
        drawn.add_row(
            f"{row.family} {row.case}", f"{row.bytes / (m * k):.2f} n", f"{row.us}",
            f"{row.percent}", f"{row.percent_of_equal_copy}",
            _goal_cell(row), *rotating, *compiled_cells, style=style,
        )  # fmt: skip
    return drawn


def _text(number: float | None) -> str:
    return "" if number is None else f"{number}"


def _goal_cell(row: Row) -> str:
    if row.goal_percent is None:
        return ""
    if not row.missed:
        return f"{row.goal_percent}"
    of_both = row.percent_of_equal_copy < row.goal_percent
    return f"{row.goal_percent}  missed" + ("" if of_both else " (large)")


def _cell(result: Compiled | None) -> str:
    if result is None:
        return ""
    return "does not compile" if result.us is None else f"{result.us} us, {result.outcome}"


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table a shape, keep JSON; returns the exit code."""
    cuda = torch.cuda.is_available()
    device = torch.device(arguments.device or ("cuda" if cuda else "cpu"))
    cases = [case for case in CASES if arguments.only in str(case)]
    if not cases:
        print(f"no kernel's name contains {arguments.only!r}; names are like {str(CASES[0])!r}")
        return 2
    shapes = arguments.shape or SHAPES[device.type]
    if arguments.rotate and device.type != "cuda":
        print(f"--rotate replays CUDA graphs, --device is {device.type}")
        return 2
    console, about = Console(width=165), environment(device)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    report: dict[str, Any] = {"environment": about, "copies": [], "kernels": []}
    tables = []
    for shape in shapes:
        several = rotating_inputs(shape, device) if arguments.rotate else [inputs(shape, device)]
        n = shape[0] * shape[1]
        equal = copy_bandwidth(n, device)
        large = copy_bandwidth(LARGE, device) if n != LARGE and device.type == "cuda" else equal
        copies = Copies(large, equal, rotating_copy(several) if arguments.rotate else None)
        rows = []
        report["copies"].append({"shape": shape, **asdict(copies)})
        for case in cases:
            with torch.no_grad():
                row = measure(case, several, copies, alone=arguments.compiled)
            rows.append(row)
            console.print(f"  {shape[0]} x {shape[1]} {case}: {row.us} us, {row.percent} %")
            report["kernels"].append(
                {**asdict(row), "missed": row.missed, "choice_is_slow": row.choice_is_slow}
            )
            # Kept after each case: a run that is cut short has measured something.
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
        tables.append(table(rows, copies, arguments.compiled))
    console.print(*tables, sep="\n")
    console.print(f"numbers kept in {arguments.json}")
    return 0
