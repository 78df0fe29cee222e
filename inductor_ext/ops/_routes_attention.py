"""Which kernel computes an attention: tables, and the two functions that read them.

Plain data in, a name and a reason out; no tensor is read.  The ops and ``explain`` ask the same
functions.  What a back end takes is what PyTorch 2.11 checks; the orders are what was measured
(docs/attention.md), or marked as still to be measured.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from .. import config

SDPA = ("cudnn", "flash", "efficient", "math")
"""``cudnn``, ``flash``, ``efficient``: the kernels that PyTorch ships; on a CPU "flash" is its CPU
kernel.  ``math``: the definition in plain PyTorch, fp32, any arguments and any device."""
FP8 = ("triton", "cudnn_frontend", "dequantize", "math")
"""``triton``: our kernel.  ``cudnn_frontend``: cuDNN's, through the package nvidia-cudnn-frontend
(the extra "cudnn"); it rounds the result to e4m3 first.  ``dequantize``: the operands become bf16
or fp16, then :data:`SDPA`.  ``math``: the definition in float64."""

ORDER: dict[tuple[int, int], tuple[tuple[str, ...], str]] = {
    (9, 0): (
        ("cudnn", "flash", "efficient", "math"),
        "0.98 ms against flash's 1.72 on an H200 (8192 tokens, 32 heads of 128, causal; backward "
        "2.76 against 4.88)",
    ),
}
"""By compute capability: the order in which back ends are tried, and why the first is first."""
ELSEWHERE = ("flash", "cudnn", "efficient", "math"), "PyTorch's own order; to be measured"

FP8_ORDER: dict[tuple[int, int], tuple[tuple[str, ...], str]] = {
    (9, 0): (
        ("triton", "dequantize", "math"),
        "8192 tokens, 32 heads of 128, causal, on an H200: cudnn_frontend 0.66 ms, triton 0.84, "
        "dequantize 1.29, and bf16 0.99",
    ),
}
"""As :data:`ORDER`, for FP8."""
FRONTEND_FROM = 4096
"""From so many keys on cuDNN's frontend is tried first.  Its call takes more of the host's time (at
2048 tokens 0.17 ms for triton's 0.14, of which cuDNN's kernel takes 0.06)."""
FP8_ELSEWHERE = ("dequantize", "math"), "our Triton kernel has been measured on sm_90 alone"


class Call(NamedTuple):
    """What a choice depends on.

    ``capability`` is None without a CUDA device; ``left`` and ``right`` are the window, -1 for no
    bound; ``blind`` says that some query may see no key; ``whole``, of FP8, that q, k and v have
    one scale each.
    """

    capability: tuple[int, int] | None
    dtype: torch.dtype
    dim: int
    queries: int
    keys: int
    left: int
    right: int
    packed: bool
    blind: bool
    empty: bool
    whole: bool = True

    @property
    def banded(self) -> bool:
        """Whether the mask is neither none nor plain causal."""
        return self.left >= 0 or self.right > 0


def choose_attention(call: Call) -> tuple[str, str]:
    """Return one of :data:`SDPA` and why.

    Raises:
        ValueError: ``config.attention`` names one of them that cannot take the call.
    """
    if config.attention in SDPA:
        return _pinned(config.attention, _refusal(config.attention, call))
    order, why = ELSEWHERE if call.capability is None else ORDER.get(call.capability, ELSEWHERE)
    if call.capability is None:
        order, why = ("flash", "math"), "PyTorch's kernel for the CPU"
    refused: list[str] = []
    for name in order:
        reason = _refusal(name, call)
        if reason is None:
            return name, why if not refused else "; ".join(refused)
        refused.append(f"not {name}: {reason}")
    raise AssertionError("the math back end takes every call")


def choose_attention_fp8(call: Call) -> tuple[str, str]:
    """Return one of :data:`FP8` and why; raises as :func:`choose_attention` does."""
    if config.attention in FP8:
        return _pinned(config.attention, _refusal_fp8(config.attention, call))
    if call.capability is None:
        return "math", "the exact definition: no CUDA device"
    order, why = FP8_ORDER.get(call.capability, FP8_ELSEWHERE)
    if call.keys >= FRONTEND_FROM and call.capability in FP8_ORDER:
        order = ("cudnn_frontend", *order)
    return next((name, why) for name in order if _refusal_fp8(name, call) is None)


def _pinned(name: str, reason: str | None) -> tuple[str, str]:
    if reason is not None:
        raise ValueError(f'config.attention must not be "{name}" for this call: {reason}')
    return name, f'config.attention = "{name}"'


def _refusal(name: str, call: Call) -> str | None:
    """Say why a back end cannot take the call, or None."""
    if name == "math":
        return None
    if call.empty:
        return "there is nothing to compute"
    if call.capability is None:
        return _refusal_cpu(name, call)
    if call.capability < (8, 0):
        return "it is used from sm_80 on"
    if name != "efficient" and call.dtype == torch.float32:
        return "it takes bfloat16 and float16"
    if call.dim % 8:
        return "it takes head dimensions that are multiples of 8"
    if call.dim > (128 if name == "cudnn" else 256):
        return f"it takes heads of at most {128 if name == 'cudnn' else 256}, these are {call.dim}"
    if name == "flash":
        return None
    if call.packed:
        return "packed sequences go to flash"
    if call.banded:
        return "windows go to flash"
    if call.blind:
        return "some queries see no key"
    if name == "cudnn" and call.right == 0 and call.queries != call.keys:
        return "its causal mask is top-left"
    if name == "cudnn" and 1 in (call.queries, call.keys):
        return "it takes more than one token"
    return None


def _refusal_cpu(name: str, call: Call) -> str | None:
    if name != "flash":
        return "it runs on CUDA"
    if call.packed or call.banded or (call.right == 0 and call.queries != call.keys):
        return "it has no windows, packed sequences or bottom-right masks"
    return None


def _refusal_fp8(name: str, call: Call) -> str | None:
    if name == "math":
        return None
    if call.empty:
        return "there is nothing to compute"
    if name == "dequantize":
        return None
    if call.capability is None:
        return "it runs on CUDA"
    if name == "cudnn_frontend":
        return _refusal_frontend(call, call.capability)
    if call.capability < (8, 9):
        return "FP8 tensor cores came with sm_89"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if call.dim > 256:
        return f"it takes heads of at most 256, these are {call.dim}"
    return None


def _refusal_frontend(call: Call, capability: tuple[int, int]) -> str | None:
    most = 256 if capability[0] == 9 else 128
    if capability < (9, 0):
        return "cuDNN's FP8 attention starts with sm_90"
    if importlib.util.find_spec("cudnn") is None:
        return "the package nvidia-cudnn-frontend is not installed"
    if not call.whole:
        return "it takes one scale for each of q, k and v"
    if call.packed or call.banded or call.blind:
        return "windows and packed sequences go to triton"
    if call.right == 0 and call.queries != call.keys:
        return "its causal mask is top-left"
    if call.dim % 16 or call.dim > most:
        return f"it takes head dimensions that are multiples of 16, up to {most}"
    return None
