"""Grouped products: exact where exactness is possible, within the rounding bound elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracle.grids import encode_bits
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu
from inductor_ext.ops import scaled_grouped_mm as family
from inductor_ext.ops._routes_grouped import choose_grouped_mm
from inductor_ext.testing import require_equal, running

device_ = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
# Tokens of each expert, and how many belong to none.
TOKENS = (([0, 5, 128, 3], 0), ([7], 9), ([16, 16, 32], 0), ([0, 0], 4), ([1, 0, 0, 200, 55], 1))
# As in test_scaled_mm.py.
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
ACCUMULATION = {"cpu": 4 * 2.0**-24, "cuda": 2.0**-12}


def integers(rng: np.random.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(-2, 3, shape).astype(np.float32)).to(dtype)


def normal(rng: np.random.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32) * 20).to(dtype)


def powers(rng: np.random.Generator, *shape: int) -> Tensor:
    return cases.f32(np.exp2(rng.integers(-2, 3, shape)).astype(np.float32))


def spread(scale: NDArray[Any], height: int, width: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Repeat the scales of blocks for the elements of a matrix or a stack of them."""
    tall = np.repeat(scale, height, -2)[..., : shape[-2], :]
    return np.repeat(tall, width, -1)[..., : shape[-1]]


def oracle(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, ends: list[int]) -> Any:
    """Value and magnitude in float64; scales are there for every element: like ``a`` (or a stack of
    such) and ``b``."""
    wide_a, wide_b = (cases.floats(t).astype(np.float64) for t in (a, b))
    split = b.dim() == 2
    shape = (len(ends), a.shape[0], b.shape[0]) if split else (a.shape[0], b.shape[1])
    value, magnitude, start = np.zeros(shape), np.zeros(shape), 0
    for e, end in enumerate(ends):
        own = scale_a[e] if scale_a.ndim == 3 else scale_a
        x = wide_a * own
        y = wide_b * (scale_b[e] if scale_b.ndim == 3 else scale_b) if split else None
        if y is not None:
            x, y, place = x[:, start:end], y[:, start:end], np.s_[e]
        else:
            x, y, place = x[start:end], wide_b[e] * scale_b[e], np.s_[start:end]
        value[place], magnitude[place], start = x @ y.T, np.abs(x) @ np.abs(y).T, end
    return value, magnitude


def problem(
    rng: np.random.Generator, kind: str, split: bool, tokens: tuple[list[int], int], make: Any,
    pair: tuple[torch.dtype, torch.dtype], scales: Any,
) -> tuple[tuple[Tensor, ...], tuple[Any, Any]]:  # fmt: skip
    """Return (a, b, scale_a, scale_b, offsets), and value and magnitude."""
    counts, rest = tokens
    experts, total = len(counts), sum(counts) + rest
    n, k = (150, 200) if len(counts) in (1, 5) else (144, 208)  # the latter by torch's kernel
    m, n, k = (40, 130, total) if split else (total, n, k)
    a = make(rng, pair[0], m, k)
    b = make(rng, pair[1], *(() if split else (experts,)), n, k)
    across = -(-k // 128)
    if kind == "row":
        scale_a = scales(rng, *((experts,) if split else ()), m, 1)
        scale_b = scales(rng, experts, n, 1)
        height, width = 1, k
    else:
        height, width = (128 if kind == "square" else 1), 128
        scale_a = scales(rng, m, across)
        scale_b = scales(rng, *(() if split else (experts,)), -(-n // height), across)
    offsets = torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    wide = (
        spread(cases.floats(scale_a), 1, width, (m, k)),
        spread(cases.floats(scale_b), height, width, (n, k)),
    )
    return (a, b, scale_a, scale_b, offsets), oracle(a, b, *wide, offsets.tolist())


def product(args: tuple[Tensor, ...], kind: str, dtype: str, *rest: bool) -> Tensor:
    op = family.scaled_grouped_mm if kind == "row" else family.scaled_grouped_mm_fp8_block
    return op(*args, cases.INPUTS[dtype], *rest)


@device_
@pytest.mark.parametrize("dtype", list(cases.INPUTS))
@pytest.mark.parametrize("split", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", ["row", "block", "square"])
def test_integer_products_are_exact(device: str, dtype: str, split: bool, kind: str) -> None:
    """Sums of small integers and powers of two fit any accumulator: one rounding, at the end.

    Adding 0 makes +0 of -0: a product of one zero token, which no accumulator starts from, is -0.
    """
    rng = np.random.default_rng(0)
    for tokens, pair in itertools.product(TOKENS, PAIRS):
        args, (value, _) = problem(rng, kind, split, tokens, integers, pair, powers)
        bits = encode_bits((value + 0.0).astype(np.float32), dtype)
        want = cases.from_raw(bits, cases.INPUTS[dtype])
        got = product(tuple(t.to(device) for t in args), kind, dtype) + 0.0
        require_equal("grouped", "exact", got, want, sample=f"{tokens} {pair}", same_device=False)


@device_
@pytest.mark.parametrize("split", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", ["row", "block", "square"])
def test_rounding_bound(device: str, split: bool, kind: str) -> None:
    """The accumulation may lose what fp32 (the tensor core's sums on a GPU) loses of it, and the
    result half a unit in its last place."""
    rng = np.random.default_rng(1)

    def scales(rng: np.random.Generator, *shape: int) -> Tensor:
        return cases.f32(rng.uniform(0.001, 0.02, shape).astype(np.float32))

    for tokens, dtype in itertools.product(TOKENS[:3], HALF_ULP):
        args, found = problem(rng, kind, split, tokens, normal, PAIRS[0], scales)
        value, magnitude = found
        for fast in (False, True) if kind == "row" else ((),):
            rest = () if fast == () else (bool(fast),)
            got = cases.floats(product(tuple(t.to(device) for t in args), kind, dtype, *rest))
            bound = (1 + HALF_ULP[dtype]) * ACCUMULATION[device] * magnitude
            bound += HALF_ULP[dtype] * np.abs(value) + 2.0**-25
            assert (np.abs(got.astype(np.float64) - value) <= bound).all(), (tokens, dtype, fast)


@device_
def test_scales_that_broadcast(device: str) -> None:
    rng = np.random.default_rng(2)
    a, b = integers(rng, E4M3, 9, 32).to(device), integers(rng, E4M3, 2, 16, 32).to(device)
    ends = torch.tensor([4, 9], dtype=torch.int32, device=device)
    full = [powers(rng, 1, 1).to(device), powers(rng, 2, 1, 1).to(device)]
    want = product((a, b, full[0].expand(9, 1), full[1].expand(2, 16, 1), ends), "row", "fp32")
    for scale_a in (full[0], full[0].reshape(()), full[0].reshape(1)):
        got = product((a, b, scale_a, full[1], ends), "row", "fp32")
        require_equal("grouped", "broadcast", got, want)
    x, y = a.t(), integers(rng, E4M3, 5, 9).to(device)
    scales = powers(rng, 32, 1).to(device), powers(rng, 5, 1).to(device)
    want = product(
        (x, y, scales[0].expand(2, 32, 1), scales[1].expand(2, 5, 1), ends), "row", "fp32"
    )
    require_equal("grouped", "shared", product((x, y, *scales, ends), "row", "fp32"), want)


@device_
@pytest.mark.parametrize("kind", ["row", "square"])
def test_one_experts_nan_stays_its_own(device: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    for split in (False, True):
        args, _ = problem(rng, kind, split, ([3, 130, 0, 4], 2), integers, PAIRS[0], powers)
        spoilt = args[0].view(torch.uint8).clone()
        spoilt[(np.s_[:], slice(3, 133)) if split else slice(3, 133)] = 0x7F
        args = (spoilt.view(E4M3), *args[1:])
        got = product(tuple(t.to(device) for t in args), kind, "bf16").cpu()
        where = torch.zeros_like(got, dtype=torch.bool)
        where[1 if split else slice(3, 133)] = True
        assert torch.equal(got.isnan(), where)
        assert (got[2] == 0).all() if split else (got[137:] == 0).all()


@device_
@pytest.mark.parametrize("kind", ["row", "square"])
@pytest.mark.parametrize(
    ("tokens", "experts", "n", "k"),
    [(0, 3, 16, 32), (5, 0, 16, 32), (5, 2, 0, 32), (5, 2, 16, 0), (0, 0, 0, 0)],
)
def test_nothing_to_multiply(
    device: str, kind: str, tokens: int, experts: int, n: int, k: int
) -> None:
    a, b = (torch.zeros(s, device=device).to(E4M3) for s in ((tokens, k), (experts, n, k)))
    ends = torch.full((experts,), tokens, dtype=torch.int32, device=device)
    across, down = -(-k // 128), -(-n // 128)
    scales = ((tokens, 1), (experts, n, 1)) if kind == "row" else (
        (tokens, across), (experts, down, across)
    )  # fmt: skip
    args = (a, b, *(torch.ones(s, device=device) for s in scales), ends)
    assert torch.equal(product(args, kind, "bf16").cpu(), torch.zeros(tokens, n).bfloat16())


@device_
@pytest.mark.parametrize("kind", ["row", "square"])
def test_odd_offsets(device: str, kind: str) -> None:
    """Offsets that fall, or lie beyond the tokens, are what the definition says everywhere."""
    rng = np.random.default_rng(4)
    for split in (False, True):
        args, _ = problem(rng, kind, split, ([9, 9, 9], 3), integers, PAIRS[0], powers)
        here = [t.to(device) for t in args[:4]]
        odd = torch.tensor([-4, 20, 11], dtype=torch.int32, device=device)
        even = torch.tensor([0, 20, 20], dtype=torch.int32, device=device)
        far = torch.tensor([7, 2**31 - 1, 8], dtype=torch.int32, device=device)
        near = torch.tensor([7, 30, 30], dtype=torch.int32, device=device)
        for given, meant in ((odd, even), (far, near)):
            got = product((*here, given), kind, "bf16")
            require_equal("grouped", "offsets", got, product((*here, meant), kind, "bf16"))


@device_
def test_strided_operands(device: str) -> None:
    rng = np.random.default_rng(5)
    base, weights = integers(rng, E4M3, 60, 70), integers(rng, E4M3, 3, 70, 50)
    ends = torch.tensor([10, 10, 25], dtype=torch.int32)
    one = torch.ones(())
    for x, y in (
        (base[:, ::2][:, :25].t(), weights[:, :60].transpose(1, 2)),  # (25, 60), (3, 50, 60)
        (base[5:30, 3:53], weights[:, ::3]),  # (25, 50), (3, 24, 50)
        (base[:1, :50].expand(25, 50), weights),
    ):
        value, _ = oracle(x, y, np.ones(x.shape), np.ones(y.shape), ends.tolist())
        want = cases.from_raw(encode_bits(value.astype(np.float32), "bf16"), torch.bfloat16)
        here = [
            base_.to(device).as_strided(t.shape, t.stride(), t.storage_offset())
            for base_, t in ((base, x), (weights, y))
        ]
        got = product((*here, one.to(device), one.to(device), ends.to(device)), "row", "bf16")
        require_equal("grouped", "strided", got, want, same_device=False)


@pytest.mark.parametrize("layout", ["plain", "gemm"])
def test_public_function_takes_what_quantize_gives(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator) for s in ((20, 300), (3, 256, 300)))
    ends = torch.tensor([4, 4, 17], dtype=torch.int32)
    rows, one = ixt.FP8(), ixt.FP8(granularity="tensor")
    block = ixt.FP8(granularity="block", layout=layout)
    square = ixt.FP8(granularity="square", layout=layout)
    for f, g in ((rows, None), (one, rows), (rows, one), (block, square), (block, None)):
        a, b = ixt.quantize(x, f), ixt.quantize(w, g or f)
        got = ixt.scaled_grouped_mm(a, b, ends, f, g, dtype=torch.float32)
        wide = ixt.dequantize(a, f, torch.float32), ixt.dequantize(b, g or f, torch.float32)
        want = torch.zeros(20, 256)
        want[:4], want[4:17] = wide[0][:4] @ wide[1][0].t(), wide[0][4:17] @ wide[1][2].t()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    dy = torch.randn(20, 40, generator=generator)
    for f in (rows, one, block):
        a, b = (ixt.quantize(t, f, orientation="column") for t in (dy, x))
        got = ixt.scaled_grouped_mm(a, b, ends, f, dtype=torch.float32)
        wide = ixt.dequantize(a, f, torch.float32), ixt.dequantize(b, f, torch.float32)
        want = torch.zeros(3, 40, 300)
        want[0], want[2] = (wide[0][:, s] @ wide[1][:, s].t() for s in (slice(4), slice(4, 17)))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


class Experts(torch.autograd.Function):
    """A mixture's linear layer in training, as docs/grouped_gemm.md writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        f = ixt.FP8(granularity="row")
        ctx.save_for_backward(x, weights, offsets)
        q, w = ixt.quantize(x, f), ixt.quantize(weights, f)
        return ixt.scaled_grouped_mm(q, w, offsets, f, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, offsets = ctx.saved_tensors
        f = ixt.FP8(granularity="row")
        w_t = ixt.quantize(weights.transpose(1, 2), f)  # (E, K, N)
        to_input = ixt.scaled_grouped_mm(ixt.quantize(grad, f), w_t, offsets, f, dtype=x.dtype)
        sides = (ixt.quantize(t, f, orientation="column") for t in (grad, x))
        return to_input, ixt.scaled_grouped_mm(*sides, offsets, f, dtype=x.dtype), None


@device_
def test_a_training_step(device: str) -> None:
    """Results and gradients are those of float64 but for the quantization's few percent."""
    generator = torch.Generator(device=device).manual_seed(0)
    x, w, grad = (
        torch.randn(s, generator=generator, device=device)
        for s in ((50, 64), (4, 32, 64), (50, 32))
    )
    offsets = torch.tensor([0, 13, 14, 48], dtype=torch.int32, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = Experts.apply(*leaves, offsets)
    got = y, *torch.autograd.grad(y, leaves, grad)
    expert = torch.bucketize(torch.arange(50, device=device), offsets.long(), right=True)
    of_token = torch.nn.functional.one_hot(expert, 5)[:, :4].double()  # (T, E)
    x, w, grad = x.double(), w.double(), grad.double()
    want = (
        torch.einsum("tk,enk,te->tn", x, w, of_token),
        torch.einsum("tn,enk,te->tk", grad, w, of_token),
        torch.einsum("tn,tk,te->enk", grad, x, of_token),
    )
    for a, b in zip(got, want, strict=True):
        assert 0.005 < float((a - b).norm() / b.norm()) < 0.06
        assert bool((a[b == 0] == 0).all())


@device_
def test_one_compilation_serves_all_offsets(device: str) -> None:
    row = ixt.FP8()
    w = ixt.quantize(torch.randn(3, 32, 64, device=device), row)

    def layer(x: ixt.Quantized, offsets: Tensor) -> Tensor:
        return ixt.scaled_grouped_mm(x, w, offsets, row)

    x = ixt.quantize(torch.randn(24, 64, device=device), row)
    with running.plugin(True):
        compiled, before = running.compiled(layer), running.graphs()
        for counts in ([0, 5, 19], [24, 0, 0], [8, 8, 8], [0, 0, 3]):
            offsets = torch.tensor(counts, device=device).cumsum(0).int()
            require_equal("grouped", "compiled", compiled(x, offsets), layer(x, offsets))
        assert running.graphs() - before == 1


def test_a_record_guards_no_size() -> None:
    """Any number of tokens is one compilation, though the route depends on it."""
    pytest.importorskip("triton")
    row = ixt.FP8()
    w = ixt.quantize(torch.randn(3, 32, 64), row)
    ends = torch.tensor([0, 5, 24], dtype=torch.int32)

    def layer(codes: Tensor, scale: Tensor) -> Tensor:
        return ixt.scaled_grouped_mm(ixt.Quantized(codes, scale), w, ends, row)

    x = ixt.quantize(torch.randn(24, 64), row)
    ixt.clear_records()
    with ixt.config.patch(enabled=True), torch.no_grad():
        fake_gpu.capture(layer, x[:2], "sm_90", dynamic=True)
    assert [r.reason for r in ixt.records()] == ["decided when it runs, by the sizes"]


def test_routes() -> None:
    """The library where torch's kernel takes the call, ours elsewhere; each with a reason."""
    fits: dict[str, Any] = {
        "capability": (9, 0), "dtypes": (E4M3, E4M3), "result": torch.bfloat16,
        "sizes": (8, 256, 512), "blocks": False, "split_k": False, "rows": 4096,
    }  # fmt: skip
    assert choose_grouped_mm(**fits)[0] == "library"
    for change, words in (
        ({"blocks": True}, "blocks"),
        ({"split_k": True}, "aborts"),
        ({"result": torch.float32}, "bfloat16 only"),
        ({"dtypes": PAIRS[1]}, "float8_e4m3fn only"),
        ({"sizes": (8, 250, 512)}, "multiples of 16"),
        ({"sizes": (8, 256, 520)}, "multiples of 16"),
        ({"sizes": (1024, 256, 512)}, "experts"),
        ({"capability": (8, 9)}, "sm_90"),
        ({"rows": 4095}, "fewer than 512 rows"),
        ({"pin": "triton"}, "config"),
    ):
        name, reason = choose_grouped_mm(**(fits | change))
        assert name == "triton"
        assert words in reason
    for capability in ((8, 0), None):
        assert choose_grouped_mm(**(fits | {"capability": capability}))[0] == "reference"
    for change, pin in (({"blocks": True}, "library"), ({"capability": None}, "triton")):
        with pytest.raises(ValueError, match=f'config.grouped_gemm must not be "{pin}"'):
            choose_grouped_mm(**(fits | change | {"pin": pin}))


def test_torch_takes_what_the_library_route_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own checks, of sizes, strides and scales, on a GPU that is not there."""
    pytest.importorskip("triton")
    from inductor_ext.kernels.triton import scaled_grouped_mm as kernel

    monkeypatch.setattr(kernel, "rising", lambda offsets, _: offsets)
    monkeypatch.setattr(kernel, "zero_tail", lambda out, _: out)
    library = ixt.config.patch(grouped_gemm="library")
    with fake_gpu.pretend("sm_90"), _compat.FakeTensorMode(), library:
        on = {"device": "cuda"}
        ends = torch.empty(3, dtype=torch.int32, **on)
        a, b = torch.empty(13, 64, dtype=E4M3, **on), torch.empty(3, 48, 64, dtype=E4M3, **on)
        odd = torch.empty(65, 14, dtype=E4M3, **on)[1:, 1:].t()  # (13, 64), transposed, offset
        for x, y in ((a, b), (odd, b), (a, b.transpose(1, 2).contiguous().transpose(1, 2))):
            for scales in (((), ()), ((13, 1), (3, 48, 1)), ((1, 1), (3, 1, 1))):
                given = (torch.empty(s, **on) for s in scales)
                got = family._cuda(x, y, *given, ends, torch.bfloat16, True)
                assert (got.shape, got.stride()) == ((13, 48), (48, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["row", "square"])
def test_no_host_waits_and_graphs_replay(kind: str) -> None:
    """A captured product follows its offsets; nothing in it synchronizes."""
    rng = np.random.default_rng(6)
    args, _ = problem(rng, kind, False, ([40, 40, 40], 8), integers, PAIRS[0], powers)
    here = [t.cuda() for t in args]
    product(tuple(here), kind, "bf16")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        product(tuple(here), kind, "bf16")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = product(tuple(here), kind, "bf16")
    for counts in ([0, 120, 8], [1, 2, 3], [0, 0, 0]):
        here[4].copy_(torch.tensor(counts).cumsum(0).int())
        graph.replay()
        want = product((*args[:4], here[4].cpu()), kind, "bf16")
        require_equal("grouped", "replayed", got, want, same_device=False)
