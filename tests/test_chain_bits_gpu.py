"""Codes of the chains of ``bench chains`` on a card, compiled against eager; -s says how many move.

The producers' own arithmetic is eager's where it is exact; exp and a row's sum are not, and then
a code differs where the rounded element, or a scale made of it, does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import inductor_ext as ixt
from inductor_ext import _compat
from inductor_ext.bench.chain_cases import PRODUCERS, QUANTIZATIONS, Chain, chains
from inductor_ext.bench.chains import tensors

pytestmark = pytest.mark.gpu
SHAPES = [(512, 1024), (1000, 4096)]
CHAINS = {chain.name: chain for chain in chains()}
INEXACT = [name for name in CHAINS if "SiLU" in name or "RMSNorm" in name]
SILU = [name for name in INEXACT if "SiLU" in name]
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    torch.compiler.reset()
    with torch.compiler.config.patch(force_disable_caches=True), torch.no_grad():
        yield


@cache
def inputs(shape: tuple[int, int]) -> dict[str, Tensor]:
    return tensors(*shape, torch.device("cuda"))


def arguments(chain: Chain, shape: tuple[int, int]) -> list[Tensor]:
    return [inputs(shape)[name] for name in chain.inputs]


def compiled(fn: Callable[..., Any], given: list[Tensor], numerics: str | None = "exact") -> Any:
    """Run a function with the plugin, or without for None."""
    torch.compiler.reset()
    on = numerics is not None
    with ixt.config.patch(enabled=on, templates=True, strict=True, numerics=numerics or "exact"):
        return torch.compile(fn, fullgraph=True, dynamic=False)(*given)


class Moved(NamedTuple):
    """How results differ from eager's.

    Attributes:
        codes: how many codes differ; zeros of both signs are one code.
        steps: by how many codes at most, where the scales are the same.
        others: how many scales, amaxes, sums differ.
        out_of: how many codes there are.
    """

    codes: int
    steps: int
    others: int
    out_of: int

    @property
    def ppm(self) -> float:
        return 1e6 * self.codes / max(self.out_of, 1)


def say(line: str) -> None:
    """Print at once, also from a worker of pytest-xdist."""
    print(line, file=sys.stderr, flush=True)


def leaves(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def places(codes: Tensor) -> Tensor:
    """Return the number of each code in their order, 0 for zeros."""
    byte = codes.view(torch.uint8).int()
    return torch.where(byte < 128, byte, 128 - byte)


def spread(scale: Tensor, codes: Tensor) -> Tensor:
    """Return a scale a block as a scale a code."""
    if scale.dim() < 2:
        return scale.expand(codes.shape)
    for d in range(2):
        block = next(g for g in (1, 32, 128, 1 << 20) if -(-codes.shape[d] // g) == scale.shape[d])
        scale = scale.repeat_interleave(min(block, codes.shape[d]), d)
    return scale[: codes.shape[0], : codes.shape[1]]


def compare(got: Any, want: Any) -> Moved:
    pairs = list(zip(leaves(got), leaves(want), strict=True))
    moved = steps = others = out_of = 0
    for number, (a, b) in enumerate(pairs):
        assert a.shape == b.shape
        if a.dtype not in CODES:
            others += int((bits(a) != bits(b)).sum())
            continue
        distance = (places(a) - places(b)).abs()
        moved, out_of = moved + int((distance > 0).sum()), out_of + a.numel()
        behind = pairs[number + 1 : number + 2]
        if behind and behind[0][0].dtype not in CODES:
            distance = distance[spread(behind[0][0] == behind[0][1], a)]
        steps = max(steps, int(distance.max()) if distance.numel() else 0)
    return Moved(moved, steps, others, out_of)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CHAINS if name not in INEXACT])
def test_the_same_bits(name: str, shape: tuple[int, int]) -> None:
    chain = CHAINS[name]
    given = arguments(chain, shape)
    with ixt.config.patch(always_lower=True):
        moved = compare(compiled(chain.ours, given), chain.ours(*given))
    assert moved == Moved(0, 0, 0, moved.out_of)


@pytest.mark.parametrize("name", INEXACT)
def test_budget(name: str) -> None:
    """exp: no more than eager's roundings alone give.  A row's sum: a few codes in ten thousand."""
    chain = CHAINS[name]
    found = {}
    for shape in SHAPES:
        given = arguments(chain, shape)
        found["exact", shape] = compare(compiled(chain.ours, given), chain.ours(*given))
    given = arguments(chain, SHAPES[0])
    found["fast", SHAPES[0]] = compare(compiled(chain.ours, given, "fast"), chain.ours(*given))
    with _compat.inductor_config.patch(emulate_precision_casts=True):
        alone = compare(compiled(chain.plain, given, None), chain.plain(*given))
    for key, moved in (*found.items(), (("emulate_precision_casts", SHAPES[0]), alone)):
        say(f"{name}, {key[0]}, {key[1]}: {moved} = {moved.ppm:.1f} ppm")
    for (numerics, _), moved in found.items():
        # Behind dSiLU * mul the terms of 1 + x (1 - s) cancel, and unrounded ones do otherwise.
        assert moved.steps <= 1 or (numerics == "fast" and name.startswith("dSiLU"))
        assert numerics == "fast" or moved.ppm < 2000
    if name in SILU:
        assert found["exact", SHAPES[0]].codes <= alone.codes


GIVEN = [
    (prefix, quantization.name)
    for prefix, _, _, _ in PRODUCERS
    for quantization in QUANTIZATIONS
    if prefix and prefix + quantization.name in CHAINS
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("prefix", "quantization"), GIVEN)
def test_the_producer_alone_decides(prefix: str, quantization: str, shape: tuple[int, int]) -> None:
    """Given what the compiled producer made of its inputs, the codes are eager's to the bit."""
    producer, names = next((p, names) for at, p, names, _ in PRODUCERS if at == prefix)
    ours, extra = next((q.ours, q.extra) for q in QUANTIZATIONS if q.name == quantization)
    assert producer is not None
    count = len(names)

    def chain(*given: Tensor) -> Any:
        made = producer(*given[:count])
        return made, ours(made, *given[count:])

    given = [inputs(shape)[name] for name in (*names, *extra)]
    made, results = compiled(chain, given)
    moved = compare(results, ours(made, *given[count:]))
    assert moved == Moved(0, 0, 0, moved.out_of)
    want = producer(*given[:count])
    ulps = (made.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    say(f"{prefix}{quantization}, {shape}: {int((ulps > 0).sum())} of {ulps.numel()} elements")
    # One of the first rounding, of silu or of the norm, may be two of the product's.
    assert int(ulps.max()) <= 2
