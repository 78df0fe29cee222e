"""RoPE, the KV cache and attention over it on a card: bits of the formulas, bounds, CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import kv
import pytest
import test_decode_attention as decode
import test_kv_cache as cache_tests
import test_rope as rope_tests
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat
from inductor_ext.decompositions import rope as formulas

pytestmark = pytest.mark.gpu
OPS = torch.ops.inductor_ext


def cuda(value: Any) -> Any:
    """Return it on the card."""
    return kv.moved(value, "cuda")


def test_rope_has_the_formulas_bits() -> None:
    """Products and sums are rounded one by one in the kernel, as eager PyTorch's."""
    for args in rope_tests.cases():
        on_card = tuple(cuda(args))
        rope_tests.check_rope(*on_card)
        assert torch.equal(OPS.rope(*on_card).cpu(), formulas.rope(*args))
        for token_major in (False, True):
            got = OPS.rope_backward(*on_card, token_major)
            want = formulas.rope_backward(*args, token_major)
            assert torch.equal(got.cpu(), want)
            assert got.stride() == want.stride() or not got.numel()


def test_rope_clamps_positions() -> None:
    table, x = torch.randn(4, 4, device="cuda"), torch.randn(1, 1, 3, 8, device="cuda")
    got = ixt.rope(x, table, table, positions=torch.tensor([-5, 4, 1 << 40], device="cuda"))
    want = ixt.rope(x, table, table, positions=torch.tensor([0, 3, 3], device="cuda"))
    assert torch.equal(got, want)


def test_rope_compiled() -> None:
    """Triton may fuse a product into the sum: a bf16 result differs where that turns a tie."""
    x = torch.randn(2, 512, 8, 128, device="cuda").bfloat16()
    table = torch.randn(512, 64, device="cuda")
    rotate = lambda x, t: ixt.rope(x.transpose(1, 2), t, t)  # noqa: E731
    with ixt.config.patch(enabled=True):
        got = torch.compile(rotate, fullgraph=True)(x, table)
    assert int((got != rotate(x, table)).sum()) <= got.numel() // 1000


def test_appends_have_the_oracles_bits() -> None:
    for label, sample in kv.samples():
        want = kv.appended(label.partition(",")[0], sample)
        on_card = sample.to("cuda")
        ixt.append_kv_(on_card.cache, on_card.k, on_card.v, on_card.positions)
        kv.require_same(on_card.cache, want, label)


def test_places_that_are_not_there() -> None:
    """Nothing is written, whatever lengths, positions and tables say."""
    for page in (0, 4):
        cache = cuda(kv.empty("e4m3 row", (2, 3, 8, 32), torch.bfloat16, page))
        k = torch.ones(2, 3, 2, 32, device="cuda").bfloat16()
        for at in (-1, -(2**31), 8, 2**31 - 1, -(2**62), 2**62):
            ixt.append_kv_(cache, k, k, torch.full((2, 2), at, device="cuda"))
        for length in (0, -(2**31), 10, 2**31 - 1):
            cache.lengths.fill_(length)
            ixt.append_kv_(cache, k, k)
        if page:
            cache.block_table.fill_(1 << 20)
            cache.lengths.fill_(4)
            ixt.append_kv_(cache, k, k)
        assert not cache.k.view(torch.uint8).any()
        assert not cache.k_scale.any()


@pytest.mark.parametrize("case", decode.KERNEL, ids=str)
def test_decode_attention(case: Any) -> None:
    """Within the bound of float64, with splits and alone; the same bits twice."""
    from inductor_ext.kernels.triton.decode_attention import decode_attention as launch

    cache, q = decode.kernel_case(case)
    window, splits = case[-2:]
    true = kv.attended(q, cache, 0.3, window, decode.weights_error(case))
    on_card, q = cuda((cache, q))
    rest = (*on_card[:3], on_card.block_table, on_card.k_scale, on_card.v_scale, 0.3, window)
    for count in (1, splits, 8):
        got = launch(q, *rest, count)
        decode.require_close(got, true, q.dtype)
        assert all(torch.equal(a, b) for a, b in zip(got, launch(q, *rest, count), strict=True))
    for pin in ("reference", "triton"):
        with ixt.config.patch(decode_attention=pin):
            got = ixt.decode_attention(
                q, on_card, scale=0.3, window=window or None, return_lse=True
            )
        decode.require_close(got, true, q.dtype)


@pytest.mark.parametrize("head", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", ["plain", "e4m3 row", "e4m3 given", "int8 row"])
@pytest.mark.parametrize("page", [0, 16])
def test_decode_attention_of_long_sequences(kind: str, page: int, head: int) -> None:
    """Against the reference route, whose own bound is in test_decode_attention.py."""
    shape, lengths = (4, 2, 4096, head), (4096, 1, 4000, 1025)
    cache = cuda(kv.filled(kind, torch.bfloat16, page, shape, lengths))
    q = decode.queries(shape, torch.bfloat16, 2, 4).cuda()
    made = {}
    for route in ("triton", "reference"):
        with ixt.config.patch(decode_attention=route):
            made[route] = ixt.decode_attention(q, cache, return_lse=True)
    (out, lse), (want, lse_want) = made["triton"], made["reference"]
    # Weights in bf16 move the sum by 2^-8 of the mean |v| at most, below 2 * 2 here; two roundings.
    assert (out.float() - want.float()).abs().max() <= 4 * 2**-8 + 2**-7 * want.float().abs().max()
    seen = lse_want != float("-inf")
    assert torch.equal(lse == float("-inf"), ~seen)
    assert (lse - lse_want)[seen].abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["plain", "e4m3 row", "int8 row"])
@pytest.mark.parametrize("route", ["triton", "reference"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_steps_compiled_and_in_cuda_graphs(kind: str, route: str, mode: str) -> None:
    """Lengths move on the device: nothing is compiled or recorded again for a longer sequence."""
    eager = cuda(kv.empty(kind, (3, 2, 64, 16), torch.bfloat16, 16))
    mine = copy.deepcopy(eager)
    torch.compiler.reset()
    _compat.counters.clear()
    for tensor in mine:  # or CUDA graphs are skipped: they would change an input that may move
        if tensor is not None:
            torch._dynamo.mark_static_address(tensor)
    with ixt.config.patch(enabled=True, decode_attention=route), torch.no_grad():
        run = torch.compile(cache_tests.step, fullgraph=True, mode=mode)
        for _ in range(6):
            new = cuda(cache_tests._new(3, 1))
            torch.compiler.cudagraph_mark_step_begin()
            for cache in (eager, mine):
                cache.lengths.add_(1)
            got = run(mine, *new).clone()
            want = cache_tests.step(eager, *new)
            torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)
    assert _compat.counters["inductor"]["cudagraph_skips"] == 0
    assert mine.lengths.tolist() == [6, 6, 6]
    moved = (kv.bits(mine.k).float() - kv.bits(eager.k).float()).abs()
    assert float((moved > 0).float().mean()) <= 0.01  # RoPE's ties


def test_captured_by_hand() -> None:
    """A replay reads lengths and positions anew: there is no synchronization, no host value."""
    cache = cuda(kv.empty("e4m3 row", (2, 2, 32, 64), torch.bfloat16, 8))
    k = torch.randn(2, 2, 1, 64, device="cuda").bfloat16()
    q = torch.randn(2, 4, 1, 64, device="cuda").bfloat16()

    def once() -> Tensor:
        cache.lengths.add_(1)
        ixt.append_kv_(cache, k, k)
        out = ixt.decode_attention(q, cache)
        assert isinstance(out, Tensor)
        return out

    with ixt.config.patch(decode_attention="triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            once()
        torch.cuda.synchronize()
        cache.lengths.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = once()
        cache.lengths.zero_()
        for turn in range(1, 5):
            k.normal_()
            graph.replay()
            assert cache.lengths.tolist() == [turn, turn]
            assert torch.isfinite(out).all()
    assert int((cache.k_scale != 0).sum()) == 2 * 2 * 4  # sequences, heads, tokens


@pytest.mark.parametrize("case", [*cache_tests.BAD])
def test_kernels_refuse_what_the_fakes_do(case: str) -> None:
    args, words = cache_tests.BAD[case]
    with pytest.raises((TypeError, ValueError), match=words):
        ixt.append_kv_(*cuda(args))


@pytest.mark.parametrize("case", [*rope_tests.BAD])
def test_rope_refuses_what_the_fake_does(case: str) -> None:
    args, options, words = rope_tests.BAD[case]
    with pytest.raises((TypeError, ValueError), match=words):
        ixt.rope(*cuda(args), **cuda(options))
