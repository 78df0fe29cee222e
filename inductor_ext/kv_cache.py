"""The KV cache of a decoder layer: its tensors, and the public functions above the ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._call import call
from .api import _guard_mode
from .formats import FP8, INT8, Format
from .validation import check_tensor


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, as plain tensors (a pytree); see docs/kv_cache.md.

    Attributes:
        k, v: (B, H, T, D), T tokens a sequence; or pages, (P, H, page, D).  The last dimension
            lies together in memory, the others as they like.  bfloat16, float16, float32,
            float8_e4m3fn, float8_e5m2 or int8.
        lengths: (B,) int32: the tokens of each sequence, those of the running step among them.
            Layers may share it: add to it once a step, before the first layer.
        k_scale, v_scale: float32, what codes are multiplied by: (*k.shape[:-1], 1), written with
            the codes; or one element for all, FP8 only, given.  None where nothing is quantized.
        block_table: (B, N) int32, the pages of each sequence in order; None where contiguous.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    block_table: Tensor | None = None

    @classmethod
    def contiguous(
        cls,
        batch: int,
        heads: int,
        tokens: int,
        head_dim: int,
        format: Format | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """Return an empty cache of ``tokens`` a sequence.

        Args:
            format: ``FP8(granularity="row")``, ``FP8(granularity="tensor")`` (with scales of 1, to
                be replaced), ``INT8(granularity="row")``, or None to keep ``dtype``.
        """
        tensors = _empty((batch, heads, tokens, head_dim), format, dtype, device)
        return cls(tensors[0], tensors[1], _no_tokens(batch, device), *tensors[2:])

    @classmethod
    def paged(
        cls,
        pages: int,
        heads: int,
        page: int,
        head_dim: int,
        block_table: Tensor,
        format: Format | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> KVCache:
        """Return an empty cache of ``pages`` of ``page`` tokens, on the device of ``block_table``.

        Args:
            block_table: (B, N) int32; entries outside 0 .. pages - 1 are pages that are not there.
        """
        check_tensor("block_table", block_table)
        device = block_table.device
        tensors = _empty((pages, heads, page, head_dim), format, dtype, device)
        lengths = _no_tokens(block_table.shape[0], device)
        empty = cls(tensors[0], tensors[1], lengths, *tensors[2:])
        return empty._replace(block_table=block_table)


def append_kv_(cache: KVCache, k: Tensor, v: Tensor, positions: Tensor | None = None) -> None:
    """Write new keys and values into the cache, quantized as it is, in one kernel.

    Args:
        cache: changed in place, but for ``lengths``, which count the new tokens already.
        k, v: (B, H, S, D) bfloat16, float16 or float32, any strides.
        positions: (B, S) int32 or int64, where each token goes; default the last S places of each
            sequence, ``lengths - S`` on.  A negative place, one behind the cache's end or on a
            page that is not there is dropped (on the CPU, eagerly, one behind the end is an
            error).  Of two tokens with one place either may stay.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    _check(cache, k=k, v=v)
    k_scale, v_scale = cache.k_scale, cache.v_scale
    where = (cache.lengths, positions, cache.block_table)
    if k_scale is not None and v_scale is not None and k_scale.dim() == 4:
        op = torch.ops.inductor_ext.append_kv_row_.default
        call(op, cache.k, cache.v, k_scale, v_scale, k, v, *where)
    else:
        op = torch.ops.inductor_ext.append_kv_.default
        call(op, cache.k, cache.v, k, v, *where, k_scale, v_scale)


def decode_attention(
    q: Tensor,
    cache: KVCache,
    *,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention of the last n tokens of each sequence over the cache, causal.

    Args:
        q: (B, Hq, n, D) bfloat16, float16 or float32: tokens ``lengths - n`` on, whose keys and
            values the cache has already.  Hq is a multiple of the cache's heads.
        scale: of the scores; D^-½ by default.
        window: how many tokens a query sees, itself among them; default all.
        return_lse: also the logarithm of the sum of exponentials, float32 (B, Hq, n).

    Returns:
        (B, Hq, n, D) of the dtype of ``q``; 0 (lse -inf) for a query that sees no token.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    _check(cache, q=q)
    if window is not None and window <= 0:
        raise ValueError(f"`window` must be above 0, got {window}")
    out, lse = call(
        torch.ops.inductor_ext.decode_attention.default, q, cache.k, cache.v, cache.lengths,
        cache.block_table, cache.k_scale, cache.v_scale, scale, window or 0,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check(cache: KVCache, **tensors: Tensor) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"`cache` must be a KVCache, got {type(cache).__name__}")
    for name, tensor in (*tensors.items(), ("k_cache", cache.k), ("v_cache", cache.v)):
        check_tensor(name, tensor)
    check_tensor("lengths", cache.lengths)


def _empty(
    shape: tuple[int, ...],
    format: Format | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> list[Tensor]:
    """Return keys, values and, where there are any, their scales."""
    if format is None:
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
    by_row = isinstance(format, (FP8, INT8)) and format.granularity == "row"
    if not by_row and not (isinstance(format, FP8) and format.granularity == "tensor"):
        raise ValueError(
            '`format` must be None, FP8 with granularity "row" or "tensor", or INT8 with '
            f'granularity "row", got {format}'
        )
    if isinstance(format, FP8) and (format.eps or format.pow2):
        raise ValueError(f"`format` must have eps 0 and pow2 False for a cache, got {format}")
    code = torch.int8 if isinstance(format, INT8) else format.dtype  # type: ignore[attr-defined]
    codes = [torch.zeros(shape, dtype=torch.uint8, device=device).view(code) for _ in range(2)]
    if by_row:
        scales = [torch.zeros(*shape[:3], 1, device=device) for _ in range(2)]
    else:
        scales = [torch.ones((), device=device) for _ in range(2)]
    return codes + scales


def _no_tokens(batch: int, device: torch.device | str | None) -> Tensor:
    return torch.zeros(batch, dtype=torch.int32, device=device)
