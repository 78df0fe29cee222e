"""The modes of other libraries, against torchao's own functions, bit for bit.

vLLM's are not compared with vLLM itself: their values are spelled out below.
"""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from inductor_ext.ops import modes
from inductor_ext.testing import require_equal

MODES = [
    modes.quantize_fp8_mode,
    modes.quantize_mxfp8_mode,
    modes.quantize_int8_mode,
    modes.quantize_nvfp4_mode,
]
KINDS = ["normal", "wide", "zeros", "infinities", "nans", "subnormals", "near_max", "powers"]
kind_ = pytest.mark.parametrize("kind", KINDS)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _x(kind: str, dtype: torch.dtype) -> Tensor:
    return cases.values(kind, 18 * 256, dtype).view(18, 256)


def _same(mode: str, got: Any, want: Any) -> None:
    """A NaN is a NaN: torch's cast keeps its sign, ours does not."""
    require_equal(mode, "against torchao", tuple(got), tuple(want), nan_equal=True)


@kind_
@pytest.mark.parametrize("dtype", list(cases.INPUTS))
@pytest.mark.parametrize("target", list(cases.TARGETS))
def test_fp8_training(kind: str, dtype: str, target: str) -> None:
    theirs = pytest.importorskip("torchao.float8.float8_utils")
    granularity = pytest.importorskip("torchao.float8.config").ScalingGranularity
    x, out = _x(kind, cases.INPUTS[dtype]), cases.TARGETS[target]
    for block, axis in ((0, None), (-1, -1)):
        by = granularity.TENSORWISE if block == 0 else granularity.AXISWISE
        scale = theirs.tensor_to_scale(x, out, scaling_granularity=by, axiswise_dim=axis)
        codes = theirs.to_fp8_saturated(x.float() * scale, out)
        _same("fp8", modes.quantize_fp8_mode(x, out, block, "torchao_training"), (codes, scale))


@kind_
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fp8_training_blocks(kind: str, dtype: str) -> None:
    theirs = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = _x(kind, cases.INPUTS[dtype])
    codes, scale = theirs.torch_blockwise_scale_act_quant_lhs(x, 128)
    got = modes.quantize_fp8_mode(x, E4M3, 128, "torchao_training")
    _same("fp8 blocks", got, (codes, scale.contiguous()))


@kind_
@pytest.mark.parametrize("dtype", list(cases.INPUTS))
@pytest.mark.parametrize("target", list(cases.TARGETS))
def test_fp8_inference(kind: str, dtype: str, target: str) -> None:
    theirs = pytest.importorskip("torchao.quantization.quant_primitives")
    x, out = _x(kind, cases.INPUTS[dtype]), cases.TARGETS[target]
    for block, size in ((0, (18, 256)), (-1, (1, 256)), (128, (1, 128))):
        scale = theirs._choose_scale_float8(x, list(size), out)
        codes = theirs._quantize_affine_float8(x, scale, out)
        got = modes.quantize_fp8_mode(x, out, block, "torchao_inference")
        _same("fp8", got, (codes, scale.reshape(got[1].shape)))


@kind_
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mode", modes.MX_MODES)
def test_mxfp8(kind: str, dtype: str, mode: str) -> None:
    theirs = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    if not hasattr(theirs, "_e8m0_scale_to_reciprocal_fp32"):
        pytest.skip("torchao before 0.19 had other rules for tiny and infinite blocks")
    x = _x(kind, cases.INPUTS[dtype])
    rule = getattr(theirs.ScaleCalculationMode, mode.removeprefix("torchao_").upper())
    for out in (E4M3, E5M2):
        scales, codes = theirs.to_mx(x, out, 32, rule)
        got = modes.quantize_mxfp8_mode(x, out, mode)
        assert torch.equal(got[1], scales.view(torch.uint8))
        usable = (got[1] != 255).repeat_interleave(32, -1)
        assert got[0].float()[~usable].isnan().all()
        ours, other = (torch.where(usable, c.view(torch.uint8), 0) for c in (got[0], codes))
        assert torch.equal(ours, other)


@kind_
@pytest.mark.parametrize("dtype", list(cases.INPUTS))
def test_int8(kind: str, dtype: str) -> None:
    workflow = pytest.importorskip("torchao.quantization.quantize_.workflows.int8.int8_tensor")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    x = _x(kind, cases.INPUTS[dtype])
    kinds = ((0, granularity.PerTensor()), (-1, granularity.PerRow()))
    for block, by in (*kinds, (32, granularity.PerGroup(32))):
        theirs = workflow.Int8Tensor.from_hp(x, by)
        codes, scale = modes.quantize_int8_mode(x, block)
        _same("int8 scale", (scale,), (theirs.scale.reshape(scale.shape),))
        # A cast of NaN to an integer is what the processor makes of it; ours is 0.
        spread = scale if block <= 0 else scale.repeat_interleave(block, -1)
        known = ~(spread.isnan() | x.isnan() | (spread.isinf() & x.isinf())).expand(x.shape)
        assert torch.equal(codes[known], theirs.qdata[known])
        assert not codes[~known].any()


@kind_
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("levels", [1, 2])
def test_nvfp4(kind: str, dtype: str, levels: int) -> None:
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = _x(kind, cases.INPUTS[dtype])
    whole = theirs.per_tensor_amax_to_scale(x.float().nan_to_num().abs().max())
    given = whole if levels == 2 else None
    scales, codes = theirs.nvfp4_quantize(x, 16, given)
    got = modes.quantize_nvfp4_mode(x, given, "torchao")
    _same("nvfp4 scales", (got[1],), (scales.reshape(got[1].shape),))
    wild = x.isnan().view(18, -1, 2).any(-1) | got[1].float().isnan().repeat_interleave(8, -1)
    inverse = (1.0 / whole if levels == 2 else torch.tensor(1.0)) / got[1].float()
    wild |= (x.float() * inverse.repeat_interleave(16, -1)).isnan().view(18, -1, 2).any(-1)
    assert torch.equal(got[0][~wild], codes.view(torch.uint8).reshape(got[0].shape)[~wild])


def test_vllm_fp8() -> None:
    """A scale of at least 1/(448*512), NaN ignored, division instead of multiplication."""
    x = torch.zeros(4, 128)
    x[1, 0], x[2, 0], x[2, 1], x[3, :2] = 1.0, 3.0, float("nan"), torch.tensor([7.0, 1.3])
    for block in (-1, 128):
        codes, scale = modes.quantize_fp8_mode(x, E4M3, block, "vllm")
        want = torch.tensor([[0.0], [1.0], [3.0], [7.0]]) / torch.full((4, 1), 448.0)
        want[0] = 1 / (448 * 512)
        assert torch.equal(scale, want)
        assert codes[1, 0] == codes[2, 0] == codes[3, 0] == 448
        assert codes[2, 1].float().isnan()
        assert torch.equal(codes[3, 1], (torch.tensor(1.3) / want[3, 0]).to(E4M3))
    codes, scale = modes.quantize_fp8_mode(x, E4M3, 0, "vllm")
    assert scale.item() == (torch.tensor(7.0) / torch.tensor(448.0)).item()


def test_vllm_nvfp4() -> None:
    x = torch.zeros(2, 32)
    x[0, :16] = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, -6, -0.25, -3])
    codes, scales = modes.quantize_nvfp4_mode(x, torch.tensor(448.0), "vllm")
    assert scales.float().tolist() == [[448.0, 0.0], [0.0, 0.0]]
    assert codes[0, :8].tolist() == [0x00, 0x21, 0x32, 0x44, 0x65, 0x66, 0xF7, 0xD8]
    assert not codes[0, 8:].any()
    assert not codes[1].any()


CASES: list[tuple[Any, tuple[Any, ...], str]] = [
    (MODES[0], (torch.ones(4, 32), E4M3, 48, "vllm"), "`block` must be -1, 0, 32, 64, 128 or 256"),
    (MODES[0], (torch.ones(4, 33), E4M3, 32, "vllm"), "`x` must have rows of a multiple of 32"),
    (MODES[0], (torch.ones(4, 32), torch.int8, 0, "vllm"), "`dtype` must be float8_e4m3fn or"),
    (MODES[0], (torch.ones(4, 32), E4M3, 0, "te"), "`mode` must be .* got \"te\""),
    (MODES[1], (torch.ones(4, 16), E4M3, "torchao_floor"), "`x` must have rows of a multiple"),
    (MODES[1], (torch.ones(4, 32), E4M3, "floor"), '`mode` must be "torchao_floor" or'),
    (MODES[2], (torch.ones(4, 32).double(), 0), "`x` must be bfloat16, float16 or float32"),
    (MODES[3], (torch.ones(4, 32), None, "vllm"), "`global_scale` must be given"),
    (MODES[3], (torch.ones(4, 32), torch.ones(2), "torchao"), "`global_scale` must have one"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_bad_input(number: int) -> None:
    op, arguments, message = CASES[number]
    for run in (op, torch.compile(lambda *a: op(*a), fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match=message):
            run(*arguments)
