"""Every built-in op keeps its contract: the public harness on the contract's own inputs.

On CUDA: test_fp8_gpu.py and test_scaled_mm.py.
"""

from __future__ import annotations

import pytest

import inductor_ext as ixt
from inductor_ext.testing import check_op

NAMES = [
    contract.name
    for contract in ixt.contracts().values()
    if contract.name.startswith("inductor_ext::")
]


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_contract_on_cpu(name: str) -> None:
    report = check_op(name, compile_samples=2)
    assert report.ran["compiled_on"] == report.ran["dynamic"] == report.ran["opcheck"] == 2


def test_every_op_of_the_family_is_here() -> None:
    assert {name.removeprefix("inductor_ext::") for name in NAMES} == {
        "quantize_fp8_static",
        "quantize_fp8_tensor",
        "quantize_fp8_row",
        "dequantize_fp8",
        "scaled_mm",
    }
