"""Philox4x32-10 as Inductor IR, with the bits of ``decompositions/philox.py``.

The CPU computes in int64, which has no overflow; CUDA in int32, whose products wrap, and with the
instruction for the upper half of a product.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_ext._compat import ops
from inductor_ext.decompositions.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

_LOW = 0xFFFFFFFF


class Words:
    """32-bit unsigned arithmetic on one device."""

    def __init__(self, device: torch.device) -> None:
        self.wide = device.type == "cpu"
        self.dtype = torch.int64 if self.wide else torch.int32

    def constant(self, value: int) -> Any:
        """Return a word, given in [0, 2^32)."""
        signed = value if self.wide or value < 1 << 31 else value - (1 << 32)
        return ops.constant(signed, self.dtype)

    def halves(self, value: Any) -> tuple[Any, Any]:
        """Return the low and the high word of an int64."""
        high = ops.bitwise_right_shift(value, ops.constant(32, torch.int64))
        if self.wide:
            low = ops.constant(_LOW, torch.int64)
            return ops.bitwise_and(value, low), ops.bitwise_and(high, low)
        return ops.to_dtype(value, torch.int32), ops.to_dtype(high, torch.int32)

    def add(self, a: Any, value: int) -> Any:
        """Return a + value modulo 2^32."""
        total = ops.add(a, self.constant(value))
        return ops.bitwise_and(total, self.constant(_LOW)) if self.wide else total

    def multiply(self, a: Any, factor: int) -> tuple[Any, Any]:
        """Return the high and the low word of a product."""
        if not self.wide:
            # By assembly, the lower half too: Inductor would compute with the index of a block
            # as with a number that never overflows.
            return self._asm("mul.hi.u32", a, factor), self._asm("mul.lo.u32", a, factor)
        upper = ops.mul(a, self.constant(factor >> 16))
        lower = ops.mul(a, self.constant(factor & 0xFFFF))
        sixteen = self.constant(16)
        carried = ops.add(upper, ops.bitwise_right_shift(lower, sixteen))
        low = ops.add(ops.bitwise_left_shift(self._lower(upper, 0xFFFF), sixteen), lower)
        return ops.bitwise_right_shift(carried, sixteen), self._lower(low, _LOW)

    def _asm(self, instruction: str, a: Any, factor: int) -> Any:
        return ops.inline_asm_elementwise(
            a, self.constant(factor), asm=f"{instruction} $0, $1, $2;", constraints="=r,r,r",
            dtype=torch.int32, is_pure=True, pack=1,
        )  # fmt: skip

    def _lower(self, a: Any, mask: int) -> Any:
        return ops.bitwise_and(a, self.constant(mask))

    def byte(self, word: Any, shift: Any) -> Any:
        """Return the byte that starts at a bit of a word, as fp32."""
        moved = ops.bitwise_right_shift(word, ops.to_dtype(shift, self.dtype))
        return ops.to_dtype(ops.bitwise_and(moved, self.constant(255)), torch.float32)


def philox4x32(
    words: Words, counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]
) -> tuple[Any, Any, Any, Any]:
    """Return four random words."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = words.multiply(a, MULTIPLIERS[0])
        high1, low1 = words.multiply(c, MULTIPLIERS[1])
        xor = ops.bitwise_xor
        a, b, c, d = xor(xor(high1, b), k0), low1, xor(xor(high0, d), k1), low0
        k0, k1 = words.add(k0, KEY_STEPS[0]), words.add(k1, KEY_STEPS[1])
    return a, b, c, d


def block_words(words: Words, block: Any, stream: int, rng: Any) -> tuple[Any, Any, Any, Any]:
    """Return the bits of a block of 16 elements; ``decompositions/philox.block_bits``.

    Args:
        block: its number, an int64 value.
        stream: 0 or 1.
        rng: the loader of (seed, offset).
    """
    low, high = words.halves(block)
    if stream:
        high = ops.bitwise_or(high, words.constant(1 << 31))
    return philox4x32(words, (low, high, *words.halves(rng([1]))), words.halves(rng([0])))
