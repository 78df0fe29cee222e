"""Append to a KV cache, in place: schemas, fakes and contracts.

Arithmetic and addressing: ``decompositions/kv_cache.py``; kernel: ``kernels/cuda/kv_cache.cu``.
On the CPU the ops run as PyTorch.  The compiler calls them as they are, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import kv_cache as reference

from ..registry import register
from ..validation import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dtype,
    check_like,
    check_same_device,
    check_tensor,
)
from ._cache_args import (
    QUANTIZED,
    capacity,
    check_cache,
    check_integers,
    check_largest,
    check_one_scale,
    check_places,
    check_row_scales,
    check_written,
)
from ._library import define


def _check_new(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    positions: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Check what both ops take."""
    check_cache(k_cache, v_cache)
    check_written("k_cache", k_cache)
    check_written("v_cache", v_cache)
    check_tensor("k", k)
    check_dtype("k", k.dtype, INPUT_DTYPES)
    check_same_device("k", k, "k_cache", k_cache)
    heads, head = k_cache.shape[1], k_cache.shape[3]
    if k.dim() != 4 or k.shape[1] != heads or k.shape[3] != head:
        raise ValueError(f"`k` must have the shape (B, {heads}, S, {head}), got {tuple(k.shape)}")
    check_like("v", v, "k", k)
    batch, tokens = k.shape[0], k.shape[2]
    check_places(k_cache, batch, lengths, block_table)
    if positions is not None:
        check_integers("positions", positions, k_cache, (torch.int32, torch.int64))
        if tuple(positions.shape) != (batch, tokens):
            raise ValueError(
                f"`positions` must have the shape {(batch, tokens)}, got {tuple(positions.shape)}"
            )


def _fake(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    _check_new(k_cache, v_cache, k, v, lengths, positions, block_table)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if k_cache.dtype.itemsize > 1:
        check_dtype("k_cache", k_cache.dtype, (k.dtype,))
        for name, scale in scales.items():
            if scale is not None:
                raise ValueError(f"`{name}` must be None for a cache that is not quantized")
        return
    check_dtype("k_cache", k_cache.dtype, FP8_DTYPES)
    for name, scale in scales.items():
        if scale is not None:
            check_one_scale(name, scale, k_cache)


def _fake_row(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
) -> None:
    _check_new(k_cache, v_cache, k, v, lengths, positions, block_table)
    check_dtype("k_cache", k_cache.dtype, QUANTIZED)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_row_scales(name, scale, k_cache)
        check_written(name, scale)


def _eager(formula: Callable[..., None], first: int) -> Callable[..., None]:
    """Return the formula behind a look at the positions; ``first``: the place of ``lengths``."""

    def run(*args: Any) -> None:
        rest = (*args[first:], None, None, None)
        lengths, positions, block_table = rest[:3]
        last = lengths if positions is None else positions + 1
        name = "lengths" if positions is None else "positions + 1"
        check_largest(name, last, capacity(args[0], block_table))
        formula(*args)

    run.__name__ = formula.__name__
    return run


append_kv_ = define(
    "append_kv_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor lengths,"
    " Tensor? positions=None, Tensor? block_table=None, Tensor? k_scale=None,"
    " Tensor? v_scale=None) -> ()",
    fake=_fake,
    reference=_eager(reference.append_kv_, 4),
    compiled=False,
)
append_kv_row_ = define(
    "append_kv_row_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scale,"
    " Tensor(d!) v_scale, Tensor k, Tensor v, Tensor lengths, Tensor? positions=None,"
    " Tensor? block_table=None) -> ()",
    fake=_fake_row,
    reference=_eager(reference.append_kv_row_, 6),
    compiled=False,
)


def sample_cache(
    dtype: torch.dtype, device: torch.device, *, paged: bool, rows: bool
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Return keys, values and their scales by token, lengths and the block table of a small cache.

    Two sequences of up to 12 tokens, 3 heads of 16: contiguous, or 7 pages of 4 tokens each.
    """
    shape = (7, 3, 4, 16) if paged else (2, 3, 12, 16)
    codes = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2)]
    if dtype.itemsize == 1:
        made = [c.view(dtype) for c in codes]
    else:
        made = [c.to(dtype) for c in codes]
    if rows:
        made += [torch.zeros(*shape[:3], 1, device=device) for _ in range(2)]
    table = torch.tensor([[6, 1, 3], [0, 5, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 12], dtype=torch.int32, device=device)
    return made, lengths, table if paged else None


def sample_heads(dtype: torch.dtype, device: torch.device, tokens: int = 5) -> list[Tensor]:
    """Return new keys and values, as transposed views of projections."""
    generator = torch.Generator(device=device).manual_seed(0)
    made = torch.randn(2, 2, tokens, 3, 16, generator=generator, device=device).to(dtype)
    return [t.transpose(1, 2) for t in made]


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, dtype in enumerate((torch.bfloat16, *INPUT_DTYPES, *FP8_DTYPES)):
        of = dtype if dtype in INPUT_DTYPES else torch.bfloat16
        new = sample_heads(of, device)
        made, lengths, table = sample_cache(dtype, device, paged=bool(number % 2), rows=False)
        scale = torch.tensor(0.0123, device=device)
        scales = (scale, scale.reshape(1)) if dtype in FP8_DTYPES else (None, None)
        yield (*made, *new, lengths, None, table, *scales)
        positions = torch.tensor([[0, 2, -1, 5, 11], [-7, 1, 9, 8, 3]], device=device)
        yield (*made, *new, lengths, positions, table, *scales)


def _inputs_row(device: torch.device) -> Iterator[tuple[Any, ...]]:
    for number, dtype in enumerate((*QUANTIZED, *QUANTIZED)):
        new = sample_heads(INPUT_DTYPES[number % 3], device)
        made, lengths, table = sample_cache(dtype, device, paged=bool(number % 2), rows=True)
        yield (*made, *new, lengths, None, table)
        positions = torch.tensor([[0, 2, -1, 5, 11], [-7, 1, 9, 8, 3]], device=device)
        yield (*made, *new, lengths, positions.int(), table)


# Writing to its arguments is all they do: the compiler calls the kernel, in place.
for _op, _formula, _samples in (
    (append_kv_, reference.append_kv_, _inputs),
    (append_kv_row_, reference.append_kv_row_, _inputs_row),
):
    register(_op, reference=_formula, opaque=True, autograd=None, inputs=_samples)
