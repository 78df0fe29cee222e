"""Every built-in op keeps its contract: the public harness on the contract's own inputs.

On CUDA: test_fp8_gpu.py and test_scaled_mm.py.
"""

from __future__ import annotations

import pytest

import inductor_ext as ixt
from inductor_ext.testing import check_op
from inductor_ext.testing.checks import BATCHES

NAMES = [
    contract.name
    for contract in ixt.contracts().values()
    if contract.name.startswith("inductor_ext::")
]

OF_BLOCKS = {
    "quantize_fp8_block",
    "quantize_fp8_block_both",
    "dequantize_fp8_block",
    "quantize_fp8_static_both",
    "quantize_fp8_tensor_both",
    "quantize_fp8_column",
    "quantize_mxfp8",
    "quantize_mxfp8_both",
    "dequantize_mxfp8",
}


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_contract_on_cpu(name: str) -> None:
    # A block op takes the C++ compiler several times as long, and has tests of its own for bits.
    blocks = name.removeprefix("inductor_ext::") in OF_BLOCKS
    batches, count = ((2, 17, 0), 1) if blocks else (BATCHES, 2)
    report = check_op(name, compile_samples=count, batches=batches)
    assert report.ran["compiled_on"] == report.ran["dynamic"] == report.ran["opcheck"] == count


def test_every_op_of_the_family_is_here() -> None:
    assert {name.removeprefix("inductor_ext::") for name in NAMES} == {
        "quantize_fp8_static",
        "quantize_fp8_tensor",
        "quantize_fp8_row",
        "dequantize_fp8",
        "scaled_mm",
    } | OF_BLOCKS
