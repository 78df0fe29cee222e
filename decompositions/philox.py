"""Philox4x32-10 in int64 ATen arithmetic: counter-based random bits, the same on every device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit random words for each 128-bit counter.

    Args:
        counter: four int64 tensors with values in [0, 2^32), the least significant word first.
        key: two int64 tensors with values in [0, 2^32); they broadcast with the counter.
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(a, MULTIPLIERS[0])
        high1, low1 = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _LOW, (k1 + KEY_STEPS[1]) & _LOW
    return a, b, c, d


def _multiply(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product, without leaving int64."""
    upper, lower = a * (factor >> 16), a * (factor & 0xFFFF)  # each below 2^48
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _LOW
    return high, low


def words_of(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high 32 bits of int64 numbers, each in [0, 2^32)."""
    return value & _LOW, (value >> 32) & _LOW


def block_bits(blocks: int, stream: int, rng: Tensor) -> Tensor:
    """Return 16 random bytes for each of ``blocks`` blocks: (blocks, 16) int64 in [0, 256).

    The counter of block b is (b mod 2^32, b div 2^32 + stream * 2^31, offset's low word, offset's
    high word), the key is (seed's low word, seed's high word); byte i is byte i % 4 (the lowest
    first) of word i div 4.

    Args:
        stream: 0 or 1; blocks of different streams never share a counter.
        rng: (2,) int64, the seed and the offset.
    """
    low, high = words_of(torch.arange(blocks, device=rng.device))
    offset = tuple(word.expand(blocks) for word in words_of(rng[1]))
    words = philox4x32((low, high | (stream << 31), *offset), words_of(rng[0]))
    shifts = torch.arange(0, 32, 8, device=rng.device)
    return ((torch.stack(words, -1)[..., None] >> shifts) & 255).reshape(blocks, 16)
