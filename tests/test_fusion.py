"""What fuses into what: kernels are counted and, on the reference torch, compared to the letter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu

TENSOR, ROW = ixt.FP8(granularity="tensor"), ixt.FP8(granularity="row")


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def norm_quantize_silu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = ixt.quantize(rms_norm(x, w), ROW)
    return F.silu(ixt.dequantize(q, ixt.FP8()))


def inputs(rows: int = 4096, columns: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(rows, columns, dtype=torch.bfloat16),
        torch.empty(columns, dtype=torch.bfloat16),
    )


def on_sm90(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> tuple[int, int]:
    """Return (kernels, opaque calls) of the one graph that ``fn`` becomes."""
    torch.compiler.reset()
    (graph,) = fake_gpu.capture(fn, args, target="sm_90", dynamic=dynamic)
    return len(graph.kernels), len(graph.externs)


def cpu_source(fn: Callable[..., Any], *args: Any) -> str:
    torch.compiler.reset()
    with _compat.inductor_config.patch(force_disable_caches=True):
        _, sources = _compat.run_and_get_code(torch.compile(fn, fullgraph=True), *args)
    (source,) = sources
    return str(source)


@pytest.mark.contract
def test_norm_quantize_dequantize_silu_is_one_kernel_on_cpu() -> None:
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    with ixt.config.patch(enabled=True):
        on = cpu_source(norm_quantize_silu, x, w)
    with ixt.config.patch(enabled=False):
        off = cpu_source(norm_quantize_silu, x, w)
    assert on.count("async_compile.cpp_pybinding(") == 1
    assert not re.search(r"= torch\.ops\.inductor_ext\.", on)
    assert off.count("async_compile.cpp_pybinding(") == 2
    assert len(re.findall(r"= torch\.ops\.inductor_ext\.\w+", off)) == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_norm_quantize_dequantize_silu_is_one_kernel_on_sm90(dynamic: bool) -> None:
    with ixt.config.patch(enabled=True):
        assert on_sm90(norm_quantize_silu, *inputs(), dynamic=dynamic) == (1, 0)
    with ixt.config.patch(enabled=False):
        kernels, opaque = on_sm90(norm_quantize_silu, *inputs(), dynamic=dynamic)
    assert kernels >= 2
    assert opaque == 2


CHAINS: dict[str, tuple[Callable[..., Any], int]] = {
    # name: (chain, kernels): a scale of the whole tensor takes a pass, a tiny maximum, a pass;
    # behind a norm a fill and one kernel.
    "static codes": (lambda x, w, s: ixt.quantize(x, TENSOR, s).codes, 1),
    "row": (lambda x, w, s: ixt.quantize(x, ROW)[:2], 1),
    "tensor": (lambda x, w, s: ixt.quantize(x, TENSOR)[:2], 3),
    "dequantize": (lambda x, w, s: ixt.dequantize((x.to(torch.float8_e5m2), s), ROW) + 1, 1),
    "rms_norm, static codes": (lambda x, w, s: ixt.quantize(rms_norm(x, w), TENSOR, s).codes, 1),
    "rms_norm, row": (lambda x, w, s: ixt.quantize(rms_norm(x, w), ROW)[:2], 1),
    "rms_norm, tensor": (lambda x, w, s: ixt.quantize(rms_norm(x, w), TENSOR)[:2], 2),
    "silu, row": (lambda x, w, s: ixt.quantize(F.silu(x) * w, ROW)[:2], 1),
    "layer_norm, row": (lambda x, w, s: ixt.quantize(F.layer_norm(x, w.shape, w), ROW)[:2], 1),
    "row, pow2, eps": (lambda x, w, s: ixt.quantize(x, ixt.FP8(eps=1e-4, pow2=True))[:2], 1),
}


@pytest.mark.parametrize("name", CHAINS)
def test_kernels_of_a_chain_on_sm90(name: str) -> None:
    chain, kernels = CHAINS[name]
    with ixt.config.patch(enabled=True):
        assert on_sm90(chain, *inputs(), torch.tensor(3.0)) == (kernels, 0)


@pytest.mark.parametrize("name", ["static codes", "row", "tensor", "static with amax"])
def test_sizes_of_which_nothing_is_known_on_sm90(name: str) -> None:
    """With sizes that may turn out to be 0 or 1, chains still compile to Triton alone."""
    chains = {"static with amax": lambda x, w, s: tuple(ixt.quantize(x, TENSOR, s))}
    chain = chains.get(name) or CHAINS[name][0]
    with ixt.config.patch(enabled=True), _compat.fx_config.patch(backed_size_oblivious=True):
        kernels, opaque = on_sm90(chain, *inputs(1, 64), torch.tensor(3.0), dynamic=True)
    assert opaque == 0
    assert kernels >= 1


def test_static_quantization_and_its_amax_read_the_input_once_on_sm90() -> None:
    """Codes and row maxima in one pass; the maximum of 4096 numbers, and with it 1 / scale."""
    with ixt.config.patch(enabled=True):
        (graph,) = fake_gpu.capture(
            lambda x, s: tuple(ixt.quantize(x, TENSOR, s)), (inputs()[0], torch.tensor(3.0))
        )
    sizes = sorted(
        max(int(n) for n in re.findall(r"numel = (\d+)", k.source)) for k in graph.kernels.values()
    )
    assert sizes == [4096, 4096]
    assert ["div.rn" in k.source for k in graph.kernels.values()] == [False, True]


def test_only_kernels_of_ours_keep_long_rows_in_registers() -> None:
    x, _ = inputs(4096, 8192)
    with ixt.config.patch(enabled=True):
        (ours,) = fake_gpu.capture(lambda x: ixt.quantize(x, ROW)[:2], (x,))
        (plain,) = fake_gpu.capture(lambda x: torch.softmax(x, -1), (x,))
    assert [name.split("_")[1] for name in ours.kernels] == ["per"]
    assert [name.split("_")[1] for name in plain.kernels] == ["red"]


def body(source: str) -> str:
    """Return a Triton kernel's arithmetic: without its decorators and index arithmetic."""
    lines = source[source.index("def triton_") :].splitlines()
    kept = [line for line in lines if re.match(r"    (tmp\d+ =|tl\.(store|debug))", line)]
    return "\n".join(line.strip() for line in kept) + "\n"


@pytest.mark.skipif(_compat.torch_release() != "2.11", reason="the golden sources are torch 2.11's")
class Golden(TestCase):
    """The fused kernels, to the letter; update with EXPECTTEST_ACCEPT=1."""

    maxDiff = None

    def kernel(self, fn: Callable[..., Any], *args: Any) -> str:
        with ixt.config.patch(enabled=True):
            (graph,) = fake_gpu.capture(fn, args, target="sm_90")
        (kernel,) = graph.kernels.values()
        return body(kernel.source)

    def test_row(self) -> None:
        self.assertExpectedInline(
            self.kernel(lambda x: ixt.quantize(x, ROW)[:2], inputs()[0]),
            """\
tmp0 = tl.load(in_ptr0 + (r0_1 + 2048*x0), None).to(tl.float32)
tmp1 = tmp0.to(tl.float32)
tmp2 = tl_math.abs(tmp1)
tmp3 = tl.inline_asm_elementwise('max.f32 $0, $1, 0f00000000;', '=f,f', [tmp2], dtype=tl.float32, is_pure=True, pack=1)
tmp4 = tmp3.to(tl.int32, bitcast=True)
tmp5 = tl.broadcast_to(tmp4, [XBLOCK, R0_BLOCK])
tmp7 = triton_helpers.max2(tmp5, 1)[:, None].to(tl.int32)
tmp8 = tl.full([1, 1], 0, tl.int32)
tmp9 = triton_helpers.maximum(tmp7, tmp8)
tmp10 = tmp9.to(tl.float32, bitcast=True)
tmp11 = tl.full([1, 1], 448.0, tl.float32)
tmp12 = tl.inline_asm_elementwise('div.rn.f32 $0, $1, $2;', '=f,f,f', [tmp11, tmp10], dtype=tl.float32, is_pure=True, pack=1)
tmp13 = tl.full([1, 1], float("inf"), tl.float32)
tmp14 = tmp12 == tmp13
tmp15 = tl.full([1, 1], 3.3895313892515355e+38, tl.float32)
tmp16 = tl.where(tmp14, tmp15, tmp12)
tmp17 = tl.full([1, 1], 0.0, tl.float32)
tmp18 = tmp10 > tmp17
tmp19 = tmp10 < tmp13
tmp20 = tmp18 & tmp19
tmp21 = tl.full([1, 1], 1.0, tl.float32)
tmp22 = tl.where(tmp20, tmp16, tmp21)
tmp23 = tl.inline_asm_elementwise('div.rn.f32 $0, $1, $2;', '=f,f,f', [tmp21, tmp22], dtype=tl.float32, is_pure=True, pack=1)
tmp24 = tmp1 * tmp22
tmp25 = tmp24.to(tl.float8e4nv)
tl.store(out_ptr2 + (x0), tmp23, None)
tl.store(out_ptr3 + (r0_1 + 2048*x0), tmp25, None)
""",
        )

    def test_norm_quantize_dequantize_silu(self) -> None:
        self.assertExpectedInline(
            self.kernel(norm_quantize_silu, *inputs()),
            """\
tmp0 = tl.load(in_ptr0 + (r0_1 + 2048*x0), None).to(tl.float32)
tmp17 = tl.load(in_ptr1 + (r0_1), None, eviction_policy='evict_last').to(tl.float32)
tmp1 = tmp0.to(tl.float32)
tmp2 = tmp1 * tmp1
tmp3 = tl.broadcast_to(tmp2, [XBLOCK, R0_BLOCK])
tmp5 = tl.sum(tmp3, 1)[:, None].to(tl.float32)
tmp6 = tl.full([1, 1], 2048.0, tl.float32)
tmp7 = (tmp5 / tmp6)
tmp8 = tl.full([1, 1], 1e-06, tl.float32)
tmp9 = tmp7 + tmp8
tmp10 = libdevice.rsqrt(tmp9)
tmp11 = tmp1 * tmp10
tmp12 = tmp11.to(tl.float32)
tmp13 = tmp12.to(tl.float32)
tmp14 = tmp13.to(tl.bfloat16)
tmp15 = tmp14.to(tl.float32)
tmp16 = tmp15.to(tl.float32)
tmp18 = tmp16 * tmp17
tmp19 = tmp18.to(tl.float32)
tmp20 = tmp19.to(tl.bfloat16)
tmp21 = tmp20.to(tl.float32)
tmp22 = tl_math.abs(tmp21)
tmp23 = tl.inline_asm_elementwise('max.f32 $0, $1, 0f00000000;', '=f,f', [tmp22], dtype=tl.float32, is_pure=True, pack=1)
tmp24 = tmp23.to(tl.int32, bitcast=True)
tmp25 = tl.broadcast_to(tmp24, [XBLOCK, R0_BLOCK])
tmp27 = triton_helpers.max2(tmp25, 1)[:, None].to(tl.int32)
tmp28 = tl.full([1, 1], 0, tl.int32)
tmp29 = triton_helpers.maximum(tmp27, tmp28)
tmp30 = tmp29.to(tl.float32, bitcast=True)
tmp31 = tl.full([1, 1], 448.0, tl.float32)
tmp32 = tl.inline_asm_elementwise('div.rn.f32 $0, $1, $2;', '=f,f,f', [tmp31, tmp30], dtype=tl.float32, is_pure=True, pack=1)
tmp33 = tl.full([1, 1], float("inf"), tl.float32)
tmp34 = tmp32 == tmp33
tmp35 = tl.full([1, 1], 3.3895313892515355e+38, tl.float32)
tmp36 = tl.where(tmp34, tmp35, tmp32)
tmp37 = tl.full([1, 1], 0.0, tl.float32)
tmp38 = tmp30 > tmp37
tmp39 = tmp30 < tmp33
tmp40 = tmp38 & tmp39
tmp41 = tl.full([1, 1], 1.0, tl.float32)
tmp42 = tl.where(tmp40, tmp36, tmp41)
tmp43 = tmp21 * tmp42
tmp44 = tmp43.to(tl.float8e4nv)
tmp45 = tmp44.to(tl.float32)
tmp46 = tl.inline_asm_elementwise('div.rn.f32 $0, $1, $2;', '=f,f,f', [tmp41, tmp42], dtype=tl.float32, is_pure=True, pack=1)
tmp47 = tmp45 * tmp46
tmp48 = tmp47.to(tl.bfloat16)
tmp49 = tmp48.to(tl.float32)
tmp50 = tmp49.to(tl.float32)
tmp51 = tmp50.to(tl.float32)
tmp52 = -tmp51
tmp53 = libdevice.exp(tmp52)
tmp54 = tmp53 + tmp41
tmp55 = (tmp51 / tmp54)
tmp56 = tmp55.to(tl.float32)
tl.store(out_ptr3 + (r0_1 + 2048*x0), tmp56, None)
""",
        )

    def test_silu_static_e5m2(self) -> None:
        fmt = ixt.FP8(dtype=torch.float8_e5m2, granularity="tensor")
        self.assertExpectedInline(
            self.kernel(
                lambda x, s: ixt.quantize(F.silu(x), fmt, s).codes, inputs()[0], torch.tensor(3.0)
            ),
            """\
tmp0 = tl.load(in_ptr0 + (x0), None).to(tl.float32)
tmp11 = tl.load(in_ptr1 + (0))
tmp12 = tl.broadcast_to(tmp11, [XBLOCK])
tmp1 = tmp0.to(tl.float32)
tmp2 = -tmp1
tmp3 = libdevice.exp(tmp2)
tmp4 = tl.full([1], 1.0, tl.float32)
tmp5 = tmp3 + tmp4
tmp6 = (tmp1 / tmp5)
tmp7 = tmp6.to(tl.float32)
tmp8 = tmp7.to(tl.float32)
tmp9 = tmp8.to(tl.bfloat16)
tmp10 = tmp9.to(tl.float32)
tmp13 = tmp10 * tmp12
tmp14 = tmp13.to(tl.float8e5)
tl.store(out_ptr0 + (x0), tmp14, None)
""",
        )
