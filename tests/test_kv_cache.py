"""Appending to a KV cache: codes and places, what is dropped, compiled in place, refused."""

from __future__ import annotations

from typing import Any

import kv
import pytest
import torch
from test_rope import refuse
from torch import Tensor
from torch.utils import _pytree as pytree

import inductor_ext as ixt
from inductor_ext import fake_gpu
from inductor_ext.decompositions import kv_cache as formulas
from inductor_ext.testing import running


def append_by_formula(cache: ixt.KVCache, k: Tensor, v: Tensor, positions: Tensor | None) -> None:
    """As ``append_kv_``, without the look at the positions that the CPU takes."""
    where = cache.lengths, positions, cache.block_table
    if cache.k_scale is not None and cache.k_scale.dim() == 4:
        formulas.append_kv_row_(*cache[:2], cache.k_scale, cache.v_scale, k, v, *where)  # type: ignore[arg-type]
    else:
        formulas.append_kv_(*cache[:2], k, v, *where, cache.k_scale, cache.v_scale)


def test_every_token_in_its_place() -> None:
    """The oracle's codes, token by token; what has no place is dropped."""
    for label, sample in kv.samples():
        want = kv.appended(label.partition(",")[0], sample)
        append_by_formula(sample.cache, sample.k, sample.v, sample.positions)
        kv.require_same(sample.cache, want, label)


def test_behind_the_end() -> None:
    cache = ixt.KVCache.contiguous(2, 1, 4, 8)
    k = torch.ones(2, 1, 1, 8).bfloat16()
    cache.lengths.fill_(5)
    with pytest.raises(ValueError, match="`lengths` must be at most 4, what the cache holds of a"):
        ixt.append_kv_(cache, k, k)
    with pytest.raises(ValueError, match=r"`positions \+ 1` must be at most 4, .* got 8"):
        ixt.append_kv_(cache, k, k, torch.tensor([[-1], [7]]))
    ixt.append_kv_(cache, k, k, torch.tensor([[-1], [-7]]))  # padding
    assert not cache.k.any()


def test_a_cache_is_a_pytree() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    cache = ixt.KVCache.paged(6, 2, 4, 16, table, ixt.INT8())
    leaves, spec = pytree.tree_flatten(cache)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, ixt.KVCache)
    assert again.block_table is table
    assert (cache.k.dtype, cache.k_scale.shape) == (torch.int8, (6, 2, 4, 1))  # type: ignore[union-attr]


def step(cache: ixt.KVCache, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A layer's own part of decoding: RoPE, append, attention; q, k and v as projected."""
    q, k = (ixt.rope(t.transpose(1, 2), cos, sin) for t in (q, k))
    ixt.append_kv_(cache, k, v.transpose(1, 2))
    out = ixt.decode_attention(q, cache)
    assert isinstance(out, Tensor)
    return out


def _new(batch: int, tokens: int) -> list[Tensor]:
    made = [kv.randn(batch, tokens, h, 16, seed=h).bfloat16() for h in (4, 2)]
    return [*made, made[1] + 1, *kv.randn(2, batch, tokens, 8)]


@pytest.mark.contract
def test_compiled_in_place_and_once_for_all_lengths() -> None:
    """Of tokens 5, 2 and 3 after 6: no size is special, not even that of the batch."""
    run = running.own_code(step, "step")
    eager, compiled = (
        kv.empty("e4m3 row", (3, 2, 16, 16), torch.bfloat16, page=4) for _ in range(2)
    )
    places = [t.data_ptr() for t in compiled[:2]]
    with running.plugin(True), torch.no_grad():
        run = running.compiled(run, dynamic=True)
        for turn, tokens in enumerate((6, 5, 2, 3)):
            before = running.graphs()
            new = _new(3, tokens)
            for cache in (eager, compiled):
                cache.lengths.add_(tokens)
            want, got = step(eager, *new), run(compiled, *new)
            assert torch.equal(got, want)
            kv.require_same(compiled, eager, f"step {turn}")
            assert turn == 0 or running.graphs() == before
    assert [t.data_ptr() for t in compiled[:2]] == places


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("kind", ["plain", "e4m3 row", "e4m3 given", "int8 row"])
def test_generated_code_copies_no_cache(kind: str, page: int) -> None:
    """A kernel of RoPE for keys, one for queries; the values are read where they were projected."""
    cache = kv.empty(kind, (2, 8, 512, 128), torch.bfloat16, page)
    q, k = torch.empty(2, 64, 32, 128).bfloat16(), torch.empty(2, 64, 8, 128).bfloat16()
    table = torch.empty(64, 64)
    with ixt.config.patch(enabled=True, strict=True), torch.no_grad():
        (graph,) = fake_gpu.capture(step, (cache, q, k, k + 1, table, table), "sm_90")
    append = "append_kv_row_" if kind.endswith("row") else "append_kv_"
    ops = [f"torch.ops.inductor_ext.{name}.default" for name in (append, "decode_attention")]
    assert list(graph.externs) == ops
    assert len(graph.kernels) == 2
    made = [line for line in graph.source.splitlines() if " = empty_strided_cuda(" in line]
    assert len(made) == 2  # rotated keys and queries
    shape = ", ".join(map(str, cache.k.shape))
    assert not any(f"({shape})" in line for line in made)


def test_quantized_codes_appended_later() -> None:
    """RoPE -> codes of the keys is one kernel; what is written is the same as by the append."""
    k = kv.randn(2, 5, 3, 32).bfloat16()
    table = kv.randn(5, 16)

    def codes(k: Tensor, table: Tensor) -> Any:
        return ixt.quantize(ixt.rope(k.transpose(1, 2), table, table), ixt.FP8())[:2]

    with ixt.config.patch(enabled=True, strict=True):
        (graph,) = fake_gpu.capture(codes, (k, table), "sm_90")
    assert (len(graph.kernels), len(graph.externs)) == (1, 0)
    cache = kv.empty("e4m3 row", (2, 3, 5, 32), torch.bfloat16, 0)
    cache.lengths.fill_(5)
    rotated = ixt.rope(k.transpose(1, 2), table, table)
    ixt.append_kv_(cache, rotated, rotated)
    want, scale = codes(k, table)
    assert torch.equal(cache.k.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(cache.k_scale, scale)  # type: ignore[arg-type]


CACHE = ixt.KVCache.contiguous(2, 3, 8, 16)
ROWS = ixt.KVCache.contiguous(2, 3, 8, 16, ixt.FP8())
GIVEN = ixt.KVCache.contiguous(2, 3, 8, 16, ixt.FP8(granularity="tensor"))
NEW = torch.ones(2, 3, 1, 16).bfloat16()
TABLE = torch.zeros(3, 2, dtype=torch.int32)
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "k's shape": ((CACHE, NEW[..., :8], NEW), r"`k` must have the shape \(B, 3, S, 16\), got"),
    "v's shape": ((CACHE, NEW, NEW[:1]), "`v` must have the shape of `k`"),
    "k's dtype": ((CACHE, NEW.double(), NEW), "`k` must be bfloat16, float16 or float32, got"),
    "cache's dtype": ((CACHE, NEW.half(), NEW.half()), "`k_cache` must be float16, got bfloat16"),
    "batch": ((CACHE, NEW[:1], NEW[:1]), "`k_cache` must hold 1 sequences|`lengths` must have"),
    "lengths": (
        (CACHE._replace(lengths=CACHE.lengths.long()), NEW, NEW), "`lengths` must be int32, got"
    ),
    "table": (
        (CACHE._replace(block_table=TABLE), NEW, NEW), r"`block_table` must have the shape \(2, "
    ),
    "positions": (
        (CACHE, NEW, NEW, torch.zeros(2, dtype=torch.int64)),
        r"`positions` must have the shape \(2, 1\), got \(2,\)",
    ),
    "expanded": (
        (CACHE._replace(k=CACHE.k[:1].expand(2, -1, -1, -1)), NEW, NEW),
        "`k_cache` must not be expanded: it is written to",
    ),
    "strides": (
        (CACHE._replace(k=CACHE.k.transpose(2, 3), v=CACHE.v.transpose(2, 3)), NEW, NEW),
        "`k_cache` must have stride 1 in its last dimension",
    ),
    "scales of a plain cache": (
        (CACHE._replace(k_scale=torch.ones(())), NEW, NEW), "`k_scale` must be None for a cache"
    ),
    "scales' shape": (
        (ROWS._replace(k_scale=ROWS.k_scale[:, :2]), NEW, NEW),  # type: ignore[index]
        r"`k_scale` must have the shape \(2, 3, 8, 1\), a scale a token and head",
    ),
    "one scale": (
        (GIVEN._replace(v_scale=torch.ones(3)), NEW, NEW), r"`v_scale` must have one element, got"
    ),
    "gradient": ((CACHE, NEW.clone().requires_grad_(), NEW), "`k` must not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    args, words = BAD[case]
    refuse(ixt.append_kv_, args, words, compiled=case in ("lengths", "scales' shape"))


def test_bad_formats() -> None:
    with pytest.raises(ValueError, match="`format` must be None, FP8 with granularity"):
        ixt.KVCache.contiguous(1, 1, 1, 8, ixt.MXFP8())
    with pytest.raises(ValueError, match="`format` must have eps 0 and pow2 False"):
        ixt.KVCache.contiguous(1, 1, 1, 8, ixt.FP8(pow2=True))
    with pytest.raises(TypeError, match="`cache` must be a KVCache, got tuple"):
        ixt.append_kv_(tuple(CACHE), NEW, NEW)  # type: ignore[arg-type]
