"""FP8 attention whose result is codes for the next product; their bound: test_attention_fp8.py."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CASES, Case
from test_attention_fp8 import E4M3, ONE, OPS, C, quantized

import inductor_ext as ixt


def test_definition_of_codes() -> None:
    """With a scale for the result: the result in float32, quantized as ``quantize`` does."""
    for name, case in CASES.items():
        codes, scales = quantized(case, "tensor")
        for number in (40.0, 1e4):  # the second saturates
            scale = torch.tensor(number)
            rest = (*case.rest(), -1)
            got, lse = OPS.attention_fp8(*codes, *scales, *rest, E4M3, scale)
            wide, same = OPS.attention_fp8(*codes, *scales, *rest, torch.float32)
            with ixt.config.patch(attention="math"):
                want = OPS.quantize_fp8_static(wide, scale, E4M3)[0]
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
            assert got.transpose(1, 2).is_contiguous()
            assert torch.equal(lse, same)


def test_public_codes() -> None:
    """``out_scale`` gives what ``quantize`` gives of the result, but for one rounding to bf16."""
    case = Case(heads=4, kv=2, dim=32, queries=70, keys=70, right=0)
    q, k, v = (t.bfloat16() for t in case.tensors())
    fmt, scale = ixt.FP8(granularity="tensor"), torch.tensor([50.0])
    got, lse = ixt.attention(q, k, v, causal=True, format=fmt, out_scale=scale, return_lse=True)
    assert isinstance(got, ixt.Quantized)
    wide, same = ixt.attention(q, k, v, causal=True, format=fmt, return_lse=True)
    assert torch.equal(lse, same)
    assert torch.equal(got.scale_inv, torch.tensor(50.0).reciprocal())
    want = ixt.quantize(wide, fmt, scale.reshape(()))
    moved = got.codes.view(torch.uint8) != want.codes.view(torch.uint8)
    assert float(moved.float().mean()) < 0.03  # ties of a bf16 between two codes: 1 in 16, halved
    back = ixt.dequantize(got, fmt)
    assert ((back.float() - wide.float()).abs() <= 2.0**-4 * wide.float().abs() + 2.0**-10).all()


def test_codes_without_a_scale_and_gradients_of_codes_are_refused() -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="`out_scale` must be None without `format`"):
        ixt.attention(x, x, x, out_scale=ONE)
    x.requires_grad_()
    with pytest.raises(ValueError, match="`out_scale` must be None where gradients are asked for"):
        ixt.attention(x, x, x, format=ixt.FP8(granularity="tensor"), out_scale=ONE)
    with pytest.raises(TypeError, match="`dtype` must be bfloat16, float16 or float32"):
        OPS.attention_fp8(C, C, C, ONE, ONE, ONE, None, None, 1.0, -1, -1, -1, E4M3)
