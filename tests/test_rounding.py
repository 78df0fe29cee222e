"""Chains of bf16 and fp16 ops in front of a quantize: eager's bits, and where the roundings go."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_ext as ixt
from inductor_ext import _compat, _rounding, fake_gpu
from inductor_ext._rounding import insert_roundings
from inductor_ext.ops.fp8 import quantize_fp8_row, quantize_fp8_static
from inductor_ext.ops.rounding import round_to_dtype
from inductor_ext.testing import bitwise_mismatches

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NARROW = [torch.bfloat16, torch.float16]
TENSOR, ROW = ixt.FP8(granularity="tensor"), ixt.FP8(granularity="row")
Fn = Callable[..., Any]
device_ = pytest.mark.parametrize("device", DEVICES)
dtype_ = pytest.mark.parametrize("dtype", NARROW, ids=["bf16", "fp16"])


# ---- bits ----


def addend(a: Tensor) -> float:
    """Return a number to add: eager mode rounds it to the dtype of ``a`` first, on the CPU only."""
    return 1.7 if a.is_cuda else 1.75


ONE: dict[str, Fn] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": F.relu,
    "scaled": lambda a: a * 0.3,
    "shifted": lambda a: a + addend(a),
    "subtracted": lambda a: addend(a) - a,
    "leaky": lambda a: F.leaky_relu(a, 0.1),
    "clamp": lambda a: a.clamp(-1.3, 2.1),
    "in fp32": lambda a: (a.float() * 1.1).to(a.dtype),
    "turned": lambda a: a.t().contiguous().t(),
    "halves": lambda a: torch.cat([-a[:, 64:], a[:, :64]], -1),
}
TWO: dict[str, Fn] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b * 0.7),
    "div": lambda a, b: a / (b.abs() + 0.5),  # by no zero: its sign would make an infinity's
}
STEPS = 6


def random_chain(seed: int) -> Fn:
    """Return a function of three tensors: a few random ops, each on earlier results."""
    rng = random.Random(seed)
    names = [rng.choice([*ONE, *TWO, *TWO]) for _ in range(STEPS)]
    picks = [(rng.random(), rng.random()) for _ in names]

    def chain(*inputs: Tensor) -> Tensor:
        known = list(inputs)
        for name, (first, second) in zip(names, picks, strict=True):
            recent = known[-3:]  # so that the steps build on each other
            a, b = recent[int(first * 3)], known[int(second * len(known))]
            known.append(ONE[name](a) if name in ONE else TWO[name](a, b))
        return known[-1]

    chain.__name__ = " ".join(names)
    return chain


def quantized(chains: list[Fn], inputs: tuple[Tensor, ...], scale: Tensor) -> list[Tensor]:
    """The codes of every chain, by a given scale and by rows in turn, and the scales."""
    results: list[Tensor] = []
    for number, chain in enumerate(chains):
        value = chain(*inputs)
        q = ixt.quantize(value, ROW) if number % 2 else ixt.quantize(value, TENSOR, scale)
        results.extend((q[0], q[1]))
    return results


def compiled(function: Fn, *arguments: Any, numerics: str = "exact") -> list[Tensor]:
    torch.compiler.reset()
    with (
        ixt.config.patch(enabled=True, strict=True, numerics=numerics),
        torch.compiler.config.patch(force_disable_caches=True),
        torch.no_grad(),
    ):
        result: list[Tensor] = torch.compile(function, fullgraph=True, dynamic=False)(*arguments)
    return result


def differing(got: list[Tensor], want: list[Tensor]) -> list[int]:
    """How many elements of each result differ (NaN scales are alike).

    On CUDA the two zeros are alike too: of a zero, Triton's negation, relu, minimum and maximum
    give another sign than eager's, with a quantize behind them or without.
    """
    counts = []
    for a, b in zip(got, want, strict=True):
        wrong = bitwise_mismatches(a, b, nan_equal=a.dtype == torch.float32)
        if a.is_cuda and a.dtype != torch.float32:
            wrong &= (a.view(torch.uint8) | b.view(torch.uint8)) != 0x80
        counts.append(int(wrong.sum()))
    return counts


def tensors(dtype: torch.dtype, device: str) -> tuple[tuple[Tensor, ...], Tensor]:
    kinds = (("wide", 0), ("normal", 1), ("normal", 2))
    inputs = (cases.values(kind, 96 * 128, dtype, seed).view(96, 128) for kind, seed in kinds)
    return tuple(x.to(device) for x in inputs), torch.tensor(37.7, device=device)


@pytest.mark.parametrize("seed", [0, 100, 200])
@dtype_
@device_
def test_random_chains(device: str, dtype: torch.dtype, seed: int) -> None:
    """One compilation holds eight chains (a compilation takes seconds, a chain nothing)."""
    chains = [random_chain(seed + number) for number in range(8)]
    inputs, scale = tensors(dtype, device)
    want = quantized(chains, inputs, scale)
    got = compiled(quantized, chains, inputs, scale)
    assert differing(got, want) == [0] * len(want), [chain.__name__ for chain in chains]
    if seed == 0:  # this test can fail: without the roundings it does
        fast = compiled(quantized, chains, inputs, scale, numerics="fast")
        assert sum(count > 0 for count in differing(fast, want)) >= 3


def normed(x: Tensor, statistic: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * statistic).to(x.dtype) * weight


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    v = x.float()
    return normed(x, torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6), weight)


NAMED: dict[str, Fn] = {
    "x*y + x": lambda x, y, w: x * y + x,
    "(x*y).relu() * y": lambda x, y, w: (x * y).relu() * y,
    "residual": lambda x, y, w: (x + y) * w + (x + y),
    "norm, given statistic": lambda x, y, w: normed(x + y, y[:, :1].float().abs(), w),
    "row mean removed": lambda x, y, w: (x + y) - (x + y).amax(-1, keepdim=True),
    "rotary": lambda x, y, w: x * y + torch.cat([-x[:, 64:], x[:, :64]], -1) * w,
    "casts": lambda x, y, w: (x.float() * 1.3).to(x.dtype).float() * 1.7,
    "hardtanh of leaky": lambda x, y, w: F.hardtanh(F.leaky_relu(x, 0.3), -0.7, 0.9) * 0.3,
    "a constant": lambda x, y, w: x * torch.full_like(x, 0.1) + y,
    "promoted": lambda x, y, w: torch.where(y > 0, x * y, y.float()) * 1.7,
    "spread": lambda x, y, w: (x[:, :1] * y[:, :1]).expand(-1, 128) * w + x,
}


@pytest.mark.contract
@dtype_
@device_
def test_named_chains(device: str, dtype: torch.dtype) -> None:
    (x, y, z), scale = tensors(dtype, device)
    chains, inputs = list(NAMED.values()), (x, y, z[0])
    want = quantized(chains, inputs, scale)
    assert differing(compiled(quantized, chains, inputs, scale), want) == [0] * len(want)


@device_
def test_norms_differ_by_their_statistic_alone(device: str) -> None:
    """Behind a norm a code differs from eager's rarely, and then by one step."""
    x = torch.randn(256, 1024, device=device).bfloat16()
    w = torch.randn(1024, device=device).bfloat16()
    scale = torch.tensor(37.7, device=device)
    chains: list[Fn] = [
        lambda x, w: llama_norm(x, w),
        lambda x, w: F.rms_norm(x, w.shape, w),
        lambda x, w: F.layer_norm(x, w.shape, w),
    ]

    def codes() -> list[Tensor]:
        return [ixt.quantize(chain(x, w), TENSOR, scale).codes for chain in chains]

    for got, want in zip(compiled(codes), codes(), strict=True):
        steps = got.view(torch.int8).int() - want.view(torch.int8).int()
        assert int(steps.abs().max()) <= 1
        assert float((steps != 0).float().mean()) < 1e-3


def test_numerics_is_changed_on_a_compiled_function() -> None:
    """ "exact" and "fast" are compiled apart, and each call gets what is in force."""
    (x, y, _), scale = tensors(torch.bfloat16, "cpu")

    def codes(x: Tensor, y: Tensor) -> Tensor:
        return ixt.quantize(x * y + x, TENSOR, scale).codes

    want, run = codes(x, y), torch.compile(codes, fullgraph=True)
    counts = []
    for numerics in ("exact", "fast", "exact"):
        with ixt.config.patch(enabled=True, numerics=numerics):
            counts.append(int(bitwise_mismatches(run(x, y), want).sum()))
    assert counts[0] == counts[2] == 0
    assert counts[1] > 0


def test_the_backward_sees_what_it_saw() -> None:
    """Gradients and what is saved for them are the same with the roundings as without."""
    (x, y, _), _scale = tensors(torch.bfloat16, "cpu")
    saved: list[int] = []

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        v = x * y + x
        return (v * y).sum(), ixt.quantize(v.detach(), ROW).codes

    def gradient(numerics: str | None) -> tuple[Tensor, Tensor]:
        leaf = torch.nan_to_num(x, posinf=1.0, neginf=1.0).clamp(-9, 9).requires_grad_()
        torch.compiler.reset()
        with ixt.config.patch(enabled=numerics is not None, numerics=numerics or "exact"):
            function = torch.compile(step, fullgraph=True) if numerics else step
            loss, codes = function(leaf, y)
            saved.append(len(getattr(loss.grad_fn, "saved_tensors", ())))
            loss.backward()
        assert leaf.grad is not None
        return leaf.grad, codes

    eager, exact, fast = gradient(None), gradient("exact"), gradient("fast")
    assert torch.equal(exact[0], fast[0])
    assert saved[1] == saved[2] > 0
    assert torch.equal(exact[1].view(torch.uint8), eager[1].view(torch.uint8))
    assert not torch.equal(fast[1].view(torch.uint8), eager[1].view(torch.uint8))


# ---- where the roundings go ----


def rounded_ops(function: Fn, *arguments: Tensor) -> list[str]:
    """The ops whose results the pass rounds in the graph of ``function``."""
    table = _compat.resolve("torch._inductor.decomposition:select_decomp_table")()
    graph = make_fx(function, decomposition_table=table, tracing_mode="fake")(*arguments).graph
    ours = (quantize_fp8_row, quantize_fp8_static)
    count = insert_roundings(graph, lambda target: target in ours)
    graph.lint()
    found = [node for node in graph.nodes if node.target is round_to_dtype]
    assert len(found) == count
    for node in found:
        like = node.args[0].meta["val"]
        assert node.meta["val"].stride() == like.stride()
        assert node.meta["val"].dtype == like.dtype
    return [getattr(node.args[0].target, "__name__", "").split(".")[0] for node in found]


def row(x: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = quantize_fp8_row(x, torch.float8_e4m3fn)
    return result


PLACES: dict[str, tuple[Fn, list[str]]] = {
    "no op of ours": (lambda x, y, w: x * y + x, []),
    "nothing before it": (lambda x, y, w: row(x), []),
    "one op, rounded by ours": (lambda x, y, w: row(x * y), []),
    "selecting ops behind it": (lambda x, y, w: row((x * y).abs().t().neg()), []),
    "two ops": (lambda x, y, w: row(x * y + x), ["mul"]),
    "after a selecting op": (lambda x, y, w: row((x * y).abs() * y), ["abs"]),
    "before a choosing op": (lambda x, y, w: row((x * y).relu() * y), ["mul"]),
    "inputs are stored": (lambda x, y, w: row(x.t().relu().t() * y), []),
    "once for two uses": (lambda x, y, w: (lambda t: row(t * t))(x * y), ["mul"]),
    "two ops of ours": (lambda x, y, w: (lambda t: (row(t + x), row(t - x)))(x * y), ["mul"]),
    "only in front of ours": (lambda x, y, w: (row(x * y + x), (x * w + x) * y), ["mul"]),
    "fp32": (lambda x, y, w: row(x.float() * y + x), []),
    "cast and back": (lambda x, y, w: row((x.float() * 2).to(x.dtype) * w),
                      ["convert_element_type"]),
    "norm": (lambda x, y, w: row(llama_norm(x + y, w)), ["add", "convert_element_type"]),
    "one op, decomposed": (lambda x, y, w: row(F.leaky_relu(x, 0.1)), []),
    "GEMM": (lambda x, y, w: row(x @ y.t()), []),
    "GEMM and two ops": (lambda x, y, w: row(((x * y) @ y.t() + 1) * 3), ["add"]),
    "wider by promotion": (lambda x, y, w: row(torch.maximum(x * y, y.float())), ["mul"]),
    "its bits": (lambda x, y, w: row((x * y).view(torch.int16).float()), ["mul"]),
    "constant of the dtype": (lambda x, y, w: row(torch.where(y > 0, x, 0.5) * y), []),
    "constant that is rounded": (lambda x, y, w: row(torch.where(y > 0, x, 0.1) * y), []),
    "several results": (lambda x, y, w: row(torch.add(*(x * y).chunk(2))), ["getitem"] * 2),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("name", PLACES)
def test_places(name: str) -> None:
    function, expected = PLACES[name]
    x, y = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    assert rounded_ops(function, x, y, y[0]) == expected


def test_a_constant_is_rounded_in_the_graph() -> None:
    """Inductor computes with the number itself, and undoes casts of it."""

    def chain(x: Tensor, _: Tensor, w: Tensor) -> Any:
        return row(torch.full_like(x, 0.1) * x + w)

    x = torch.randn(64, 64).half()
    graph = make_fx(chain, tracing_mode="fake")(x, x, x).graph
    assert insert_roundings(graph, lambda target: target is quantize_fp8_row) == 1
    (full,) = graph.find_nodes(op="call_function", target=torch.ops.aten.full_like.default)
    assert full.args[1] == 0.0999755859375


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@needs_triton
@pytest.mark.contract
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_roundings_are_in_the_one_kernel_on_sm90(numerics: str) -> None:
    x, y = (torch.empty(512, 256, dtype=torch.bfloat16) for _ in range(2))
    torch.compiler.reset()
    with ixt.config.patch(enabled=True, numerics=numerics):
        (graph,) = fake_gpu.capture(
            lambda x, y: ixt.quantize((x * y + x) * y, ROW)[:2], (x, y), target="sm_90"
        )
    (kernel,) = graph.kernels.values()
    assert not graph.externs
    casts = kernel.source.count(".to(tl.bfloat16)"), kernel.source.count("cvt.rn.bf16.f32")
    assert casts == ((2, 1) if numerics == "exact" else (0, 0))


CONTRACTIONS: dict[str, tuple[Fn, bool]] = {
    # name: (chain, whether a rounding in it must keep a product and an addition apart)
    "product + addend": (lambda x, y: (x * y + x) * y, True),
    "addend - product": (lambda x, y: (x - x * y) * y, True),
    "negated product": (lambda x, y: (-(x * y) + x) * y, True),
    "scaled in fp32": (lambda x, y: (x.float() * 3).to(x.dtype) + y, True),
    "into an op of several": (lambda x, y: torch.lerp(x * y, y, 0.3), True),
    "products alone": (lambda x, y: F.silu(x) * y, False),
    "sums alone": (lambda x, y: (x + y - 3) * y, False),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
@dtype_
def test_product_and_addition_are_not_contracted_on_sm90(name: str, dtype: torch.dtype) -> None:
    """LLVM would make one bf16 or fp16 fma of them, with one rounding less than eager."""
    chain, apart = CONTRACTIONS[name]
    x, y = (torch.empty(512, 256, dtype=dtype) for _ in range(2))
    torch.compiler.reset()
    with ixt.config.patch(enabled=True):
        (graph,) = fake_gpu.capture(
            lambda x, y: ixt.quantize(chain(x, y), ROW)[:2], (x, y), target="sm_90", asm=True
        )
    (kernel,) = graph.kernels.values()
    assert bool(re.search(r"cvt\.rn\.b?f16\.f32", kernel.source)) is apart
    assert kernel.ptx is not None
    assert not narrow_contractions(kernel.ptx)


def test_what_a_compiler_would_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(_rounding, "_may_contract", lambda node, users: False)
    x, y = (torch.empty(512, 256, dtype=torch.bfloat16) for _ in range(2))
    torch.compiler.reset()
    with ixt.config.patch(enabled=True):
        (graph,) = fake_gpu.capture(
            lambda x, y: ixt.quantize((x * y + x) * y, ROW)[:2], (x, y), target="sm_90", asm=True
        )
    (kernel,) = graph.kernels.values()
    assert kernel.ptx is not None
    assert narrow_contractions(kernel.ptx)


def narrow_contractions(ptx: str) -> list[str]:
    """The bf16/fp16 instructions that add to a product, or that ptxas could contract with one."""
    narrow = r"(?:bf16|f16)(?:x2)?"
    products = set(re.findall(rf"\bmul\S*\.{narrow}\s+(%\w+),", ptx))
    fused = re.findall(rf"\bfma\S*\.{narrow}\s.*;", ptx)
    sums = re.findall(rf"\b(?:add|sub)\S*\.{narrow}\s.*;", ptx)
    return fused + [line for line in sums if products & set(re.findall(r"%\w+", line))]


@needs_triton
@pytest.mark.contract
def test_nothing_is_inserted_without_an_op_of_ours() -> None:
    x = torch.empty(512, 256, dtype=torch.bfloat16)
    torch.compiler.reset()
    with ixt.config.patch(enabled=True):
        (graph,) = fake_gpu.capture(lambda x: (x * 3 + x) * x, (x,), target="sm_90")
    (kernel,) = graph.kernels.values()
    assert ".to(tl.bfloat16)" not in kernel.source


@device_
def test_the_op_itself_copies(device: str) -> None:
    x = torch.randn(6, 4, device=device).half().t()
    y = round_to_dtype(x)
    assert torch.equal(x, y)
    assert y.stride() == x.stride()
    assert y.data_ptr() != x.data_ptr()
