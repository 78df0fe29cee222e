"""What is supported where: one row per built-in op, read from the registry, never written by hand.

``python -m inductor_ext support`` prints it; docs/support.md holds it, and a test compares the two.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _compat, fake_gpu
from .registry import OpContract, contracts

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
# An op's format is the first of these that its name contains; the others serve several formats.
_FORMATS = ("mxfp8", "nvfp4", "fp8", "int8", "int4")
HEADER = ("format", "op", "CPU kernel", "CUDA kernel", "torch.compile", "compiled on", "gradient")


@dataclass(frozen=True)
class Support:
    """One op: its format, kernels for eager mode, and what ``torch.compile`` makes of it."""

    format: str
    op: str
    cpu: str
    cuda: str
    strategy: str
    compiled_on: str
    gradient: str


def table() -> list[Support]:
    """Return a row per built-in op, by format.

    The architectures are those for which the contract's ``supports`` accepts the first of its
    own sample inputs; there, the generated code is built from the op's lowering.
    """
    ours = [c for c in contracts().values() if c.op.namespace == "inductor_ext"]
    accepted: dict[str, list[str]] = {c.name: [] for c in ours}
    for target in ARCHITECTURES:
        with fake_gpu.pretend(target), _compat.FakeTensorMode():
            for contract in ours:
                if contract.strategy != "opaque" and _accepts(contract):
                    accepted[contract.name].append(target)
    order = [f.upper() for f in _FORMATS]
    rows = [_row(c, accepted[c.name]) for c in ours]
    return sorted(rows, key=lambda r: order.index(r.format) if r.format in order else len(order))


def _accepts(contract: OpContract) -> bool:
    if contract.supports is None:
        return True
    assert contract.inputs is not None, f"{contract.name} has no sample inputs"
    sample = next(iter(contract.inputs(torch.device("cpu"))))
    moved = pytree.tree_map_only(torch.Tensor, _on_gpu, sample)
    return contract.supports(*moved) is True


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


def _row(contract: OpContract, accepted: list[str]) -> Support:
    name = contract.name.partition("::")[2]
    found = next((f.upper() for f in _FORMATS if f in name), "any")
    if contract.strategy == "opaque":
        compiled_on = "-"
    elif len(accepted) == len(ARCHITECTURES):
        compiled_on = "CPU, sm_80 and later"
    else:
        compiled_on = f"CPU, {accepted[0]} and later" if accepted else "CPU"
    return Support(
        format=found,
        op=name,
        cpu=_kernel(contract, "CPU"),
        cuda=_kernel(contract, "CUDA"),
        strategy={"opaque": "its own kernel"}.get(contract.strategy, contract.strategy),
        compiled_on=compiled_on,
        gradient="none" if contract.autograd is None else "yes",
    )


def _kernel(contract: OpContract, key: str) -> str:
    if not _compat.dispatch_has_kernel(contract.name, key):
        return "PyTorch"
    return "yes" if key == "CPU" else "sm_80 and later"


def markdown() -> str:
    """Return the table as Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *(astuple(row) for row in table())]
    cells = [[f"`{c}`" if i == 1 and "_" in c else c for i, c in enumerate(line)] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inductor_ext support", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print docs/support.md's table")
    if parser.parse_args(argv).markdown:
        print(markdown(), end="")
        return 0
    from rich.console import Console
    from rich.table import Table

    shown = Table(*HEADER, title="inductor_ext: what is supported where")
    for row in table():
        cells: Any = astuple(row)
        shown.add_row(*cells)
    Console().print(shown)
    return 0
