"""FP8 attention: the op, the kernel in Triton's interpreter, its PTX, and on a card."""

from __future__ import annotations

import math
import re
import subprocess
from typing import Any

import attention_interpreter as interpreter
import pytest
import torch
from attention_cases import CASES, WIDER, Case, random_bytes, require_within, score_error
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu
from inductor_ext.decompositions.attention import BLOCK, dequantize
from inductor_ext.ops.attention_fp8 import dequantize_heads

OPS = torch.ops.inductor_ext
E4M3 = torch.float8_e4m3fn
gpu = pytest.mark.gpu
LARGER = {
    # several blocks of queries and of keys, whole and ragged, and what lies between
    "blocks": Case(queries=300, keys=300, heads=1, kv=1, dim=16),
    "causal blocks": Case(queries=300, keys=300, right=0, heads=2, kv=1, dim=32),
    "even blocks": Case(queries=256, keys=256, right=0, heads=1, kv=1, dim=16),
    "one key more": Case(queries=200, keys=201, right=0, heads=1, kv=1, dim=16),
    "more keys": Case(queries=130, keys=400, right=0, heads=1, kv=1, dim=16),
    "more queries": Case(queries=400, keys=130, right=0, heads=1, kv=1, dim=16),
    "window": Case(queries=400, keys=400, left=150, right=9, heads=1, kv=1, dim=16),
    "narrow window": Case(queries=300, keys=420, left=3, right=0, heads=1, kv=1, dim=16),
    "left alone": Case(queries=300, keys=300, left=200, heads=1, kv=1, dim=16),
    "packed": Case(
        queries=450, keys=450, offsets=(0, 140, 140, 143, 450), right=0, heads=2, kv=1, dim=16
    ),
    "packed window": Case(
        queries=300, keys=420, offsets=(0, 10, 150, 300), offsets_k=(0, 200, 300, 420), left=40,
        right=20, heads=1, kv=1, dim=16,
    ),
}  # fmt: skip
SMALL = {name: case for name, case in CASES.items() if case.dim == 64} | WIDER
EVERY = SMALL | {f"{name} of 128": case for name, case in LARGER.items()}


def quantized(case: Case, kind: str, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return codes and scales: one a "tensor", a "head" or a "block"; V's tokens innermost."""
    codes, scales = [], []
    for x in case.tensors(seed):
        tokens = x.shape[2]
        if kind == "tensor":
            amax = x.abs().amax().reshape(1)
        elif kind == "head":
            amax = x.abs().amax((2, 3))
        else:
            blocks = x.abs().amax(3).split(BLOCK, 2)
            amax = torch.stack([b.amax(2) for b in blocks], 2)
            amax = amax * torch.exp2(torch.arange(amax.shape[2]))  # of several sizes
        scales.append(amax / 448)
        each = scales[-1]
        if kind == "block":
            each = each.repeat_interleave(BLOCK, 2)[:, :, :tokens]
        codes.append((x / each.reshape(*each.shape, *(1,) * (4 - each.dim()))).to(E4M3))
    codes[2] = codes[2].mT.contiguous().mT
    return codes, scales


def values(codes: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    return [dequantize(c, s, torch.float64) for c, s in zip(codes, scales, strict=True)]


def interpreted(case: Case, codes: list[Tensor], scales: list[Tensor], scale: float) -> Any:
    """Return one case for the interpreter."""
    offsets, offsets_k, *_ = case.rest()
    ends = None if offsets is None else (offsets, offsets if offsets_k is None else offsets_k)
    return (*codes, *scales, ends, scale, case.left, case.right, case.queries)


def kinds(case: Case) -> tuple[str, ...]:
    return ("tensor", "head") if case.offsets else ("tensor", "head", "block")


# A probability is rounded to e4m3 with 2^8 at the largest so far: by 2^-4 of itself at most, or by
# half the step of subnormal codes, 2^-10, which is 2^-18 of the largest.
PROBABILITY, FLOOR = 2.0**-4, 2.0**-18


def check(case: Case, got: tuple[Tensor, Tensor], codes: Any, scales: Any, sums: float) -> None:
    """Compare with float64 within the derived bound; ``sums``: what a score's sum loses."""
    q, k, v = values(codes, scales)
    want = case.true(q, k, v)
    lost = score_error(q, k, case.dim**-0.5, sums)
    require_within(got, want, PROBABILITY + (2.0**-8 if sums > 2.0**-20 else 0.0), FLOOR, lost)


def test_kernel_in_the_interpreter() -> None:
    """Every case and kind of scale; then two without a rounding that could hide errors."""
    given, checks = [], []
    for case in LARGER.values():
        codes, scales = quantized(case, kinds(case)[-1])
        given.append(interpreted(case, codes, scales, case.dim**-0.5))
        checks.append((case, codes, scales, None))
        given.append(uniform(case))
        checks.append((case, None, None, given[-1]))
        given.append(one_hot(case))
        checks.append((case, None, None, given[-1]))
    for number, case in enumerate(SMALL.values()):
        codes, scales = quantized(case, ("tensor", "head")[number % 2])
        given.append(interpreted(case, codes, scales, case.dim**-0.5))
        checks.append((case, codes, scales, None))
    several = [
        random_bytes(*shape) for shape in ((2, 3, 130, 24), (1, 2, 1100, 16), (1, 1, 5, 200))
    ]
    results, turned = interpreter.run(given, several)
    for x, y in zip(several, turned, strict=True):
        assert torch.equal(y, torch.nn.functional.pad(x.mT, (0, -x.shape[2] % 16)))
    for (case, codes, scales, exact), got in zip(checks, results, strict=True):
        if exact is None:
            check(case, got, codes, scales, 2.0**-23)
        else:
            check_exact(case, exact, got)


def uniform(case: Case) -> Any:
    """Queries of zero: all weights are equal and exact, and the result is the mean of V."""
    codes, scales = quantized(case, "head", 1)
    codes[0] = torch.zeros_like(codes[0])
    return interpreted(case, codes, scales, 1.0)


def one_hot(case: Case) -> Any:
    """Every query has the signs of a random key: where it sees that, other weights vanish.

    Where it does not, the keys that agree most share the weight equally, which is exact too.
    """
    generator = torch.Generator().manual_seed(6)
    signs = torch.randint(0, 2, (case.keys, case.dim), generator=generator) * 2.0 - 1
    pick = torch.randint(0, case.keys, (case.queries,), generator=generator)
    q, k = (x.expand(case.batch, n, -1, -1) for x, n in ((signs[pick], case.heads),
                                                         (signs, case.kv)))  # fmt: skip
    codes = [q.contiguous().to(E4M3), k.contiguous().to(E4M3), case.tensors(2)[2].to(E4M3)]
    return interpreted(case, codes, [torch.ones(1)] * 3, 64.0)


def check_exact(case: Case, given: Any, got: tuple[Tensor, Tensor]) -> None:
    """Compare with float64 where the weights before the division are 1 or nothing."""
    want = case.true(*values(list(given[:3]), list(given[3:6])), scale=given[7])
    assert ((got[0].double() - want.out).abs() <= 2.0**-16 * want.magnitude + 1e-30).all()


def check_codes(
    case: Case, got: tuple[Tensor, Tensor], codes: Any, scales: Any, out_scale: float, sums: float
) -> None:
    """As :func:`check`, for a result in e4m3: rounded once more, in units of its own scale."""
    assert got[0].dtype == E4M3
    assert got[0].transpose(1, 2).is_contiguous()
    q, k, v = values(codes, scales)
    want = case.true(q, k, v)
    lost = score_error(q, k, case.dim**-0.5, sums)
    before = (PROBABILITY + math.expm1(2 * lost + 2.0**-16)) * want.magnitude + FLOOR * want.largest
    rounding = 2.0**-4 * (want.out.abs() + before) + 2.0**-10 / out_scale
    out = got[0].float() / out_scale
    wider = want._replace(largest=want.largest + rounding / FLOOR)
    require_within((out, got[1]), wider, PROBABILITY, FLOOR, lost)


def test_definition() -> None:
    """On the CPU the op is the definition, which is float64 rounded once."""
    for case in CASES.values():
        for kind in kinds(case):
            codes, scales = quantized(case, kind)
            for dtype in (torch.float32, torch.bfloat16):
                got = OPS.attention_fp8(*codes, *scales, *case.rest(), -1, dtype)
                q, k, v = values(codes, scales)
                want = case.true(q, k, v)
                require_within(got, want, 2.0**-40, 0.0, 2.0**-40, 2.0**-40 + 2.0**-23)
                assert got[0].dtype == dtype
                assert got[0].transpose(1, 2).is_contiguous()


def test_dequantized_heads() -> None:
    """One kernel where it reads rows, and everywhere the bits of the formula."""
    generator = torch.Generator().manual_seed(0)
    for batch, heads, tokens, dim in ((2, 3, 200, 16), (1, 1, 1, 1), (2, 0, 5, 8), (1, 2, 128, 8)):
        x = torch.randn(batch, heads, tokens, dim, generator=generator).to(E4M3)
        blocks = -(-tokens // BLOCK)
        for scale in (torch.rand(1), torch.rand(batch, heads), torch.rand(batch, heads, blocks)):
            for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 0, 1, 2)):
                back = [order.index(axis) for axis in range(4)]
                codes = x.permute(order).contiguous().permute(back)
                for dtype in (torch.bfloat16, torch.float32):
                    got = dequantize_heads(codes, scale, dtype)
                    assert torch.equal(got, dequantize(codes, scale, dtype))


def check_op(case: Case, kind: str, device: str, route: str) -> None:
    """Run the op and compare.

    Hopper sums FP8 products with 13 bits below the largest term; dequantization rounds both factors
    of a score, and a result before its codes, to bf16: less than the probabilities that it does not
    round.
    """
    codes, scales = quantized(case, kind)
    here = [c.to(device) for c in codes[:2]]
    here.append(codes[2].mT.to(device).mT)
    with ixt.config.patch(attention=route):
        got = OPS.attention_fp8(*here, *(s.to(device) for s in scales), *case.rest(device))
        scale = torch.tensor(30.0, device=device)
        rest = (*case.rest(device), -1, E4M3, scale)
        coded = OPS.attention_fp8(*here, *(s.to(device) for s in scales), *rest)
    sums = 2.0**-12 + 2.0**-7 * (route == "dequantize")
    check(case, got, codes, scales, sums)
    check_codes(case, coded, codes, scales, 30.0, sums)


@pytest.mark.parametrize(
    ("device", "route"),
    [
        ("cpu", "dequantize"),
        *(pytest.param("cuda", r, marks=gpu) for r in ("triton", "dequantize")),
    ],
)
@pytest.mark.parametrize("name", EVERY)
def test_routes(name: str, device: str, route: str) -> None:
    for kind in kinds(EVERY[name]):
        check_op(EVERY[name], kind, device, route)


@gpu
def test_graph_capture_and_repeats() -> None:
    """No host synchronization, and the same bits twice."""
    case = EVERY["causal"]
    codes, scales = ([t.cuda() for t in made] for made in quantized(case, "head"))
    rest = case.rest("cuda")
    with ixt.config.patch(attention="triton"):
        first = OPS.attention_fp8(*codes, *scales, *rest)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = OPS.attention_fp8(*codes, *scales, *rest)
        graph.replay()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_graph_of_the_frontend() -> None:
    """cuDNN's frontend takes the graph; building it needs a card."""
    pytest.importorskip("cudnn")
    from inductor_ext.ops import _cudnn_frontend as frontend

    q = torch.empty(2, 32, 8, 128).to(E4M3).transpose(1, 2)
    k = torch.empty(2, 32, 2, 128).to(E4M3).transpose(1, 2)
    layout = frontend.layout_of(q, k, k, True, 0.1)
    assert hash(layout) == hash(frontend.layout_of(q.clone(), k, k, True, 0.1))
    graph, named = frontend.graph_of(layout)
    graph.validate()
    assert list(named["o"].get_dim()) == list(q.shape)
    assert list(named["o"].get_stride()) == list(q.stride())


@gpu
def test_frontend_on_a_card() -> None:
    """The bound of the kernel, and the result's own rounding to e4m3 in units of V's scale."""
    pytest.importorskip("cudnn")
    for case in (EVERY["dimension 128"], EVERY["groups"], EVERY["plain"]):
        case = case._replace(keys=case.queries)
        codes, scales = quantized(case, "tensor")
        here = [codes[0].cuda(), codes[1].cuda(), codes[2].contiguous().cuda()]
        given = (*here, *(s.cuda() for s in scales), *case.rest("cuda"))
        with ixt.config.patch(attention="cudnn_frontend"):
            out, lse = OPS.attention_fp8(*given)
            scale = torch.tensor(30.0, device="cuda")
            coded = OPS.attention_fp8(*given, -1, E4M3, scale)
        check_codes(case, coded, codes, scales, 30.0, 2.0**-12)
        want = case.true(*values(codes, scales))
        lost = score_error(*values(codes, scales)[:2], case.dim**-0.5, 2.0**-12)
        rounding = 2.0**-4 * (want.out.abs() + want.magnitude / 8) + 2.0**-9 * float(scales[2])
        wider = want._replace(largest=want.largest + rounding / FLOOR)
        require_within((out, lse), wider, PROBABILITY + 2.0**-8, FLOOR, lost)


class _Pointer:
    """An aligned pointer of a dtype, for compiling without a card."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype

    @staticmethod
    def data_ptr() -> int:
        return 0

    @staticmethod
    def ptr_range() -> int:
        return 0


def _compiled(dim: int, **change: Any) -> dict[str, Any]:
    """Return the kernel's assembly for an H100 and for 8192 causal tokens."""
    from inductor_ext.kernels.triton import attention_fp8 as kernel

    case = Case(heads=32, kv=8, dim=dim, queries=8192, keys=8192, right=0)._replace(**change)
    with torch.device("meta"):
        q = torch.empty(1, case.heads, case.queries, dim, dtype=E4M3)
        k = torch.empty(1, case.kv, case.keys, dim, dtype=E4M3)
        v = torch.empty(1, case.kv, dim, case.keys, dtype=E4M3).mT
        out, lse = q.to(torch.bfloat16), torch.empty(1, case.heads, case.queries)
        scales = [torch.empty(1, case.heads), torch.empty(1, case.kv), torch.empty(1, case.kv)]
    grid, given, constants = kernel.arguments(
        q, k, v, scales, None, 0.1, case.left, case.right, 8192, out, lse
    )
    given = tuple(_Pointer(x) if isinstance(x, Tensor) else x for x in given)
    with fake_gpu.pretend("sm_90"):
        made = kernel.attention_fp8_kernel.warmup(*given, grid=grid, **constants)
    return dict(made.asm)


# The last: bytes that may be spilled.  128's tile was the fastest of those tried on a card.
SIZES = [(16, {}, 0), (64, {}, 0), (128, {}, 184), (256, {}, 0), (128, {"left": 512}, 0)]


@pytest.mark.parametrize(("dim", "change", "spilled"), SIZES)
def test_tensor_cores(dim: int, change: dict[str, int], spilled: int, tmp_path: Any) -> None:
    """Both products are FP8 wgmma, loads are asynchronous, and next to nothing is spilled."""
    import triton

    asm = _compiled(dim, **change)
    products = re.findall(r"wgmma\.mma_async\S*m64n(\d+)k32\.f32\.e4m3\.e4m3", asm["ptx"])
    assert str(max(32, dim)) in products
    assert "mma.sync" not in asm["ptx"]
    assert "cp.async.cg" in asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in asm["ptx"]
    (tmp_path / "kernel.cubin").write_bytes(asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"REG:\d+ STACK:(\d+) ", done.stdout)
    assert int(stack) <= spilled


@pytest.mark.parametrize("granularity", ["tensor", "row", "square"])
def test_public_function(granularity: Any) -> None:
    """It quantizes what it is given, and its gradients are those of the quantized values."""
    case = Case(heads=4, kv=2, dim=32, queries=150, keys=150, right=0, batch=2)
    q, k, v = (t.bfloat16().requires_grad_() for t in case.tensors())
    fmt = ixt.FP8(granularity=granularity)
    out, lse = ixt.attention(q, k, v, causal=True, format=fmt, return_lse=True)
    assert not lse.requires_grad
    with torch.no_grad():
        made = [_quantize(t, fmt) for t in (q, k, v)]
        rounded = [dequantize(c, s, torch.float64) for c, s in made]
        again = ixt.attention(
            *(ixt.Quantized(*m) for m in made), causal=True, format=fmt, dtype=torch.bfloat16
        )
    assert torch.equal(out, again)
    require_within((out.detach(), lse), case.true(*rounded), 0.0, 0.0, 2.0**-40, 2.0**-22)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    got = torch.autograd.grad(out, (q, k, v), grad)
    rounded = [r.bfloat16().requires_grad_() for r in rounded]
    plain = torch.autograd.grad(
        OPS.attention(*rounded, None, None, 32**-0.5, -1, 0)[0], rounded, grad
    )
    for one, other in zip(got, plain, strict=True):
        assert (one - other).norm() <= 2.0**-7 * other.norm()


def _quantize(x: Tensor, fmt: ixt.FP8) -> tuple[Tensor, Tensor]:
    """Return codes and scales as docs/attention.md says the public function takes them."""
    batch, heads, tokens, dim = x.shape
    if fmt.granularity == "tensor":
        return ixt.quantize(x, fmt)[:2]  # type: ignore[return-value]
    row = ixt.FP8(granularity="row")
    if fmt.granularity == "row":
        codes, scale = ixt.quantize(x.reshape(batch * heads, tokens * dim), row)[:2]
        return codes.view(x.shape), scale.view(batch, heads)
    parts = [_quantize(part, row) for part in x.split(BLOCK, 2)]
    return torch.cat([p[0] for p in parts], 2), torch.stack([p[1] for p in parts], 2)


C = torch.zeros(1, 2, 4, 8).to(E4M3)
ONE = torch.ones(1)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"q": torch.zeros(1, 2, 4, 8)}, "`q` must be float8_e4m3fn, got float32"),
    "e5m2": ({"k": C.view(torch.float8_e5m2)}, "`k` must be float8_e4m3fn, got float8_e5m2"),
    "scale's dtype": ({"q_scale": ONE.double()}, "`q_scale` must be float32, got float64"),
    "scale's shape": (
        {"v_scale": torch.ones(1, 3)},
        r"`v_scale` must have one element or the shape \(1, 2\), one a head, or \(1, 2, 1\), one a",
    ),
    "blocks of packed": (
        {
            "q": C.expand(1, 2, 4, 8), "offsets": torch.tensor([0, 4], dtype=torch.int32),
            "k_scale": torch.ones(1, 2, 1),
        },
        r"`k_scale` must have one element or the shape \(1, 2\), one a head, got \(1, 2, 1\)",
    ),
    "result": ({"dtype": torch.float64}, "`dtype` must be bfloat16, float16 or float32"),
    "result's scale": (
        {"out_scale": torch.ones(2)}, r"`out_scale` must have one element, got \(2,\)"
    ),
    "its dtype": ({"out_scale": ONE.double()}, "`out_scale` must be float32, got float64"),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    """The same words in eager mode, on fakes, and compiled."""
    change, words = REFUSALS[name]
    given = {"q": C, "k": C, "v": C, "q_scale": ONE, "k_scale": ONE, "v_scale": ONE,
             "offsets": None, "out_scale": None, "dtype": torch.bfloat16} | change  # fmt: skip
    dtype = given.pop("dtype")

    def function(*args: Any) -> Tensor:
        *tensors, offsets, out_scale = args
        operands = [ixt.Quantized(c, s) for c, s in zip(tensors[:3], tensors[3:], strict=True)]
        fmt = ixt.FP8(granularity="tensor")
        return ixt.attention(
            *operands, offsets=offsets, format=fmt, dtype=dtype, out_scale=out_scale
        )

    with pytest.raises((TypeError, ValueError), match=words):
        function(*given.values())
    mode = _compat.FakeTensorMode()
    fakes = [t if t is None else mode.from_tensor(t) for t in given.values()]
    with mode, pytest.raises((TypeError, ValueError), match=words):
        function(*fakes)
    torch.compiler.reset()
    with pytest.raises(Exception, match=words):
        torch.compile(function, fullgraph=True)(*given.values())
