"""Bad arguments of the NVFP4 ops: the same clear error in eager mode, on fakes and compiled."""

from __future__ import annotations

from typing import Any

import nvfp4_family as family
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat

X, ONE = torch.randn(16, 32), torch.tensor(1.0)
CODES = torch.zeros(4, 16, dtype=torch.uint8)
SCALES = torch.ones(4, 2).to(torch.float8_e4m3fn)
F32 = torch.float32

CASES: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "dtype": ("quantize", (X.double(), ONE, 1, 16), r"`x` must be bfloat16, .* got \S*float64"),
    "0-d": ("quantize", (ONE, ONE, 1, 16), "`x` must have at least 1 dimension, got 0"),
    "block": (
        "quantize",
        (X, ONE, 1, 32),
        r"\(`block_m`, `block_k`\) must be \(1, 16\), .* got \(1, 32\)",
    ),
    "columns must be transposed": (
        "quantize",
        (X, ONE, 16, 1),
        r"\(16, 1\) with transposed=True, .* with transposed=False",
    ),
    "rows must not be": (
        "quantize",
        (X, ONE, 1, 16, True),
        r"must be \(1, 16\), .* got \(1, 16\) with .*=True",
    ),
    "layout": ("quantize", (X, ONE, 1, 16, False, "x"), '`layout` must be "plain" or "gemm", got'),
    "square Hadamard": (
        "quantize",
        (X, ONE, 16, 16, False, "plain", True),
        "`hadamard` must be False for blocks of",
    ),
    "columns": (
        "quantize",
        (X[:, :30], ONE, 1, 16),
        "a multiple of 16 columns, got 30; padded .* to 32 it",
    ),
    "rows": (
        "quantize",
        (X[:15], ONE, 16, 16, True),
        r"a multiple of 16 rows \(.*\), got 15; padded .*16",
    ),
    "amax's dtype": (
        "quantize",
        (X, ONE.double(), 1, 16),
        r"`amax` must be float32, got \S*float64",
    ),
    "amax's shape": (
        "quantize",
        (X, torch.ones(16), 1, 16),
        r"`amax` must have one element or the shape \(16, 1\)",
    ),
    "amax of columns": (
        "quantize",
        (X, torch.ones(16, 1), 16, 1, True),
        r"one element or the shape \(32, 1\), an amax",
    ),
    "amax of squares": (
        "quantize",
        (X, torch.ones(16, 1), 16, 16),
        "`amax` must have one element for blocks of 16x16",
    ),
    "rng's dtype": (
        "quantize",
        (X, ONE, 1, 16, False, "plain", False, torch.ones(2)),
        r"`rng` must be int64, got",
    ),
    "rng's shape": (
        "quantize",
        (X, ONE, 1, 16, False, "plain", False, torch.ones(3, dtype=torch.int64)),
        r"`rng` must have the shape \(2,\), seed and offset, got \(3,\)",
    ),
    "both: rows": ("both", (X[:8], ONE, ONE, False), r"a multiple of 16 rows \(.*\), got 8"),
    "both: amax_t": (
        "both",
        (X, ONE, torch.ones(3), False),
        r"`amax_t` must have one element or the shape \(32",
    ),
    "both: square Hadamard": (
        "both",
        (X, ONE, ONE, True, "plain", True),
        "`hadamard` must be False for blocks of 16x16",
    ),
    "amax: columns": ("amax", (X[:, :8], False), "a multiple of 16 columns, got 8"),
    "codes": ("dequantize", (X, SCALES, ONE, 1, 16, F32), r"`codes` must be uint8, got \S*float32"),
    "codes' columns": (
        "dequantize",
        (CODES[:, :9], SCALES, ONE, 1, 16, F32),
        "`codes` must have a multiple of 8 col",
    ),
    "dequantize's block": (
        "dequantize",
        (CODES, SCALES, ONE, 16, 1, F32),
        r"must be \(1, 16\) or \(16, 16\), got \(16, 1",
    ),
    "scales' dtype": (
        "dequantize",
        (CODES, SCALES.float(), ONE, 1, 16, F32),
        "`scales` must be float8_e4m3fn, got",
    ),
    "scales' shape": (
        "dequantize",
        (CODES, SCALES, ONE, 16, 16, F32),
        r"`scales` must have the shape \(1, 2\), got",
    ),
    "scales' layout": (
        "dequantize",
        (CODES, SCALES, ONE, 1, 16, F32, "gemm"),
        r"must have the shape \(128, 4\), got",
    ),
    "dequantize's amax": (
        "dequantize",
        (CODES, SCALES, torch.ones(4), 1, 16, F32),
        r"one element or the shape \(4, 1\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_eager(case: str) -> None:
    op, arguments, message = CASES[case]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        family.OPS[op](*arguments)


@pytest.mark.parametrize("case", CASES)
def test_fakes(case: str) -> None:
    op, arguments, message = CASES[case]
    with _compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        with pytest.raises((TypeError, ValueError), match=message):
            family.OPS[op](*fakes)


@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str) -> None:
    op, arguments, message = CASES[case]
    torch.compiler.reset()
    with ixt.config.patch(enabled=True):
        compiled = torch.compile(lambda *a: family.OPS[op](*a), fullgraph=True)
        with pytest.raises(Exception, match=message):
            compiled(*arguments)


def test_gradients_are_not_lost() -> None:
    with _compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, amax = mode.from_tensor(X), mode.from_tensor(ONE).requires_grad_()
        with pytest.raises(ValueError, match="`amax` must not require grad"):
            family.OPS["quantize"](x, amax, 1, 16)
