"""Norms and activations on a card: against float64 over layouts and lengths, and repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_activations as activations
import test_norms as norms
import torch
from torch import Tensor

import inductor_ext as ixt

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def layouts(*matrices: Tensor) -> Iterator[list[Tensor]]:
    """Yield the matrices as they are, then out of step with 16 bytes, as halves, transposed."""
    yield list(matrices)
    yield [torch.cat([m.new_zeros(len(m), 3), m], -1)[:, 3:] for m in matrices]
    yield [torch.cat([m, m], -1)[:, m.shape[1] :] for m in matrices]
    yield [m.t().contiguous().t() for m in matrices]


# In registers (1, 2, 4 packs a thread), in steps of 16 bytes or not, longer than registers hold.
COLUMNS = (1, 8, 200, 201, 4096, 8192, 8199, 16384, 16392, 33000)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (F16, F32), (F32, BF16)])
def test_norms(columns: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    made = [t.cuda() for t in norms.case(dtype, weight_dtype, columns)]
    weight, bias = made[2:]
    for x, other in layouts(*made[:2]):
        norms.check_rms_norm(x, other, weight, 1.0)
        norms.check_layer_norm(x, weight, bias)
        norms.check_backward(other, x, weight, bias, layer=False)
        if columns > 1:  # the variance of one number is 0, and rstd 316
            norms.check_backward(other, x, weight, bias, layer=True)


@pytest.mark.parametrize("rows", [1, 5, 263, 264, 265, 3000])
def test_rows_shared_by_blocks(rows: int) -> None:
    """Gradients of weight and bias over fewer and more rows than there are blocks; repeated."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(rows, 1032, generator=generator, device="cuda") for _ in range(2))
    weight, bias = (torch.randn(1032, generator=generator, device="cuda") for _ in range(2))
    norms.check_backward(grad.bfloat16(), x.bfloat16(), weight, bias, layer=True)
    rstd = norms.OPS.rms_norm(x, weight)[1]
    first = norms.OPS.rms_norm_backward(grad, x, weight, rstd)
    for _ in range(100):
        again = norms.OPS.rms_norm_backward(grad, x, weight, rstd)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_nothing() -> None:
    for shape in norms.SHAPES:
        x, weight = torch.randn(shape).bfloat16().cuda(), torch.ones(shape[-1]).cuda()
        y, mean, rstd = norms.OPS.layer_norm(x, weight, weight)
        assert y.shape == shape
        dx, dweight, dbias = norms.OPS.layer_norm_backward(x, x, weight, weight, mean, rstd)
        assert dx.shape == shape
        assert dweight.shape == dbias.shape == weight.shape
        if 0 in shape[:-1]:
            assert not dweight.any()
            assert not dbias.any()


@pytest.mark.parametrize("name", activations.NAMES)
@pytest.mark.parametrize("dtype", activations.DTYPES, ids=str)
def test_activations(name: str, dtype: torch.dtype) -> None:
    made = [t.cuda() for t in activations.values(activations.NAMES[name] + 1, dtype)]
    for grad, *args in layouts(*made):
        activations.check_forward(name, *args)
        activations.check_backward(name, grad, *args)


@pytest.mark.parametrize("name", [n for n, count in activations.NAMES.items() if count == 1])
def test_every_bf16_value(name: str) -> None:
    activations.check_every_bf16_value(name, "cuda")


def test_relu2_bit_for_bit() -> None:
    activations.check_relu2("cuda")


@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_the_compiled_form(name: str) -> None:
    made = [t.cuda() for t in activations.values(activations.NAMES[name], BF16)]
    with ixt.config.patch(enabled=True):
        got = torch.compile(getattr(ixt, name), fullgraph=True)(*made)
    want = getattr(ixt, name)(*made)
    assert int((got != want).sum()) <= (0 if name == "relu2" else got.numel() // 100)


@pytest.mark.usefixtures("roomy")
def test_more_elements_than_32_bits_count() -> None:
    shape = (2**31 // 4096 + 3, 4096)
    a = torch.empty(shape, dtype=BF16, device="cuda").normal_()
    weight = torch.ones(4096, dtype=BF16, device="cuda")
    y, rstd = norms.OPS.rms_norm(a, weight)
    last = norms.OPS.rms_norm(a[-5:], weight)
    assert torch.equal(y[-5:], last[0])
    assert torch.equal(rstd[-5:], last[1])
    assert torch.equal(ixt.swiglu(a, y)[-5:], ixt.swiglu(a[-5:], y[-5:]))
    dx, _ = norms.OPS.rms_norm_backward(y, a, weight, rstd)
    assert torch.equal(dx[-5:], norms.OPS.rms_norm_backward(y[-5:], a[-5:], weight, rstd[-5:])[0])
