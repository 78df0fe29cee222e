"""Which kernel attention over a KV cache takes, and in how many splits."""

from __future__ import annotations

import importlib.util

import torch

from .. import config

MULTIPROCESSORS_FILLED = 2
"""Programs a multiprocessor that splitting aims at."""
SHORTEST_SPLIT, MOST_SPLITS = 256, 64
"""Tokens of a split at least, for the longest sequence that the cache may hold; splits at most."""


def choose_decode_attention(
    device: str, capability: tuple[int, int], q: torch.dtype, cache: torch.dtype, head: int
) -> tuple[str, str]:
    """Return the route, "triton" or "reference", and why.

    Args:
        device: "cuda", "cpu" or another type.
        capability: of the card, (0, 0) elsewhere.
        q, cache: dtypes of queries and cache.
        head: the size of a head.
    """
    reason = _not_for_triton(device, capability, q, cache, head)
    if reason:
        return "reference", reason
    if config.decode_attention != "auto":
        pin = config.decode_attention
        return pin, f'config.decode_attention is "{pin}"'
    return "triton", "4 to 40 times the reference's speed on an H200 (docs/kv_cache.md)"


def _not_for_triton(
    device: str, capability: tuple[int, int], q: torch.dtype, cache: torch.dtype, head: int
) -> str:
    if device != "cuda":
        return f"the Triton kernel is written for CUDA, not for {device}"
    if torch.version.hip is not None:
        return "the Triton kernel is written for CUDA, not for ROCm"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if cache.itemsize == 1 and cache.is_floating_point and capability < (8, 9):
        return f"Triton reads float8 from sm_89 on, this is sm_{capability[0]}{capability[1]}"
    if head > 256:
        return f"the Triton kernel takes heads of at most 256, got {head}"
    if cache.itemsize > 1 and cache != q:
        return "the Triton kernel takes queries of the cache's dtype where it is not quantized"
    return ""


def splits_for(programs: int, tokens: int, multiprocessors: int) -> int:
    """Return among how many programs the tokens of a sequence go.

    Args:
        programs: those of one split: sequences x heads of the cache x tiles of queries.
        tokens: the most that the cache holds of a sequence; lengths are on the device.
        multiprocessors: of the card.
    """
    wanted = -(-MULTIPROCESSORS_FILLED * multiprocessors // max(programs, 1))
    return max(1, min(wanted, -(-tokens // SHORTEST_SPLIT), MOST_SPLITS))
