"""Which kernel a grouped GEMM takes: rules over sizes and dtypes; no tensor is read.

What the library refuses is from torch 2.11's checks and from its kernel's own.
"""

from __future__ import annotations

import torch

from ._routes_gemm import Capability

ROUTES = ("library", "triton", "reference")
"""``library``: ``torch._scaled_grouped_mm``.  ``triton``: a kernel of our own.  ``reference``: the
exact definition, in float64, which reads the offsets on the host."""

FIRST_WITH_FP8 = (8, 9)
LIBRARY_ON = ((9, 0), (10, 0))
LIBRARY_EXPERTS = 1023
LIBRARY_MULTIPLE = 16
"""Architectures that torch has kernels for; its most experts; what divides its N and K."""
LIBRARY_FROM_ROWS = 512
"""Rows an expert, on average, from which torch's kernel is the faster.  On an H200, ms, torch's and
ours: 2048 rows 1.82 and 2.50, 256 rows 1.49 and 1.45, 8 rows 0.65 and 0.47."""


def choose_grouped_mm(
    capability: Capability | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    result: torch.dtype,
    sizes: tuple[int, int, int],
    *,
    blocks: bool,
    split_k: bool,
    rows: int,
    pin: str = "auto",
) -> tuple[str, str]:
    """Return the route of a grouped GEMM, one of :data:`ROUTES`, and why.

    Args:
        capability: of the GPU, or None for a CPU.
        dtypes: of ``a`` and ``b``. result: dtype of the product.
        sizes: experts, N, K (K: tokens where these are split).
        blocks: a scale a block, not a row.
        split_k: the tokens are the inner dimension (the weights' gradient).
        rows: of all experts together.
        pin: "auto", or the route to take: ``config.grouped_gemm``.

    Raises:
        ValueError: a pinned route that does not take the call.
    """
    unable = None
    if capability is None:
        unable = "the exact definition: no CUDA device"
    elif capability < FIRST_WITH_FP8:
        unable = "no FP8 tensor cores before sm_89"
    refusal = unable or _refusal(capability, dtypes, result, sizes, blocks, split_k)
    if pin == "auto":
        if unable is not None:
            return "reference", unable
        if refusal is None and rows >= LIBRARY_FROM_ROWS * sizes[0]:
            return "library", f"{LIBRARY_FROM_ROWS} rows an expert or more: torch's is faster"
        return "triton", refusal or f"fewer than {LIBRARY_FROM_ROWS} rows an expert: ours is faster"
    obstacle = {"library": refusal, "triton": unable, "reference": None}[pin]
    if obstacle is not None:
        raise ValueError(f'config.grouped_gemm must not be "{pin}" for this product: {obstacle}')
    return pin, f'config.grouped_gemm = "{pin}"'


def _refusal(
    capability: Capability | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    result: torch.dtype,
    sizes: tuple[int, int, int],
    blocks: bool,
    split_k: bool,
) -> str | None:
    """Say why torch's kernel does not take the call, or None."""
    experts, n, k = sizes
    if blocks:
        return "torch has no grouped kernel for scales of blocks"
    if split_k:
        return "torch's kernel aborts on an expert's tokens that no 16 divides, and on 0"
    if result != torch.bfloat16:
        return "torch's kernel writes bfloat16 only"
    if dtypes != (torch.float8_e4m3fn, torch.float8_e4m3fn):
        return "torch's kernel multiplies float8_e4m3fn only"
    if n % LIBRARY_MULTIPLE or k % LIBRARY_MULTIPLE:
        return f"torch's kernel wants multiples of {LIBRARY_MULTIPLE} for N and K"
    if experts > LIBRARY_EXPERTS:
        return f"torch's kernel takes at most {LIBRARY_EXPERTS} experts"
    if capability not in LIBRARY_ON:
        return "torch's kernel is built for sm_90 and sm_100 only"
    return None
