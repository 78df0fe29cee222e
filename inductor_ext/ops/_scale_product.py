"""Scales and bias after an unscaled product: one kernel on CUDA, PyTorch's passes elsewhere.

Kernel: ``kernels/cuda/scale_product.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import LIBRARY, has_cuda_kernel

NAME = "_scale_product_"
LIBRARY.define(
    f"{NAME}(Tensor(a!) out, Tensor product, Tensor scale_a, Tensor scale_b, Tensor? bias, "
    "float unit) -> ()"
)
torch.library.register_fake(f"inductor_ext::{NAME}", lambda *args: None, lib=LIBRARY)
_OP = torch.ops.inductor_ext._scale_product_.default


def finish(
    out: Tensor,
    product: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    unit: float = 1.0,
) -> None:
    """Write ``cast(product * (scale_a * unit) * (scale_b * unit) + bias)``.

    Each step is rounded to fp32.

    Args:
        out: (M, N), contiguous.
        product: (>= M, >= N) fp32 or int32, padding included.
        scale_a, scale_b: one element, or one for each row and column, (n, 1) or (1, n).
    """
    if out.is_cuda and has_cuda_kernel(NAME):
        _OP(out, product, scale_a, scale_b, bias, unit)
    else:
        finish_in_passes(out, product, scale_a, scale_b, bias, unit)


def finish_in_passes(
    out: Tensor,
    product: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    unit: float = 1.0,
) -> None:
    """Do what :func:`finish` says with PyTorch's elementwise kernels: the same bits."""
    scale_a, scale_b = _factor(scale_a, unit, (-1, 1)), _factor(scale_b, unit, (1, -1))
    scaled = product[: out.shape[0], : out.shape[1]] * scale_a
    if bias is None:
        torch.mul(scaled, scale_b, out=out)
    else:
        torch.add(scaled.mul_(scale_b), bias, out=out)


def _factor(scale: Tensor, unit: float, shape: tuple[int, int]) -> Tensor:
    scale = scale.reshape(() if scale.numel() == 1 else shape)
    return scale if unit == 1.0 else scale * unit
