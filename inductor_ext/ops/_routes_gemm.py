"""Which kernel multiplies scaled matrices: a table, and the function that reads it.

Plain data in, a name and a reason out; no tensor is read.  The op's implementation and ``explain``
ask the same function.  The rules are what torch and cuBLASLt say they take.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from .. import config

ROUTES = ("library", "dequantize", "reference")
"""``library``: torch's scaled GEMM (cuBLASLt, CUTLASS) multiplies the codes.  ``dequantize``: the
operands become bf16 (fp32 where that loses bits and the result is fp32), and cuBLAS multiplies
those.  ``reference``: the exact definition, in float64."""

BLOCK_OF_LIBRARY = 128
"""Elements of K that share a scale in cuBLASLt's FP8 blocks."""

Capability = tuple[int, int]


class Native(NamedTuple):
    """From which compute capability on (and before which) torch's GEMM takes a format."""

    first: Capability
    before: Capability
    what: str


LATER = (1000, 0)
NATIVE = {
    "fp8": Native((8, 9), LATER, "FP8 tensor cores (sm_89 and later)"),
    "fp8_block": Native((9, 0), (10, 0), "scales by 1x128 and 128x128 (sm_90 only)"),
    "mxfp8": Native((10, 0), LATER, "MXFP8 tensor cores (sm_100 and later)"),
    "nvfp4": Native((10, 0), LATER, "NVFP4 tensor cores (sm_100 and later)"),
    "int8": Native((8, 0), LATER, "INT8 tensor cores and int32 sums (sm_80 and later)"),
}


def choose_gemm(
    kind: str,
    capability: Capability | None,
    *,
    block: int = 0,
    e5m2: bool = False,
    pin: str = "auto",
) -> tuple[str, str]:
    """Return the route of a scaled GEMM, one of :data:`ROUTES`, and why.

    Args:
        kind: a key of :data:`NATIVE`.
        capability: of the GPU, or None for a CPU (and for ROCm, where nothing was tried).
        block: how many elements of K share a scale, for "fp8_block" and for groups of "int8".
        e5m2: whether an operand is float8_e5m2.
        pin: "auto", or the route to take: ``config.gemm``.

    Raises:
        ValueError: a pinned route that does not take the call.
    """
    refusal = _refusal(kind, capability, block, e5m2)
    if pin == "auto":
        if capability is None:
            return "reference", "the exact definition: no CUDA device"
        if refusal is None:
            return "library", NATIVE[kind].what
        return "dequantize", refusal
    if pin == "library" and refusal is not None:
        raise ValueError(f'config.gemm must not be "library" for this product: {refusal}')
    if pin == "dequantize" and capability is None:
        raise ValueError('config.gemm must not be "dequantize" without a CUDA device')
    return pin, f'config.gemm = "{pin}"'


def _refusal(kind: str, capability: Capability | None, block: int, e5m2: bool) -> str | None:
    """Say why torch's GEMM does not take the call, or None."""
    if capability is None:
        return "no CUDA device"
    native = NATIVE[kind]
    its = f"this device is sm_{capability[0]}{capability[1]}"
    if kind == "fp8_block" and block != BLOCK_OF_LIBRARY:
        return f"cuBLASLt has blocks of 128, these are of {block}"
    if kind == "fp8_block" and e5m2:
        return "torch's GEMM takes blocks of float8_e4m3fn alone"
    if kind == "int8" and block:
        return "int32 sums cannot run across groups of their own scale"
    if capability < native.first or capability >= native.before:
        return f"torch's GEMM has {native.what}; {its}"
    return None


def route(kind: str, like: torch.Tensor, block: int = 0, *, e5m2: bool = False) -> tuple[str, str]:
    """Return :func:`choose_gemm` for the device of a tensor, real or fake, and the pin."""
    capability = capability_of(like.device)
    return choose_gemm(kind, capability, block=block, e5m2=e5m2, pin=config.gemm)


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU, None for anything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # the function is part of the key: `fake_gpu` puts another in its place
    return _capability(torch.cuda.get_device_capability, device.index)


def is_hopper(device: torch.device) -> bool:
    """Return whether a device is of compute capability 9."""
    capability = capability_of(device)
    return capability is not None and capability[0] == 9


@functools.cache
def _capability(ask: Any, index: int | None) -> Capability:
    major, minor = ask(index)
    return major, minor
