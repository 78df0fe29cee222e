"""The Triton kernel of weight_only_mm: in Triton's interpreter here, compiled, and on a card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import weights

import inductor_ext as ixt
from inductor_ext.ops.weight_only import FAMILIES
from inductor_ext.weight_only import _op_and_weight

F16 = torch.float16
SUM = 2.0**-20
"""What fp32 sums of some hundred products may lose, in any order, of the sum of magnitudes."""


def interpreted(name: str) -> None:
    """Hold the kernel to the bound of a weight that is rounded to fp16."""
    from inductor_ext.kernels.triton.weight_only import multiply

    step = max(32, weights.multiple(weights.FORMATS[name]))
    for m, n, k in ((1, 5, step), (19, 70, 3 * step)):
        case = weights.case(name, m, n, k, F16, bias=m > 1)
        op, weight = _op_and_weight(case.q, case.format)
        family = FAMILIES[op._schema.name.partition("weight_only_mm_")[2]]
        got = multiply(case.x, weight[0], case.bias, *family.decode(weight))
        case.require(got, weights.UNIT[F16] + SUM)


def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == list(weights.FORMATS)


@pytest.mark.parametrize(("kind", "capability"), [("int4", 90), ("e2m1", 80), ("e4m3", 120)])
def test_it_compiles(kind: str, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inductor_ext.kernels.triton.weight_only import product

    fixed = {
        "K": 4096, "KIND": kind, "PACKED": True, "LAST": int(kind == "e2m1"), "BIAS": True,
        "GROUP": 32, "ROWS": 1, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64,
    }  # fmt: skip
    types = dict.fromkeys(("x", "bias", "y"), "*bf16") | {"scale": "*fp32", "last": "*fp32"}
    types |= {"codes": "*u8", "packed": "*u8", "m": "i32", "n": "i32", "groups": "i32"}
    signature = {name: types.get(name, "constexpr") for name in product.arg_names}
    source = ASTSource(
        product, signature, {(product.arg_names.index(k),): v for k, v in fixed.items()}
    )
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert instruction in code.asm["ptx"]
    assert "bf16" in code.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", list(weights.FORMATS))
def test_on_a_card(name: str, dtype: torch.dtype) -> None:
    step = max(32, weights.multiple(weights.FORMATS[name]))
    with ixt.config.patch(weight_only="triton"):
        for m, n, k in ((1, 5, step), (17, 70, 3 * step), (200, 130, 5 * step)):
            case = weights.case(name, m, n, k, dtype, bias=m > 1)
            case.require(case.on("cuda").run().cpu(), weights.UNIT[dtype] + SUM)


if __name__ == "__main__":
    for format_name in weights.FORMATS:
        interpreted(format_name)
        print(format_name)
