"""Scaled matrix product, the exact definition."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return ``cast((a @ b) * scale_a * scale_b + bias)``.

    The product of the codes is accumulated in float64, where a sum of e4m3 products is exact, so
    that the result does not depend on the order of the sum; it is rounded to fp32 once, then
    scaled by ``scale_a``, then ``scale_b``, the bias is added, each in fp32, and cast.

    Args:
        a: (M, K) codes. b: (K, N) codes.
        scale_a: one element or (M, 1). scale_b: one element or (1, N); dequantization multipliers.
        bias: (N,) or None.
        dtype: of the result, (M, N).
        fast_accum: no effect here; a GPU may accumulate in fewer bits.
    """
    if scale_a.numel() == 1:
        scale_a = scale_a.reshape(1, 1)
    if scale_b.numel() == 1:
        scale_b = scale_b.reshape(1, 1)
    product = torch.mm(a.to(torch.float64), b.to(torch.float64)).float()
    result = product * scale_a * scale_b
    if bias is not None:
        result = result + bias.float()
    return result.to(dtype)
