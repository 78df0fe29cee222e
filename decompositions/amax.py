"""Largest magnitudes, NaN elements skipped, in ATen."""

from __future__ import annotations

from torch import Tensor, where


def amax(x: Tensor) -> Tensor:
    """Return max |x| over everything as fp32, 0-d: NaN elements skipped, 0 for the empty set.

    Args:
        x: (...) bfloat16, float16 or float32.
    """
    return amax_ignoring_nan(x.float(), False)


def amax_row(x: Tensor) -> Tensor:
    """Return max |x| over each row (the last dimension) as fp32, (*, 1), NaN elements skipped.

    Args:
        x: (*, K) bfloat16, float16 or float32.
    """
    return amax_ignoring_nan(x.float(), True)


def amax_ignoring_nan(v: Tensor, rowwise: bool) -> Tensor:
    """Return max |v| over the last dimension (kept, size 1) or over everything (0-d).

    NaN elements are skipped, the maximum of an empty set is 0.
    """
    if rowwise:
        shape = (*v.shape[:-1], 1)
        if v.numel() == 0:
            return v.new_zeros(shape)
        return where(v.isnan(), 0.0, v.abs()).amax(-1, keepdim=True)
    if v.numel() == 0:
        return v.new_zeros(())
    return where(v.isnan(), 0.0, v.abs()).amax()
