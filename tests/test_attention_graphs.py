"""What Inductor makes of attention for an H100: which kernels, what is saved, and no copies."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu

TENSOR = ixt.FP8(granularity="tensor")
ATTENTION = "torch.ops.inductor_ext.attention.default"
ATTENTION_FP8 = "torch.ops.inductor_ext.attention_fp8.default"
BACKWARD = "torch.ops.inductor_ext.attention_backward.default"


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 64)).transpose(1, 2)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _projections(
    heads: tuple[int, ...] = (8, 2, 2), grad: bool = False, tokens: int = 256
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, tokens, 64 * h, generator=generator).bfloat16() for h in heads]
    return [x.requires_grad_(grad) for x in made]


def test_quantization_fuses_into_rope() -> None:
    """With given scales: RoPE and quantization are one kernel each for q and k, V's lays it out."""

    def chain(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        q8, k8 = (ixt.quantize(_rope(_heads(x), cos, sin), TENSOR, scale) for x in (q, k))
        v8 = ixt.quantize(_heads(v), TENSOR, scale)
        v8 = v8._replace(codes=v8.codes.mT.contiguous().mT)
        out = ixt.attention(q8, k8, v8, causal=True, format=TENSOR)
        return out.transpose(1, 2).flatten(2)

    cos, sin = (torch.randn(256, 64).bfloat16() for _ in range(2))
    with ixt.config.patch(enabled=True, strict=True), torch.no_grad():
        (graph,) = fake_gpu.capture(chain, (*_projections(), cos, sin, torch.ones(())), "sm_90")
    assert graph.externs == (ATTENTION_FP8,)
    launches = Counter(re.findall(r"(triton_\w+)\.run\(", graph.source))
    one_element = [name for name in launches if launches[name] > 1]  # the scales' reciprocals
    assert len(one_element) == 1
    assert sum(launches.values()) - launches[one_element[0]] == 3
    assert (
        "torch.bfloat16)" not in graph.source[graph.source.index("def call") :].split("return")[0]
    )


def test_one_scale_leaves_the_order_of_memory() -> None:
    """Projections are read as they lie, and their codes lie as they do."""

    def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ixt.attention(*map(_heads, (q, k, v)), causal=True, format=TENSOR)

    with ixt.config.patch(enabled=True), torch.no_grad():
        (graph,) = fake_gpu.capture(chain, tuple(_projections()), "sm_90")
    call = graph.source[graph.source.index(ATTENTION_FP8 + "(") :]
    codes = re.findall(r"\(1, (\d), 256, 64\), \((\d+), 64, (\d+), 1\)", call.split("\n")[0])
    assert codes == [("8", "131072", "512"), ("2", "32768", "128"), ("2", "32768", "128")]


def test_a_scale_a_head_copies_nothing() -> None:
    """An amax of two steps and a quantization for each operand read the projections as they lie."""

    def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ixt.attention(*map(_heads, (q, k, v)), causal=True, format=ixt.FP8())

    with ixt.config.patch(enabled=True, strict=True), torch.no_grad():
        (graph,) = fake_gpu.capture(chain, tuple(_projections(tokens=4096)), "sm_90")
    assert graph.externs == (ATTENTION_FP8,)
    call = graph.source[graph.source.index("def call") :]
    assert len(re.findall(r"triton_\w+\.run\(", call)) == 9
    assert not re.findall(r"empty_strided_cuda\(.*torch\.bfloat16\)", call)


def test_nothing_is_copied_around_bf16() -> None:
    """Projections go in as views, merged heads come out as one, forward and backward."""

    def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ixt.attention(*map(_heads, (q, k, v)), causal=True)
        return out.transpose(1, 2).flatten(2)

    with ixt.config.patch(enabled=True):
        forward, backward = fake_gpu.capture(chain, tuple(_projections(grad=True)), "sm_90")
    assert (forward.externs, backward.externs) == ((ATTENTION,), (BACKWARD,))
    assert not forward.kernels
    assert not backward.kernels


def test_codes_are_what_is_saved() -> None:
    """FP8's backward gets codes, scales, the result and lse; each operand is one kernel there."""

    def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_heads(x * 2).contiguous() for x in (q, k, v))
        out = ixt.attention(q, k, v, causal=True, format=ixt.FP8(granularity="row"))
        return out.transpose(1, 2).flatten(2)

    with ixt.config.patch(enabled=True):
        forward, backward = fake_gpu.capture(chain, tuple(_projections(grad=True)), "sm_90")
    assert ATTENTION_FP8 in forward.externs
    assert backward.externs == (BACKWARD,)
    given = backward.source[backward.source.index("def get_args") :]
    saved = Counter(re.findall(r"rand_strided\(.*dtype=torch\.(\w+)\)", given))
    # scales and lse; codes; the result and its gradient
    assert saved == {"float32": 4, "float8_e4m3fn": 3, "bfloat16": 2}
