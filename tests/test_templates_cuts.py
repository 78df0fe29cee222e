"""How a tile template is cut for small matrices, and where it is not taken.

As test_templates.py, in Triton's interpreter; test_templates_gpu.py runs them on a card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import interpreter
import pytest
import torch
import torch.nn.functional as F
from test_templates import BLOCK, MX, generate, plain_tensors, product, values
from torch import Tensor

import inductor_ext as ixt
from inductor_ext.bench.chain_cases import d_swiglu
from inductor_ext.lowerings.templates import fit

TENSOR = ixt.FP8(granularity="tensor")


@pytest.fixture(autouse=True)
def templates() -> Iterator[None]:
    with ixt.config.patch(enabled=True, templates=True, strict=True):
        yield


def cut_of(source: str) -> fit.Cut:
    """Return how a generated kernel is cut."""
    sizes = [re.search(rf"{name} : tl.constexpr = (\d+)", source) for name in
             ("REGISTERS", "THREADS", "BLOCK_K")]  # fmt: skip
    warps = re.search(r"num_warps=(\d+)", source)
    return fit.Cut(*(int(found[1]) for found in (*sizes, warps) if found))


@pytest.mark.parametrize(
    ("fmt", "rows", "expected"),
    [
        (MX, 64, [(8, 4, 64, 4)]),
        (MX, 8192, [(8, 16, 64, 4)]),
        (BLOCK, 2048, [(4, 32, 128, 16)]),
        (BLOCK, 256, [(4, 32, 128, 16)]),
    ],
    ids=str,
)
def test_few_tiles_are_cut_finer(
    fmt: ixt.Format, rows: int, expected: list[tuple[int, ...]]
) -> None:
    columns = 192 if fmt is MX else 128

    def chain(x: Tensor, y: Tensor) -> list[Tensor]:
        return plain_tensors(ixt.quantize(product(x, y), fmt, orientation="both"))

    x, y = values(rows, columns), values(rows, columns, seed=1)
    graph = generate(chain, x, y)
    assert [cut_of(kernel.source) for kernel in graph.kernels.values()] == expected
    if rows > 256:
        return
    for got, want in zip(interpreter.run(graph.source, x, y), chain(x, y), strict=True):
        assert (got.shape, got.stride()) == (want.shape, want.stride())
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (got, want)))


SMALL = [
    ("product", BLOCK, (256, 128), True),
    ("product", BLOCK, (2048, 128), False),
    ("product", MX, (64, 128), False),
    ("norm", MX, (4096, 512), True),
    ("norm", MX, (4128, 512), False),
    ("norm", TENSOR, (128, 192), True),
    ("norm", TENSOR, (3328, 64), False),
    ("norm", ixt.FP8(granularity="square"), (14592, 128), True),
]


@pytest.mark.parametrize(("producer", "fmt", "shape", "loops"), SMALL, ids=str)
def test_small_matrices_are_left_to_loops(
    producer: str, fmt: ixt.Format, shape: tuple[int, int], loops: bool
) -> None:
    """Where they were measured to be faster; ``always_lower`` has them as templates too."""

    given = [torch.tensor(0.5)] if fmt is TENSOR else []

    def chain(x: Tensor, y: Tensor, w: Tensor, *scale: Tensor) -> list[Tensor]:
        z = product(x, y) if producer == "product" else F.rms_norm(x, w.shape, w)
        q = ixt.quantize(z, fmt, *scale, orientation="both")  # type: ignore[call-overload]
        kept = 1 if scale else 2
        return [*q.row[:kept], *q.column[:kept]]

    x, y, w = values(*shape), values(*shape, seed=1), values(shape[1])
    found = []
    for always in (False, True):
        with ixt.config.patch(always_lower=always):
            graph = generate(chain, x, y, w, *given)
        found.append(any("arg_CODES_M" in kernel.source for kernel in graph.kernels.values()))
    assert found == [not loops, True]


def test_a_given_scale_behind_a_pointwise_producer() -> None:
    """A template's, unless loops do two of them in one kernel."""

    def both(x: Tensor, scale: Tensor) -> list[Tensor]:
        q = ixt.quantize(x, TENSOR, scale, orientation="both")
        return [q.row.codes, q.column.codes]

    def chain(x: Tensor, y: Tensor, scale: Tensor) -> list[Tensor]:
        return both(product(x, y), scale)

    def two(g: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> list[list[Tensor]]:
        return [both(d, scale) for d in d_swiglu(g, x, y)]

    x, y, scale = values(70, 192), values(70, 192, seed=1), torch.tensor(0.5)
    (loops,) = generate(two, x, x, y, scale).kernels
    assert "_tem_" not in loops
    graph = generate(chain, x, y, scale)
    (name,) = graph.kernels
    assert "_tem_" in name
    for got, want in zip(
        interpreter.run(graph.source, x, y, scale), chain(x, y, scale), strict=True
    ):
        assert (got.shape, got.stride()) == (want.shape, want.stride())
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
