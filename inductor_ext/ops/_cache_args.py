"""Checks of a KV cache's tensors, shared by the ops that write and that read it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..validation import FP8_DTYPES, INPUT_DTYPES, check_dtype, check_same_device, check_tensor

QUANTIZED = (*FP8_DTYPES, torch.int8)
LARGEST_HEAD = 512
"""Elements of a head that a warp of the CUDA kernel holds in registers."""


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check keys and values alike: (B or pages, H, tokens, D), D together in memory."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache)
        check_dtype(name, cache.dtype, (*INPUT_DTYPES, *QUANTIZED))
        if cache.dim() != 4:
            raise ValueError(
                f"`{name}` must have the shape (B, H, T, D), or (pages, H, page, D) with a block "
                f"table, got {tuple(cache.shape)}"
            )
        if not 1 <= cache.shape[3] <= LARGEST_HEAD:
            raise ValueError(
                f"`{name}` must have a last size of 1 to {LARGEST_HEAD}, got {cache.shape[3]}"
            )
        if cache.stride(3) != 1:
            raise ValueError(f"`{name}` must have stride 1 in its last dimension")
    check_dtype("v_cache", v_cache.dtype, (k_cache.dtype,))
    check_same_device("v_cache", v_cache, "k_cache", k_cache)
    if v_cache.shape != k_cache.shape:
        raise ValueError(
            f"`v_cache` must have the shape of `k_cache`, {tuple(k_cache.shape)}, got "
            f"{tuple(v_cache.shape)}"
        )


def check_places(k_cache: Tensor, batch: int, lengths: Tensor, block_table: Tensor | None) -> None:
    """Check lengths (B,) and block table (B, N), both int32, against cache and batch."""
    check_integers("lengths", lengths, k_cache)
    if lengths.dim() != 1 or lengths.shape[0] != batch:
        raise ValueError(f"`lengths` must have the shape ({batch},), got {tuple(lengths.shape)}")
    if block_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(
                f"`k_cache` must hold {batch} sequences, as many as are given, got "
                f"{k_cache.shape[0]}"
            )
        return
    check_integers("block_table", block_table, k_cache)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"`block_table` must have the shape ({batch}, pages of a sequence), got "
            f"{tuple(block_table.shape)}"
        )


def check_integers(
    name: str, value: Tensor, k_cache: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.int32,)
) -> None:
    """Check an integer tensor that says where tokens lie."""
    check_tensor(name, value)
    check_dtype(name, value.dtype, dtypes)
    check_same_device(name, value, "k_cache", k_cache)


def check_one_scale(name: str, scale: Tensor, k_cache: Tensor) -> None:
    """Check a scale of all tokens: one fp32 number."""
    check_tensor(name, scale)
    check_dtype(name, scale.dtype, (torch.float32,))
    check_same_device(name, scale, "k_cache", k_cache)
    if scale.numel() != 1:
        raise ValueError(f"`{name}` must have one element, got {tuple(scale.shape)}")


def check_row_scales(name: str, scale: Tensor, k_cache: Tensor) -> None:
    """Check a scale by token and head: fp32 (*cache.shape[:-1], 1)."""
    check_tensor(name, scale)
    check_dtype(name, scale.dtype, (torch.float32,))
    check_same_device(name, scale, "k_cache", k_cache)
    if tuple(scale.shape) != (*k_cache.shape[:3], 1):
        raise ValueError(
            f"`{name}` must have the shape {(*k_cache.shape[:3], 1)}, a scale a token and head, "
            f"got {tuple(scale.shape)}"
        )


def check_written(name: str, cache: Tensor) -> None:
    """Refuse a tensor whose elements share memory: it is written to."""
    steps = zip(cache.shape, cache.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in steps):
        raise ValueError(f"`{name}` must not be expanded: it is written to")


def check_largest(name: str, largest: Tensor, capacity: int) -> None:
    """Say, where looking is cheap, that a sequence is longer than its cache."""
    if largest.is_cpu and largest.numel() and int(largest.max()) > capacity:
        raise ValueError(
            f"`{name}` must be at most {capacity}, what the cache holds of a sequence, got "
            f"{int(largest.max())}"
        )


def capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Return how many tokens of a sequence the cache may hold."""
    size: int = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    return size
