"""Which kernel is called for a scaled product, and with what: no GPU, the library is played.

``gemm_library.py`` refuses what torch and cuBLASLt refuse and computes in float64 what they would
read, so that the bound is that of the CPU; only operands that are rounded to bf16 widen it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import gemm_cases as g
import pytest
import torch
from gemm_library import Library

import inductor_ext as ixt
from inductor_ext import config
from inductor_ext.ops import _gemm_calls
from inductor_ext.ops._routes_gemm import NATIVE, choose_gemm

CARDS = ((8, 0), (8, 9), (9, 0), (10, 0))
pair_ = pytest.mark.parametrize("pair", g.PAIRS, ids=g.name_of)
# Few of these are multiples of anything; those of 16, 128 and 4 must need no copy either.
SIDES = (1, 3, 16, 17, 33, 128, 132, 200)


def library_route(pair: Any, card: tuple[int, int]) -> bool:
    """Return whether torch's GEMM multiplies these on the card: the table of docs/gemm.md."""
    kind = type(pair[0]).__name__
    if kind == "INT8":
        return "group" not in (pair[0].granularity, pair[1].granularity)
    if kind in ("MXFP8", "NVFP4"):
        return card >= (10, 0)
    if pair[0].granularity in ("tensor", "row"):
        return card >= (8, 9)
    e5m2 = torch.float8_e5m2 in (pair[0].dtype, pair[1].dtype)
    return card[0] == 9 and pair[0].block == 128 and not e5m2


@pair_
@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"sm_{card[0]}{card[1]}")
def test_calls_are_what_the_library_takes(pair: Any, card: tuple[int, int]) -> None:
    seed = g.PAIRS.index(pair)
    choices = itertools.cycle(itertools.product(("bf16", "fp16", "fp32"), (False, True)))
    for (m, n, k), (dtype, with_bias) in zip(g.sizes(4, seed, SIDES), choices, strict=False):
        q = g.operands(pair, (m, n, g.k_for(pair, k)), seed)
        bias = g.random_bias(n, dtype, seed) if with_bias else None
        played = Library(card)
        with played.patched():
            got = ixt.scaled_mm(*q, *pair, bias=bias, dtype=g.cases.INPUTS[dtype])
        native = library_route(pair, card)
        rounded = 0.0 if native else g.rounds_operands(pair, dtype)
        g.check(pair, q, bias, dtype, got, rounded=rounded)
        wide = {"mm torch.bfloat16", "mm torch.float32"}
        assert played.calls.total() == 1
        assert bool(wide & set(played.calls)) != native


@pair_
def test_empty_calls_nothing(pair: Any) -> None:
    played = Library((9, 0))
    bias = g.random_bias(3, "bf16", 0)
    for m, n, k in ((0, 3, 16), (5, 0, 16), (5, 3, 0)):
        q = g.operands(pair, (m, n, k), 0)
        with played.patched():
            got = ixt.scaled_mm(*q, *pair, bias=bias[:n])
        assert torch.equal(got, bias[:n].expand(m, n))
    assert not played.calls


@pytest.mark.parametrize("card", [(9, 0), (10, 0)], ids=["sm_90", "sm_100"])
def test_sizes_that_fit_are_not_copied(card: tuple[int, int]) -> None:
    """The library is given the operands themselves, in the layout that quantize writes."""
    fitting = [
        (ixt.FP8(granularity="tensor"), ixt.FP8(granularity="tensor")),
        (ixt.FP8(), ixt.FP8()),
    ]
    if card == (9, 0):
        block = ixt.FP8(granularity="block", layout="gemm")
        fitting += [(block, block), (block, ixt.FP8(granularity="square", layout="gemm"))]
    else:
        fitting += [(f, f) for f in (ixt.MXFP8(layout="gemm"), ixt.NVFP4(layout="gemm"))]
    for pair in fitting:
        q = g.operands(pair, (32, 48, 640), 0)
        mine = {t.data_ptr() for each in q for t in each[:2] if t is not None}
        seen: list[int] = []
        played = Library(card)
        for name in ("scaled_mm", "scaled_mm_v2"):
            _spy(played, name, seen)
        out = torch.empty(32, 48, dtype=torch.bfloat16)
        with played.patched():
            ixt.scaled_mm(*q, *pair, out=out)
        assert mine <= set(seen), g.name_of(pair)
        assert out.data_ptr() in seen


def _spy(played: Library, name: str, seen: list[int]) -> None:
    original = getattr(played, name)

    def spy(*args: Any, out: torch.Tensor) -> Any:
        for arg in (*args, out):
            for tensor in arg if isinstance(arg, list) else [arg]:
                if isinstance(tensor, torch.Tensor):
                    seen.append(tensor.data_ptr())
        return original(*args, out=out)

    setattr(played, name, spy)


@pair_
def test_awkward_sizes_are_padded_at_once(pair: Any) -> None:
    """One kernel pads all that has to be, at most four matrices; sizes that fit need none."""
    for size, most in (((33, 20, g.k_for(pair, 200)), 1), ((32, 48, 512), 0)):
        q = g.operands(pair, size, 0)
        bias = g.random_bias(size[1], "bf16", 0)
        for card in ((9, 0), (10, 0)):
            played, padded = Library(card), mock.Mock(side_effect=_gemm_calls.padded)
            with played.patched(), mock.patch.object(_gemm_calls, "padded", padded):
                ixt.scaled_mm(*q, *pair, bias=bias)
            assert padded.call_count == (most if library_route(pair, card) else 0)
            assert all(len(call.args) <= 4 for call in padded.call_args_list)


def test_strided_and_misaligned_operands() -> None:
    """Slices, transposes, one row with a stride of 1, and addresses off a 16-byte boundary."""
    f = ixt.FP8()
    whole = [ixt.quantize(torch.randn(40, 40), f) for _ in range(2)]
    flat = torch.empty(40 * 40 + 3).to(g.E4M3)
    off = flat[3:].view(40, 40).copy_(whole[0].codes.view(torch.uint8).view(g.E4M3))
    views = [
        (whole[0].codes.t(), whole[1].codes),
        (whole[0].codes[::2, 1:33], whole[1].codes[:, 7:39]),
        (whole[0].codes[3:4].expand(5, 40), whole[1].codes[5:6]),
        (off, off),
        (whole[0].codes[:1, :16].as_strided((1, 16), (1, 1)), whole[1].codes[:, :16]),
    ]
    for a, b in views:
        scales = [torch.rand(x.shape[0] + 1, 1)[1:] for x in (a, b)]
        q = ixt.Quantized(a, scales[0]), ixt.Quantized(b, scales[1])
        shape = (a.shape[0], b.shape[0])
        room = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.bfloat16)
        with Library((9, 0)).patched():
            got = ixt.scaled_mm(*q, f)
            assert torch.equal(ixt.scaled_mm(*q, f, out=room[1:].view(shape)), got)
        g.check((f, f), q, None, "bf16", got)


def test_long_sums_of_int8_are_cut() -> None:
    """The played library fails where int32 would overflow."""
    k, f = 140_000, ixt.INT8(granularity="tensor")
    q = ixt.Quantized(torch.full((2, k), -128, dtype=torch.int8), torch.tensor(1.0))
    played = Library((9, 0))
    with played.patched():
        got = ixt.scaled_mm(q, q, f, dtype=torch.float32)
    assert played.calls == Counter(int8=2)
    assert (got == float(torch.tensor(k * 128**2).float())).all()


def test_pins() -> None:
    """A pinned route is taken, or refused with the reason; never replaced."""
    pair = (ixt.NVFP4(), ixt.NVFP4())
    q = g.operands(pair, (4, 16, 32), 0)
    with config.patch(gemm="library"), pytest.raises(ValueError, match="no CUDA device"):
        ixt.scaled_mm(*q, *pair)
    refused = pytest.raises(ValueError, match="sm_100 and later")
    with Library((9, 0)).patched(), config.patch(gemm="library"), refused:
        ixt.scaled_mm(*q, *pair)
    for route, calls in (("reference", 0), ("dequantize", 1), ("library", 1)):
        played = Library((10, 0))
        with config.patch(gemm=route), played.patched():
            g.check(pair, q, None, "bf16", ixt.scaled_mm(*q, *pair))
        assert played.calls.total() == calls
    with pytest.raises(ValueError, match=r"config\.gemm must be one of"):
        config.gemm = "fastest"


REFUSED = {
    "row": ((ixt.FP8(), ixt.FP8()), (9, 0), "tensor"),
    "4x4": ((ixt.FP8(granularity="block"),) * 2, (9, 0), "mm torch.bfloat16"),
    "mx": ((ixt.MXFP8(), ixt.MXFP8()), (10, 0), "mm torch.bfloat16"),
    "nvfp4": ((ixt.NVFP4(), ixt.NVFP4()), (10, 0), "mm torch.bfloat16"),
    "int8": ((ixt.INT8(), ixt.INT8()), (9, 0), "mm torch.bfloat16"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_sizes_that_the_library_refuses(kind: str) -> None:
    """Its refusal comes as a warning and another route takes the call, at once the next time."""
    pair, card, taken = REFUSED[kind]
    q = g.operands(pair, (16, 32, 64), 0)
    played = Library(card, refused=kind)
    with played.patched():
        with pytest.warns(ixt.InductorExtWarning, match="refuses inductor_ext::scaled_mm"):
            got = ixt.scaled_mm(*q, *pair)
        g.check(pair, q, None, "bf16", got, rounded=g.rounds_operands(pair, "bf16"))
        assert torch.equal(ixt.scaled_mm(*q, *pair), got)
        assert played.calls == {kind: 1, taken: 2}
        with config.patch(gemm="library"), pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
            ixt.scaled_mm(*q, *pair)


def test_every_choice_has_a_reason() -> None:
    for kind, card, block in itertools.product(NATIVE, (None, *CARDS), (0, 32, 128)):
        for e5m2 in (False, True):
            name, reason = choose_gemm(kind, card, block=block, e5m2=e5m2)
            assert name in ("library", "dequantize", "reference")
            assert (name == "reference") == (card is None)
            assert (kind, e5m2, name) != ("fp8_block", True, "library")
            assert reason
