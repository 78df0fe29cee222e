"""RoPE and its backward: against float64, Hugging Face's and GPT-J's forms, fused, refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import floats
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import inductor_ext as ixt
from inductor_ext import _compat, fake_gpu
from inductor_ext.decompositions import rope as formulas
from inductor_ext.testing import running

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = torch.ops.inductor_ext
SHAPES = [(2, 5, 3, 64, 0), (1, 3, 7, 96, 32), (3, 1, 1, 7, 4), (2, 3, 0, 16, 0), (0, 2, 3, 8, 2)]
"""(B, H, S, D, rotary_dim)"""


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cases() -> Any:
    """Yield the arguments of every form: tables half and full, 2-D, 3-D, by positions; layouts."""
    forms = itertools.product(SHAPES, (False, True), (False, True), range(4))
    for turn, ((b, h, s, d, rotary), interleaved, full, kind) in enumerate(forms):
        x = _randn(b, s, h, d).to(DTYPES[turn % 3]).transpose(1, 2)
        if turn % 5 == 1:
            x = x.contiguous()
        if turn % 5 == 2:  # unit stride nowhere
            x = _randn(b, h, d, s).to(x.dtype).transpose(2, 3)
        width = (rotary or d) // (1 if full else 2)
        shape = ((s, width), (b, s, width), (1, s, width), (11, width))[kind]
        tables = [_randn(*shape, seed=n).to(DTYPES[turn // 2 % 3]) for n in (1, 2)]
        positions = None
        if kind == 3:  # some in front of the table, which the clamp brings in
            at = torch.randint(-2, 11, (b, s) if turn % 2 else (s,))
            positions = at if turn % 4 < 2 else at.int()
        yield x, *tables, positions, rotary, interleaved


def true_rope(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, rotary: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return the result in float64, pair by pair, and the size of what each element adds."""
    half = (rotary or x.shape[3]) // 2
    y, size = x.double().clone(), torch.zeros(x.shape, dtype=torch.float64)
    rows = [t.double() for t in (cos, sin)]
    if positions is not None:
        rows = [t[positions.clamp(0, len(t) - 1).long()] for t in rows]
    c, s = (t if t.dim() == 3 else t[None] for t in rows)  # (B or 1, S, W)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        at = (a, b) if c.shape[-1] == 2 * half else (i, i)
        (ca, cb), (sa, sb) = ([t[:, None, :, j] for j in at] for t in (c, s))
        u, v = x[..., a].double(), x[..., b].double()
        y[..., a], y[..., b] = u * ca - v * sa, v * cb + u * sb
        size[..., a] = (u * ca).abs() + (v * sa).abs()
        size[..., b] = (v * cb).abs() + (u * sb).abs()
    return y, size


def check_rope(*args: Any) -> None:
    """Two products and their difference, each rounded to fp32: 2^-24 of each term and of the
    result, 2^-23 of both terms together at most; then one rounding, half an ulp."""
    got = OPS.rope(*args)
    want, size = true_rope(*(a.cpu() if isinstance(a, Tensor) else a for a in args))
    assert got.is_contiguous()
    floats.require_close(got.cpu(), want, 2**-23 * size, ulps=0.5)


def test_one_rounding_of_float64() -> None:
    for args in cases():
        check_rope(*args)


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def hf_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's ``apply_rotary_pos_emb`` of one tensor, cos and sin (B, S, D)."""
    return x * cos.unsqueeze(1) + _rotate_half(x) * sin.unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_hugging_faces_in_fp32_rounded_once(dtype: torch.dtype) -> None:
    x = _randn(2, 9, 3, 32).to(dtype).transpose(1, 2)
    angle = (torch.arange(9)[:, None] * 1e4 ** -(torch.arange(16) / 16)).repeat(2, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    want = hf_rope(x.float(), cos.float(), sin.float()).to(dtype)
    assert torch.equal(ixt.rope(x, cos, sin), want)
    assert torch.equal(ixt.rope(x, cos[..., :16], sin[..., :16]), want)
    by_position = ixt.rope(x, cos[0], sin[0], positions=torch.arange(9))
    assert torch.equal(by_position, want)


def test_as_gpt_js_in_fp32_rounded_once() -> None:
    x, angle = _randn(2, 3, 9, 32), _randn(9, 16)
    cos, sin = (f(angle).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
    other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    want = x * cos + other * sin
    assert torch.equal(ixt.rope(x, cos, sin, interleaved=True), want)
    assert torch.equal(ixt.rope(x, angle.cos(), angle.sin(), interleaved=True), want)


SMALL = [args for args in cases() if 0 < args[0].numel() < 100]


@pytest.mark.parametrize("number", range(len(SMALL)))
def test_gradcheck_of_the_formula(number: int) -> None:
    """In float64, where the formulas do not round."""
    x, cos, sin, *rest = SMALL[number]
    x, cos, sin = (t.double() for t in (x, cos, sin))

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with floats.as_float64():
                return formulas.rope(x, cos, sin, *rest)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with floats.as_float64():
                return formulas.rope_backward(grad, cos, sin, *rest, number % 2 == 0)

    assert torch.autograd.gradcheck(Rule.apply, (x.requires_grad_(),))


@pytest.mark.parametrize("token_major", [False, True])
def test_the_gradient_lies_as_x_does(token_major: bool) -> None:
    """A projection's gradient needs no copy; eager and compiled agree bit for bit on the CPU."""
    leaf = _randn(2, 5, 3, 32) if token_major else _randn(2, 3, 5, 32)
    leaf.requires_grad_()
    cos, sin, grad = _randn(5, 16), _randn(5, 16, seed=1), _randn(2, 3, 5, 32)

    def run(leaf: Tensor) -> Tensor:
        return ixt.rope(leaf.transpose(1, 2) if token_major else leaf, cos, sin)

    (want,) = torch.autograd.grad(run(leaf), leaf, grad)
    assert want.is_contiguous()
    back = OPS.rope_backward(grad, cos, sin, None, 0, False, token_major)
    assert (back.transpose(1, 2) if token_major else back).is_contiguous()
    if not token_major:  # compiled once is enough
        return
    with running.plugin(True):
        ixt.clear_records()
        (got,) = torch.autograd.grad(torch.compile(run, fullgraph=True)(leaf), leaf, grad)
        assert {r.outcome for r in ixt.records()} == {"decomposed"}
    assert torch.equal(got, want)


@pytest.mark.contract
def test_one_compilation_for_all_lengths() -> None:
    cos, sin = _randn(64, 8), _randn(64, 8, seed=1)

    def step(x: Tensor, positions: Tensor) -> Tensor:
        return ixt.rope(x.transpose(1, 2), cos, sin, positions=positions)

    with running.plugin(True):
        run = running.compiled(running.own_code(step, "rope"), dynamic=True)
        run(_randn(2, 3, 4, 16), torch.arange(3))
        before = running.graphs()
        for batch, tokens in ((3, 5), (2, 7), (5, 64)):
            x, positions = _randn(batch, tokens, 4, 16), torch.arange(tokens)
            assert torch.equal(run(x, positions), step(x, positions))
        assert running.graphs() == before


ROW, STATIC = ixt.FP8(granularity="row"), ixt.FP8(granularity="tensor")
Q = torch.empty(2, 64, 8, 128, dtype=torch.bfloat16)  # (B, S, H, D), as projected
FULL, HALF = torch.empty(2, 64, 128, dtype=torch.bfloat16), torch.empty(64, 64)


def _codes(y: Tensor) -> Any:
    return ixt.quantize(y, ROW)[:2]


CHAINS: dict[str, Callable[..., Any]] = {
    "row": lambda q, c, t: _codes(ixt.rope(q.transpose(1, 2), t, t)),
    "row, full tables": lambda q, c, t: _codes(ixt.rope(q.transpose(1, 2), c, c)),
    "row, interleaved": lambda q, c, t: _codes(ixt.rope(q.transpose(1, 2), t, t, interleaved=True)),
    "row, partial": lambda q, c, t: _codes(
        ixt.rope(q.transpose(1, 2), t[:, :32], t[:, :32], rotary_dim=64)
    ),
    "row, by position": lambda q, c, t: _codes(
        ixt.rope(q.transpose(1, 2), t, t, positions=t[:, 0].long())
    ),
    "a scale given": lambda q, c, t: ixt.quantize(
        ixt.rope(q.transpose(1, 2), t, t), STATIC, t[0, :1]
    )[0],
    "in plain PyTorch": lambda q, c, t: _codes(hf_rope(q.transpose(1, 2), c, c)),
    "INT8, as rows": lambda q, c, t: ixt.quantize(
        ixt.rope(q.transpose(1, 2), t, t).view(-1, 128), ixt.INT8()
    )[:2],
}


@pytest.mark.parametrize("name", CHAINS)
def test_one_kernel_with_quantize(name: str) -> None:
    with ixt.config.patch(enabled=True, strict=True):
        (graph,) = fake_gpu.capture(CHAINS[name], (Q, FULL, HALF), "sm_90")
    assert (len(graph.kernels), len(graph.externs)) == (1, 0)


X, T = torch.ones(2, 3, 4, 8), torch.ones(4, 4)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "x's dtype": ((X.double(), T, T), {}, "`x` must be bfloat16, float16 or float32, got float64"),
    "x's shape": ((X[0], T, T), {}, r"`x` must have the shape \(B, H, S, D\), got \(3, 4, 8\)"),
    "odd": ((X[..., :7], T, T), {}, "`x` must have an even last size above 0, got 7"),
    "width": ((X, T[:, :3], T[:, :3]), {}, r"`cos` must have a last size of 8 or 4, "),
    "tokens": ((X, T[:3], T[:3]), {}, r"`cos` must have the shape \(4, 4\) or \(2, 4, 4\)"),
    "sin": ((X, T, T[:, :2]), {}, "`sin` must have the shape of `cos`"),
    "sin's dtype": ((X, T, T.half()), {}, "`sin` must be float32, got float16"),
    "rotary_dim": ((X, T, T), {"rotary_dim": 3}, "`rotary_dim` must be even and at most 8"),
    "positions": ((X, T, T), {"positions": T[0]}, "`positions` must be int32 or int64"),
    "positions' shape": (
        (X, T, T), {"positions": torch.arange(3)},
        r"`positions` must have the shape \(4,\) or \(2, 4\), got \(3,\)",
    ),
    "cos' gradient": ((X, T.clone().requires_grad_(), T), {}, "`cos` must not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    args, options, words = BAD[case]
    refuse(lambda *a: ixt.rope(*a, **options), args, words, compiled=case == "rotary_dim")


def refuse(call: Callable[..., Any], args: Any, words: str, *, compiled: bool) -> None:
    """The same words in eager mode, on fakes, and from the compiler."""
    with pytest.raises((TypeError, ValueError), match=words):
        call(*args)
    mode = _compat.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = pytree.tree_map_only(Tensor, mode.from_tensor, args)
    with mode, pytest.raises((TypeError, ValueError), match=words):
        call(*fakes)
    if compiled:
        with ixt.config.patch(enabled=True), pytest.raises(Exception, match=words):
            torch.compile(call, fullgraph=True, dynamic=False, backend="eager")(*args)


def test_a_position_behind_the_table() -> None:
    at = torch.tensor([0, 1, 4, 2])
    with pytest.raises(ValueError, match="`positions` must be below 4, the rows of `cos`, got 4"):
        ixt.rope(X, T, T, positions=at)
