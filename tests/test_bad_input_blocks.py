"""Bad arguments of the block formats: the same error in eager mode, on fakes and compiled."""

from __future__ import annotations

import re
from typing import Any

import blocks
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat

E4M3 = torch.float8_e4m3fn
X = torch.randn(4, 64)
CODES, SCALE = X.to(E4M3), torch.ones(4, 2)
E8M0 = torch.full((4, 2), 127, dtype=torch.uint8)
BLOCK = "`block_m` and `block_k` must be (1, G), (G, 1) or (G, G) with G = 32, 64 or 128, got "
MX = "`block_m` and `block_k` must be (1, 32), (32, 1) or (32, 32), got "
F16 = torch.float16

CASES: dict[str, tuple[str, tuple[Any, ...], str]] = {
    # name: (op, arguments, the beginning of the message)
    "x's dtype": ("quantize_fp8_block", (X.double(), E4M3, 1, 32), "`x` must be bfloat16, float16"),
    "integers": ("quantize_mxfp8", (X.int(), E4M3, 1, 32), "`x` must be bfloat16, float16 or"),
    "target": ("quantize_fp8_block", (X, torch.int8, 1, 32), "`dtype` must be float8_e4m3fn or"),
    "0-d": ("quantize_fp8_block", (X[0, 0], E4M3, 1, 32), "`x` must have at least 1 dimension"),
    "0-d column": ("quantize_fp8_column", (X[0, 0], E4M3), "`x` must have at least 1 dimension"),
    "block": ("quantize_fp8_block", (X, E4M3, 1, 16), BLOCK + "(1, 16)"),
    "oblong": ("quantize_fp8_block", (X, E4M3, 32, 64), BLOCK + "(32, 64)"),
    "one": ("quantize_fp8_block", (X, E4M3, 1, 1), BLOCK + "(1, 1)"),
    "negative": ("quantize_fp8_block", (X, E4M3, 1, -32), BLOCK + "(1, -32)"),
    "both's block": ("quantize_fp8_block_both", (X, E4M3, 16, True), "`block` must be 32, 64 or"),
    "layout": (
        "quantize_fp8_block", (X, E4M3, 1, 32, False, 0.0, False, "tn"),
        '`layout` must be "plain" or "gemm", got "tn"',
    ),
    "columns for a GEMM": (
        "quantize_fp8_block", (X, E4M3, 32, 1, False, 0.0, False, "gemm"),
        '`layout` must be "plain" for G x 1 blocks of codes that are not transposed',
    ),
    "eps": ("quantize_fp8_block", (X, E4M3, 1, 32, False, -1.0), "`eps` must be at least 0"),
    "column's eps": ("quantize_fp8_column", (X, E4M3, False, 1e39), "`eps` must be at least 0"),
    "mx block": ("quantize_mxfp8", (X, E4M3, 1, 64), MX + "(1, 64)"),
    "mx mode": (
        "quantize_mxfp8", (X, E4M3, 1, 32, False, "round"), '`mode` must be "ceil" or "floor", got'
    ),
    "mx layout": (
        "quantize_mxfp8_both", (X, E4M3, False, True, "ceil", "x"), '`layout` must be "plain" or'
    ),
    "codes": ("dequantize_fp8_block", (X, SCALE, 1, 32, F16), "`codes` must be float8_e4m3fn or"),
    "result": ("dequantize_fp8_block", (CODES, SCALE, 1, 32, E4M3), "`dtype` must be bfloat16"),
    "scale's dtype": (
        "dequantize_fp8_block", (CODES, SCALE.double(), 1, 32, F16), "`scale_inv` must be float32"
    ),
    "scale's shape": (
        "dequantize_fp8_block", (CODES, SCALE, 1, 64, F16),
        "`scale_inv` must have the shape (4, 1), got (4, 2)",
    ),
    "padded scale": (
        "dequantize_fp8_block", (CODES, SCALE[:1], 32, 32, F16, "gemm"),
        "`scale_inv` must have the shape (1, 4), got (1, 2)",
    ),
    "scales' dtype": ("dequantize_mxfp8", (CODES, SCALE, 1, 32, F16), "`scales` must be uint8"),
    "scales' shape": (
        "dequantize_mxfp8", (CODES, E8M0, 32, 1, F16),
        "`scales` must have the shape (1, 64), got (4, 2)",
    ),
    "swizzled scales": (
        "dequantize_mxfp8", (CODES, E8M0, 1, 32, F16, "gemm"),
        "`scales` must have the shape (128, 4), got (4, 2)",
    ),
    "scale": (
        "quantize_fp8_static_both", (X, torch.ones(4, 1), E4M3),
        "`scale` must have one element, got the shape (4, 1)",
    ),
    "scale's": (
        "quantize_fp8_static_both", (X, torch.ones(1).half(), E4M3), "`scale` must be float32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_eager_fake_and_compiled_say_the_same(case: str) -> None:
    name, arguments, message = CASES[case]
    op, words = blocks.op_of(name), re.escape(message)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        op(*arguments)
    with _compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        with pytest.raises((TypeError, ValueError), match=words):
            op(*fakes)
    tensors = [a for a in arguments if isinstance(a, Tensor)]

    def run(*given: Tensor) -> Any:
        left = iter(given)
        return op(*(next(left) if isinstance(a, Tensor) else a for a in arguments))

    for enabled in (False, True):
        torch.compiler.reset()
        with ixt.config.patch(enabled=enabled), pytest.raises(Exception, match=words):
            torch.compile(run, fullgraph=True)(*tensors)


GRADIENTS = {
    "quantize_fp8_block": (E4M3, 1, 32),
    "quantize_fp8_block_both": (E4M3, 32, True),
    "quantize_fp8_tensor_both": (E4M3,),
    "quantize_fp8_column": (E4M3,),
    "quantize_mxfp8": (E4M3, 1, 32),
    "quantize_mxfp8_both": (E4M3, True),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_no_gradient_is_lost_in_silence(name: str) -> None:
    """Compiled, the fake refuses; eagerly the result has no gradient to go on with."""
    x = X.clone().requires_grad_()
    op, constants = blocks.op_of(name), GRADIENTS[name]
    torch.compiler.reset()
    with ixt.config.patch(enabled=True), pytest.raises(Exception, match="`x` must not require"):
        torch.compile(lambda x: op(x, *constants), fullgraph=True)(x)
    with torch.no_grad():
        assert not op(x, *constants)[0].requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dequantize_fp8_block", "dequantize_mxfp8"])
def test_mixed_devices_are_refused(name: str) -> None:
    scales = SCALE if name == "dequantize_fp8_block" else E8M0
    with pytest.raises((RuntimeError, ValueError), match="must be on the device of `codes`"):
        blocks.op_of(name)(CODES.cuda(), scales, 1, 32, torch.float32)
