"""Which kernel a grouped GEMM takes on a GPU: rules over sizes and dtypes, no tensor is read."""

from __future__ import annotations

import torch

LIBRARY_ON = ((9, 0), (10, 0))
"""Architectures that ``torch._scaled_grouped_mm`` has kernels for."""
LIBRARY_EXPERTS = 1023
FIRST_WITH_FP8 = (8, 9)


def choose_grouped_mm(
    capability: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    result: torch.dtype,
    sizes: tuple[int, int, int],
    *,
    blocks: bool,
    split_k: bool,
    pin: str = "auto",
) -> tuple[str, str]:
    """Return the kernel's name and why: "library", "triton" or "definition".

    What the library refuses is from torch 2.11's checks and its kernel's; that it is the faster
    one where it serves is to be measured.

    Args:
        capability: of the GPU, (9, 0) for instance.
        dtypes: of ``a`` and ``b``. result: dtype of the product.
        sizes: experts, N, K (K: tokens where these are split).
        blocks: a scale a block, not a row.
        split_k: the tokens are the inner dimension (the weights' gradient).
        pin: "auto", or "triton" for our kernel also where the library serves.
    """
    experts, n, k = sizes
    if capability < FIRST_WITH_FP8:
        return "definition", "no FP8 tensor cores before sm_89"
    if pin == "triton":
        return "triton", 'config.gemm is "triton"'
    if blocks:
        return "triton", "torch has no grouped kernel for scales of blocks"
    if split_k:
        return "triton", "torch's kernel aborts on an expert's tokens that no 16 divides, and on 0"
    if result != torch.bfloat16:
        return "triton", "torch's kernel writes bfloat16 only"
    if dtypes != (torch.float8_e4m3fn, torch.float8_e4m3fn):
        return "triton", "torch's kernel multiplies float8_e4m3fn only"
    if n % 16 or k % 16:
        return "triton", "torch's kernel wants multiples of 16 for N and K"
    if experts > LIBRARY_EXPERTS:
        return "triton", f"torch's kernel takes at most {LIBRARY_EXPERTS} experts"
    if capability not in LIBRARY_ON:
        return "triton", "torch's kernel is built for sm_90 and sm_100 only"
    return "library", "torch._scaled_grouped_mm takes this"
