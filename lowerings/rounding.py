"""``inductor_ext::round_to_dtype`` as Inductor IR."""

from __future__ import annotations

from typing import Any

from inductor_ext._compat import ops
from inductor_ext._neighbours import comes_from_memory

from .vocabulary import load_unrounded, pointwise, rounded


def round_to_dtype(x: Any) -> Any:
    """Round to the dtype that ``x`` (bf16 or fp16) has in the graph; nothing if it is stored."""
    if comes_from_memory(x):
        return x
    load, dtype, device = load_unrounded(x), x.get_dtype(), x.get_device()
    return pointwise(
        x,
        dtype,
        x.get_size(),
        lambda index: ops.to_dtype(rounded(load(index), dtype, device), dtype),
    )
