"""attention: every back end against float64, gradients, compiled code, refusals."""

from __future__ import annotations

import importlib.util
import itertools
import math
from typing import Any

import pytest
import torch
from attention_cases import CASES, UNIT, WIDER, Case, require_within, score_error
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu
from inductor_ext.ops import _sdpa
from inductor_ext.ops import attention as attention_op
from inductor_ext.ops._routes_attention import SDPA, Call, choose_attention, choose_attention_fp8

OPS = torch.ops.inductor_ext
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
gpu = pytest.mark.gpu
ROUTES = [("cpu", "auto"), ("cpu", "math"), *(pytest.param("cuda", r, marks=gpu) for r in
          ("auto", *SDPA))]  # fmt: skip


def _takes(pin: str, q: Tensor, k: Tensor, rest: Any) -> bool:
    """Whether the pinned back end takes the call; "auto" and "math" must."""
    try:
        with ixt.config.patch(attention=pin):
            choose_attention(attention_op.call_of(q, k, (*rest, -1)))
    except ValueError:
        assert pin not in ("auto", "math")
        return False
    return True


@pytest.mark.parametrize(("device", "pin"), ROUTES)
@pytest.mark.parametrize("name", [*CASES, *WIDER])
def test_against_float64(device: str, pin: str, name: str) -> None:
    """P is rounded to the inputs' dtype, and sums are fp32: D products, then the keys."""
    case = (CASES | WIDER)[name]
    if device == "cpu" and name in WIDER and name != "dimension 96":
        pytest.skip("the CPU's kernel knows no difference")
    for dtype in DTYPES:
        q, k, v = (t.to(dtype) for t in case.tensors())
        here = [t.to(device) for t in (q, k, v)]
        rest = case.rest(device)
        if not _takes(pin, *here[:2], rest):
            continue
        with ixt.config.patch(attention=pin):
            got = OPS.attention(*here, *rest)
        # Hopper's fp32 products of tensor cores drop bits below 2^-23 of the largest; tf32 is off
        scores = score_error(q, k, rest[2], 2.0**-21)
        # PyTorch's CPU kernel has a shorter exp for 16-bit numbers, good to about 2^-14
        short = 2.0**-13 if device == "cpu" and dtype != torch.float32 else 2.0**-17
        require_within(got, case.true(q, k, v), 2 * UNIT[dtype], 0.0, scores, short)
        assert got[0].transpose(1, 2).is_contiguous()


def _leaves(case: Case, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [t.to(dtype).to(device).requires_grad_() for t in case.tensors(3)]


@pytest.mark.parametrize(("device", "pin"), ROUTES)
@pytest.mark.parametrize("name", ["plain", "groups", "more keys", "more queries", "causal window",
                                  "packed", "dimension 96"])  # fmt: skip
def test_gradients(device: str, pin: str, name: str) -> None:
    """Against autograd through the formula in float64.

    dV = Pᵀ dO; dS = P (dO Vᵀ - rowsum(dO O)); dQ = scale dS K; dK = scale dSᵀ Q.  Rounded to the
    inputs' dtype are P, dS, O, the gradients, and sums over a group's heads: each product is off by
    at most 5 units of the sum of magnitudes, and by what fp32 sums lose.
    """
    case = (CASES | WIDER)[name]
    for dtype in DTYPES:
        q, k, v = _leaves(case, dtype, device)
        rest = case.rest(device)
        if not _takes(pin, q, k, rest):
            continue
        with ixt.config.patch(attention=pin):
            out, _ = OPS.attention(q, k, v, *rest)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
            got = torch.autograd.grad(out, (q, k, v), grad)
        want, sizes = _true_gradients(case, q, k, v, grad)
        for one, true, size in zip(got, want, sizes, strict=True):
            allowed = (5 * UNIT[dtype] + 2.0**-17) * size + 1e-30
            assert ((one.double().cpu() - true).abs() <= allowed).all()


def _true_gradients(case: Case, *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the float64 gradients of q, k and v, and the sums of magnitudes behind them."""
    q, k, v, grad = (t.detach().cpu().double() for t in tensors)
    group = case.heads // case.kv
    seen = torch.zeros(case.queries, case.keys, dtype=torch.bool)
    from oracle.attention import sequences

    for mine, theirs in sequences(case.queries, case.keys, case.offsets, case.offsets_k):
        for i, j in itertools.product(mine, theirs):
            ahead = (j - theirs.stop) - (i - mine.stop)
            left, right = (math.inf if w < 0 else w for w in (case.left, case.right))
            seen[i, j] = -left <= ahead <= right
    scale = case.dim**-0.5
    leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ keys.mT * scale).masked_fill(~seen, -math.inf)
    p = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
    p = torch.where(seen.any(-1)[:, None], p, 0.0)
    out = p @ values
    want = torch.autograd.grad(out, leaves, grad)
    with torch.no_grad():
        ds = p * (grad.abs() @ values.abs().mT + (grad * out).abs().sum(-1, keepdim=True))
        dk, dv = ds.mT @ q.abs() * scale, p.mT @ grad.abs()
        sizes = [ds @ keys.abs() * scale, *(t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))]
    return [torch.nan_to_num(t) for t in want], sizes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_nothing_and_layouts(device: str) -> None:
    for shape_q, shape_k in (
        ((0, 2, 3, 8), (0, 2, 4, 8)),
        ((1, 2, 0, 8), (1, 2, 4, 8)),
        ((1, 2, 3, 8), (1, 2, 0, 8)),
        ((1, 0, 3, 8), (1, 2, 4, 8)),
    ):
        q, k = torch.randn(shape_q, device=device), torch.randn(shape_k, device=device)
        out, lse = OPS.attention(q, k, k, None, None, 1.0, -1, 0)
        assert out.shape == q.shape
        assert not out.any()
        assert (lse == -torch.inf).all()
    x = torch.randn(3, 40, 4, 50, device=device).bfloat16()
    want = None
    for layout in (
        x[:, 3:36, :, 9:41].transpose(1, 2),
        x[:, 3:36, :, 9:41].transpose(1, 2).contiguous(),
        x[:, 3:36, :, 9:41].permute(0, 3, 1, 2).contiguous().permute(0, 3, 2, 1),
    ):
        got = ixt.attention(layout, layout, layout, causal=True)
        want = got if want is None else want
        # a library may take another kernel for another layout; weights and results are bf16
        near = 0.0 if device == "cpu" else 2.0**-6 * float(x.abs().max())
        assert ((got - want).abs() <= near).all()
    one = x[:1, :1, :, :32].transpose(1, 2).expand(3, 4, 9, 32)
    assert torch.allclose(ixt.attention(one, one, one), one, rtol=2.0**-7)


def test_public_function() -> None:
    q, k, v = (t.bfloat16() for t in CASES["causal"].tensors())
    out, lse = ixt.attention(q, k, v, causal=True, return_lse=True)
    raw = OPS.attention(q, k, v, None, None, 64**-0.5, -1, 0)
    assert torch.equal(out, raw[0])
    assert torch.equal(lse, raw[1])
    assert torch.equal(ixt.attention(q, k, v, window=(-1, 0)), out)
    windowed = ixt.attention(q, k, v, window=(4, 9), causal=True, scale=0.5)
    assert torch.equal(windowed, OPS.attention(q, k, v, None, None, 0.5, 4, 0)[0])


@pytest.mark.contract
@pytest.mark.parametrize("fmt", [None, ixt.FP8(granularity="row")], ids=str)
def test_compiled(fmt: ixt.Format | None) -> None:
    """One graph, forward and backward, eager's bits, and one compilation for many lengths."""
    compiles = CompileCounterWithBackend("inductor" if fmt is None else "aot_eager")

    def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ixt.attention(q, k, v, causal=True, format=fmt).transpose(1, 2).flatten(2)

    compiled = torch.compile(chain, fullgraph=True, dynamic=True, backend=compiles)
    counts = []
    for tokens in (33, 48, 65):
        case = Case(heads=4, queries=tokens, keys=tokens, batch=2)
        q, k, v = _leaves(case, torch.bfloat16, "cpu")
        got, want = compiled(q, k, v), chain(q, k, v)
        assert torch.equal(got, want)
        ours, theirs = (torch.autograd.grad(x, (q, k, v), x.detach()) for x in (got, want))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
        counts.append(compiles.frame_count)
    assert counts[1:] == counts[:-1]


def test_compiled_for_a_gpu() -> None:
    """What is saved for the backward are the inputs, the result and lse; nothing is run twice."""
    q, k, v = (t.bfloat16().contiguous().requires_grad_() for t in CASES["causal"].tensors())
    with ixt.config.patch(enabled=True):
        graphs = fake_gpu.capture(lambda *a: ixt.attention(*a, causal=True), (q, k, v), "sm_90")
    forward, backward = graphs
    assert forward.externs == ("torch.ops.inductor_ext.attention.default",)
    assert backward.externs == ("torch.ops.inductor_ext.attention_backward.default",)
    assert not forward.kernels
    assert not backward.kernels


@pytest.mark.parametrize("name", SDPA[:3])
@pytest.mark.parametrize("case", ["plain", "causal", "groups", "more queries", "window", "packed"])
def test_calls_of_back_ends(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernels take the arguments and give the shapes; on fakes, without a card."""
    made = CASES[case]
    monkeypatch.setattr(_sdpa, "_ready", lambda x: x)  # it looks at addresses
    monkeypatch.setattr(_sdpa, "_cudnn_lse_dimensions", lambda device: 4)
    with fake_gpu.pretend("sm_90"), _compat.FakeTensorMode():
        q, k, v = (t.bfloat16() for t in (torch.empty(s.shape, device="cuda") for s in
                                          made.tensors()))  # fmt: skip
        rest = (*made.rest("cuda"), -1)
        call = attention_op.call_of(q, k, rest)
        with ixt.config.patch(attention=name):
            try:
                assert choose_attention(call)[0] == name
            except ValueError:
                assert name != "flash"
                return
        out, lse = _sdpa.forward(name, call, q, k, v, rest)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
        assert lse.dtype == torch.float32
        if name == "efficient":  # its meta function in PyTorch 2.11 has an argument too few
            return
        gradients = _sdpa.backward(name, call, out, q, k, v, out, lse, rest)
        assert [g.shape for g in gradients] == [t.shape for t in (q, k, v)]


HOPPER = Call((9, 0), torch.bfloat16, 128, 64, 64, -1, 0, False, False, False)


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        (HOPPER, "cudnn", "0.98 ms"),
        (HOPPER._replace(dim=256), "flash", "not cudnn: it takes heads of at most 128"),
        (HOPPER._replace(left=5), "flash", "windows"),
        (HOPPER._replace(keys=128), "flash", "top-left"),
        (HOPPER._replace(packed=True, right=-1), "flash", "packed"),
        (HOPPER._replace(dim=12), "math", "multiples of 8"),
        (HOPPER._replace(dtype=torch.float32), "efficient", "not flash: it takes bfloat16"),
        (HOPPER._replace(capability=(8, 0)), "flash", "PyTorch's own order"),
        (HOPPER._replace(capability=(7, 5)), "math", "sm_80"),
        (HOPPER._replace(empty=True), "math", "nothing to compute"),
        (HOPPER._replace(capability=None), "flash", "for the CPU"),
        (HOPPER._replace(capability=None, left=3), "math", "no windows"),
    ],
)
def test_choices(call: Call, name: str, words: str) -> None:
    chosen, why = choose_attention(call)
    assert chosen == name
    assert words in why


def test_cudnn_is_first_for_many_keys_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = HOPPER._replace(queries=4096, keys=4096)
    for name, chosen in (("cudnn", "cudnn_frontend"), ("nothing", "triton")):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda wanted, name=name: wanted in (name, "triton") or None,
        )
        assert choose_attention_fp8(many)[0] == chosen
        assert choose_attention_fp8(many._replace(keys=2048, queries=2048))[0] == "triton"
        assert choose_attention_fp8(many._replace(whole=False))[0] == "triton"
        assert choose_attention_fp8(many._replace(left=9))[0] == "triton"


def test_pins() -> None:
    with ixt.config.patch(attention="flash"):
        assert choose_attention(HOPPER) == ("flash", 'config.attention = "flash"')
        assert choose_attention_fp8(HOPPER._replace(whole=False))[0] == "triton"
        assert choose_attention_fp8(HOPPER._replace(capability=(8, 9)))[0] == "dequantize"
        with pytest.raises(ValueError, match='must not be "flash" for this call: it takes heads'):
            choose_attention(HOPPER._replace(dim=512))
    with ixt.config.patch(attention="triton"):
        assert choose_attention(HOPPER)[0] == "cudnn"
        assert choose_attention_fp8(HOPPER)[0] == "triton"
        with pytest.raises(ValueError, match="FP8 tensor cores came with sm_89"):
            choose_attention_fp8(HOPPER._replace(capability=(8, 0)))
    with pytest.raises(ValueError, match=r"config.attention must be one of"):
        ixt.config.attention = "fastest"


def test_explained() -> None:
    q, k, v = (t.bfloat16() for t in CASES["causal"].tensors())
    with ixt.config.patch(enabled=True):
        said = ixt.explain(lambda *a: ixt.attention(*a, causal=True), q, k, v, target="sm_90")
    op = said.ops[0]
    assert op.outcome == "opaque"
    assert op.reason.startswith("cudnn: 0.98 ms")


Q = torch.zeros(1, 2, 4, 8)
END = torch.tensor([0, 4], dtype=torch.int32)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"q": Q.double()}, "`q` must be bfloat16, float16 or float32, got float64"),
    "dtypes": ({"k": Q.bfloat16()}, "`k` must be float32, got bfloat16"),
    "dimensions": ({"v": Q[0]}, r"`v` must have 4 dimensions, \(B, H, S, D\), got 3"),
    "head size": ({"k": torch.zeros(1, 2, 4, 9)}, r"`k` must have the shape \(1, H, S, 8\)"),
    "values": ({"v": Q[:, :, :3]}, r"`v` must have the shape of `k`, \(1, 2, 4, 8\), got"),
    "groups": ({"q": Q[:, :1]}, "`q` must have a multiple of the 2 heads of `k`, got 1"),
    "scale": ({"scale": -1.0}, "`scale` must be a positive number, got -1.0"),
    "window": ({"window": (-2, 0)}, "`left` must be at least 0, or -1 for no bound, got -2"),
    "offsets": ({"offsets": END.long()}, "`offsets` must be int32, got int64"),
    "one offset": ({"offsets": END[:1]}, r"`offsets` must have the shape \(n \+ 1,\)"),
    "offsets_k": ({"offsets_k": END}, "`offsets_k` must be None without `offsets`"),
    "batch": (
        {n: Q.expand(3, 2, 4, 8) for n in "qkv"} | {"offsets": END},
        "`q` must have a batch of 1 with `offsets`, got 3",
    ),
    "packed keys": (
        {"q": Q[:, :, :3], "offsets": END}, "`k` must have the 3 tokens of `q` without `offsets_k`"
    ),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    """The same words in eager mode, on fakes, and compiled."""
    change, words = REFUSALS[name]
    given = {"q": Q, "k": Q, "v": Q, "offsets": None, "offsets_k": None} | change
    tensors = {n: given.pop(n) for n in ("q", "k", "v", "offsets", "offsets_k")}

    def function(*args: Tensor) -> Tensor:
        return ixt.attention(**dict(zip(tensors, args, strict=True)), **given)

    with pytest.raises((TypeError, ValueError), match=words):
        function(*tensors.values())
    mode = _compat.FakeTensorMode()
    fakes = [t if t is None else mode.from_tensor(t) for t in tensors.values()]
    with mode, pytest.raises((TypeError, ValueError), match=words):
        function(*fakes)
    torch.compiler.reset()
    with pytest.raises(Exception, match=words):
        torch.compile(function, fullgraph=True)(*tensors.values())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q": [1.0]}, "`q` must be a Tensor, got list"),
        ({"k": ixt.Quantized(Q, Q)}, "`k` must be a Tensor as `q` is, got Quantized"),
        ({"causal": 1}, "`causal` must be a bool, got 1"),
        ({"window": 5}, r"`window` must be \(left, right\) or None, got 5"),
        ({"format": ixt.INT8()}, r"`format` must be FP8\(dtype=torch.float8_e4m3fn\) or None"),
        ({"format": ixt.FP8(granularity="block")}, "`format` must have granularity"),
        ({n: ixt.Quantized(Q, Q) for n in "qkv"}, r"`format` must be FP8\(...\) for quantized"),
    ],
    ids=str,
)
def test_refusals_of_the_public_function(given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        ixt.attention(**({"q": Q, "k": Q, "v": Q} | given))
