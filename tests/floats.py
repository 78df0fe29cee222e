"""Comparing results with float64: distances in units of the last place, and float64 formulas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

FAMILY = frozenset(
    f"inductor_ext::{name}{way}"
    for name in ("rms_norm", "layer_norm", "silu", "gelu", "relu2", "swiglu", "geglu", "rope")
    for way in ("", "_backward")
) | {"inductor_ext::add_rms_norm", "inductor_ext::decode_attention"}
"""Ops whose sums may be taken in any order, or with fused multiplications, or whose exp, erf and
tanh are the back end's.

Their implementations are compared with float64 and not with each other, bit for bit.
"""
ROUNDED = frozenset(
    f"inductor_ext::{name}" for name in ("attention", "attention_backward", "attention_fp8")
)
"""Opaque ops with kernels that round otherwise than the definition: compared with float64 too."""
CHECKS = ("fake", "pure", "opcheck")
"""Of the harness, what is to hold for them on every device; on the CPU, where the formula itself
runs, so do "reference" and "decomposition"."""


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours of ``dtype`` at a float64 value, as float64."""
    info = torch.finfo(dtype)
    magnitude = value.abs().clamp(min=info.smallest_normal, max=info.max)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def require_close(
    got: Tensor, want: Tensor, slack: Tensor | float = 0.0, *, ulps: float = 1.0
) -> None:
    """Assert ``|got - want| <= ulps * ulp(want) + slack``, with infinities where they belong.

    For fp32 results, whose own arithmetic has no guard bits, 8 ulp are allowed.
    """
    assert want.dtype == torch.float64
    assert got.shape == want.shape
    allowed = (8 if got.dtype == torch.float32 else ulps) * ulp(want, got.dtype) + slack
    rounded = want.to(got.dtype)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    error = (got.double() - want).abs()
    # a value that rounds to infinity may as well round to the largest number, and back
    largest = torch.finfo(got.dtype).max
    near = (error <= allowed) | (got.double().clamp(-largest, largest) - want).abs().le(allowed)
    bad = ~(same | near)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} differ; at {first} got {got[first].item()}, "
            f"true value {want[first].item()}"
        )


def require_rounding_of(got: Tensor, want: Tensor, error: float) -> None:
    """Assert that each result is the rounding of some number within ``want * (1 ± error)``."""
    assert want.dtype == torch.float64
    ends = [(want * (1 + sign * error)).to(got.dtype) for sign in (-1, 1)]
    bad = (got < torch.minimum(*ends)) | (got > torch.maximum(*ends)) | got.isnan()
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()}"


@contextlib.contextmanager
def as_float64() -> Iterator[None]:
    """Let the formulas' ``.float()`` keep float64, so that gradcheck sees no rounding."""
    with mock.patch.object(Tensor, "float", Tensor.double):
        yield
