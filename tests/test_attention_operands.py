"""What FP8 attention makes of q, k and v: a scale a head, and V with its tokens innermost."""

from __future__ import annotations

from collections.abc import Iterator

import cases
import pytest
import torch
from attention_cases import random_bytes
from torch import Tensor

from inductor_ext.decompositions import fp8 as reference
from inductor_ext.testing import require_equal

OPS = torch.ops.inductor_ext
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E4M3, E5M2 = cases.TARGETS.values()
SHAPES = {
    "cpu": ((2, 3, 50, 16), (1, 2, 0, 16), (1, 1, 7, 5), (0, 2, 3, 8)),
    # short heads, long ones of every alignment, and more heads than fill a GPU
    "cuda": ((2, 3, 50, 16), (1, 2, 0, 16), (0, 2, 70000, 8), (1, 32, 2048, 128), (2, 3, 1100, 64),
             (1, 2, 9000, 24), (1, 3, 40000, 5), (3, 200, 600, 128)),
}  # fmt: skip


def layouts(x: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield (B, H, S, D) in several orders of memory, ``x`` having the last of them."""
    batch, heads, tokens, dim = x.shape
    yield x.transpose(1, 2).contiguous().transpose(1, 2), "(B, S, H, D)"
    packed = x.new_zeros(batch, tokens, 3, heads, dim)
    packed[:, :, 1] = x.transpose(1, 2)
    yield packed[:, :, 1].transpose(1, 2), "(B, S, 3, H, D)"
    room = x.new_zeros(x.numel() + 1)
    room[1:] = x.transpose(1, 2).reshape(-1)
    yield room[1:].view(batch, tokens, heads, dim).transpose(1, 2), "(B, S, H, D), not aligned"
    yield x[:, :1].expand(x.shape), "expanded"
    yield x.mT.contiguous().mT, "(B, H, D, S)"
    yield x, "(B, H, S, D)"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(cases.INPUTS))
def test_heads(device: str, dtype: str) -> None:
    """The op, wherever the heads lie, against the reference; heads of every kind of value."""
    for number, shape in enumerate(SHAPES[device]):
        batch, heads, *last = shape
        count = last[0] * last[1]
        made = torch.stack([cases.values(k, count, cases.INPUTS[dtype]) for k in cases.VALUES])
        if count:
            made[0, -1] = -100.0
        x = made[torch.arange(batch * heads) % len(made)].view(shape).to(device)
        options = ((0.0, False), (1.5, True))[number % 2]
        for y, layout in layouts(x):
            for target in (E4M3, E5M2):
                got = OPS.quantize_fp8_heads(y, target, *options)
                want = reference.quantize_fp8_heads(y, target, *options)
                label = f"{shape} {layout}"
                require_equal("heads", device, got, want, nan_equal=[False, True], sample=label)


def test_heads_are_rows() -> None:
    x = cases.values("normal", 4 * 6 * 8, torch.bfloat16).view(2, 6, 2, 8).transpose(1, 2)
    codes, scale = OPS.quantize_fp8_heads(x, E4M3)
    rows, scales = OPS.quantize_fp8_row(x.reshape(4, 48), E4M3)
    assert torch.equal(codes.view(4, 48).view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(scale.view(4, 1), scales)


@pytest.mark.contract
@pytest.mark.parametrize("device", DEVICES)
def test_refusals(device: str) -> None:
    x = torch.zeros(2, 3, 4, 8, device=device)
    with pytest.raises((ValueError, RuntimeError), match="`x` must have 4 dimensions"):
        OPS.quantize_fp8_heads(x[0], E4M3)
    with pytest.raises((TypeError, RuntimeError), match="`x` must be bfloat16, float16 or float32"):
        OPS.quantize_fp8_heads(x.double(), E4M3)
    with pytest.raises((ValueError, RuntimeError), match="`eps` must be"):
        OPS.quantize_fp8_heads(x, E4M3, -1.0)


@pytest.mark.gpu
def test_tokens_inside() -> None:
    from inductor_ext.kernels.triton.attention_fp8 import tokens_inside

    for shape in ((2, 3, 130, 24), (1, 2, 1100, 16), (1, 1, 5, 200), (1, 8, 4096, 128)):
        v = random_bytes(*shape).cuda()
        for x in (v, v.contiguous(), v.mT.contiguous().mT[:, :, 1:]):
            turned = tokens_inside(x.view(E4M3))
            assert turned.stride(2) == 1
            assert torch.equal(turned.view(torch.uint8), x)
