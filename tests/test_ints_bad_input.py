"""Bad arguments of the integer and scaling ops: the same words eager, on fakes and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_ext import _compat
from inductor_ext.ops import amax, int4, int8, scaling

X = torch.randn(4, 128)
ROW = torch.tensor(1.0)
CODES8, SCALE8 = int8.quantize_int8_row(X)
CODES4, SCALE4, ZERO4 = int4.quantize_int4_asymmetric(X, 64)
HISTORY, SCALES = torch.rand(4, 3), torch.rand(3)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

CASES: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "dtype": (
        amax.amax, (X.double(),), "`x` must be bfloat16, float16 or float32, got float64"),
    "integers": (
        int8.quantize_int8_tensor, (X.int(),),
        "`x` must be bfloat16, float16 or float32, got int32"),
    "0-d rows": (amax.amax_row, (ROW,), "`x` must have at least one dimension, got 0-d"),
    "0-d int8 rows": (
        int8.quantize_int8_row, (ROW,), "`x` must have at least one dimension, got 0-d"),
    "0-d groups": (
        int8.quantize_int8_group, (ROW, 32), "`x` must have at least one dimension, got 0-d"),
    "group": (int8.quantize_int8_group, (X, 48), "`group` must be 32, 64, 128 or 256, got 48"),
    "group of int4": (
        int4.quantize_int4_symmetric, (X, 0), "`group` must be 32, 64, 128 or 256, got 0"),
    "columns": (
        int4.quantize_int4_symmetric, (X[:, :96], 64),
        "`x` must have rows of a multiple of `group` elements, 64, got 96: use group 32"),
    "columns to pad": (
        int4.quantize_int4_asymmetric, (X[:, :100], 64),
        "`x` must have rows of a multiple of `group` elements, 64, got 100: pad to 128"),
    "codes": (int8.dequantize_int8, (X, ROW, 0, BF16), "`codes` must be int8, got float32"),
    "result": (
        int8.dequantize_int8, (CODES8, ROW, 0, torch.int8),
        "`dtype` must be bfloat16, float16 or float32, got int8"),
    "scale's dtype": (
        int8.dequantize_int8, (CODES8, SCALE8.double(), 0, BF16),
        "`scale` must be float32, got float64"),
    "scale's shape": (
        int8.dequantize_int8, (CODES8, torch.ones(4), 0, BF16),
        "`scale` must have one element or the shape (4, 1), a scale for each row of `codes`, "
        "got (4,)"),
    "scale of groups": (
        int8.dequantize_int8, (CODES8, SCALE8, 32, BF16),
        "`scale` must have the shape (4, 4), one element a group of 32, got (4, 1)"),
    "dequantize's group": (
        int8.dequantize_int8, (CODES8, SCALE8, 5, BF16),
        "`group` must be 0, 32, 64, 128 or 256, got 5"),
    "0-d codes": (
        int8.dequantize_int8, (CODES8[0, 0], ROW, 32, BF16),
        "`codes` must have at least one dimension, got 0-d"),
    "int4 codes": (
        int4.dequantize_int4, (CODES8, SCALE4, None, 64, BF16), "`codes` must be uint8, got int8"),
    "int4 columns": (
        int4.dequantize_int4, (CODES4[:, :40], SCALE4, None, 64, BF16),
        "`codes` must have rows of a multiple of 32 bytes for `group` 64, got 40"),
    "int4 scale": (
        int4.dequantize_int4, (CODES4, SCALE4[:, :1], None, 64, BF16),
        "`scale` must have the shape (4, 2), one element a group of 64, got (4, 1)"),
    "zero's dtype": (
        int4.dequantize_int4, (CODES4, SCALE4, ZERO4.int(), 64, BF16),
        "`zero` must be uint8, got int32"),
    "zero's shape": (
        int4.dequantize_int4, (CODES4, SCALE4, ZERO4[:3], 64, BF16),
        "`zero` must have the shape (4, 2), one element a group of 64, got (3, 2)"),
    "history's dtype": (
        scaling.update_fp8_scale, (HISTORY.double(), SCALES, E4M3),
        "`history` must be float32, got float64"),
    "history's rank": (
        scaling.update_fp8_scale, (HISTORY[None], SCALES, E4M3),
        "`history` must have 1 or 2 dimensions, got 3"),
    "scale of a history": (
        scaling.update_fp8_scale, (HISTORY[:, 0], SCALES, E4M3),
        "`scale` must have one element, got (3,)"),
    "scales of histories": (
        scaling.update_fp8_scale, (HISTORY, SCALES[:2], E4M3),
        "`scale` must have the shape (3,), got (2,)"),
    "fp8": (
        scaling.update_fp8_scale, (HISTORY, SCALES, torch.int8),
        "`dtype` must be float8_e4m3fn or float8_e5m2, got int8"),
    "margin": (
        scaling.update_fp8_scale, (HISTORY, SCALES, E4M3, 101),
        "`margin` must be at least -100 and at most 100, got 101"),
    "algorithm": (
        scaling.update_fp8_scale, (HISTORY, SCALES, E4M3, 0, "mean"),
        '`algorithm` must be "max" or "most_recent", got "mean"'),
    "expanded": (
        scaling.update_fp8_scale_, (HISTORY, SCALES[:1].expand(3), E4M3),
        "`scale` must not be expanded: it is written to"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_words_everywhere(case: str) -> None:
    op, arguments, words = CASES[case]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        op(*arguments)
    assert words in str(raised.value)
    with (
        _compat.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises((TypeError, ValueError)) as raised,
    ):
        op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    assert str(raised.value) == words
    torch.compiler.reset()
    with pytest.raises(Exception, match="must") as raised:
        torch.compile(lambda *args: op(*args), fullgraph=True, backend="eager")(*arguments)
    assert words in str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_same_words_on_cuda(case: str) -> None:
    op, arguments, words = CASES[case]
    moved = [a.cuda() if isinstance(a, Tensor) else a for a in arguments]
    if case == "expanded":
        moved[1] = moved[1][:1].expand(3)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        op(*moved)
    assert words in str(raised.value)


@pytest.mark.gpu
def test_devices_must_agree() -> None:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        int8.dequantize_int8(CODES8.cuda(), SCALE8, 0, BF16)
    assert "`scale` must be on the device of `codes`, cuda:0, got cpu" in str(raised.value)


def test_gradients_are_refused_while_compiling() -> None:
    x = X.clone().requires_grad_()
    run = torch.compile(lambda x: int8.quantize_int8_row(x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="`x` must not require grad"):
        run(x)
