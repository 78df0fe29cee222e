"""``inductor_ext::round_to_dtype`` as Inductor IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_ext._compat import ops
from inductor_ext._neighbours import comes_from_memory

from .vocabulary import load_unrounded, pointwise, rounded


def round_to_dtype(x: Any, before_addition: bool = False) -> Any:
    """Round to the dtype that ``x`` (bf16 or fp16) has in the graph; nothing if it is stored."""
    if comes_from_memory(x):
        return x
    load, dtype, device = load_unrounded(x), x.get_dtype(), x.get_device()

    def element(index: Sequence[Any]) -> Any:
        value = rounded(load(index), dtype, device, before_addition=before_addition)
        return ops.to_dtype(value, dtype)

    return pointwise(x, dtype, x.get_size(), element)
