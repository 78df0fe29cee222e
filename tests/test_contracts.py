"""Every built-in op keeps its contract: the public harness on the contract's own inputs.

On CUDA: test_fp8_gpu.py and test_scaled_mm.py.
"""

from __future__ import annotations

import pytest

import inductor_ext as ixt
from inductor_ext.testing import ALL, check_op

NAMES = [
    contract.name
    for contract in ixt.contracts().values()
    if contract.name.startswith("inductor_ext::")
]


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_contract_on_cpu(name: str) -> None:
    written = ixt.registry.contract(name).op._schema.is_mutable
    checks = [check for check in ALL if check != "pure" or not written]
    report = check_op(name, compile_samples=2, checks=checks)
    assert report.ran["compiled_on"] == report.ran["dynamic"] == report.ran["opcheck"] == 2


def test_every_op_of_the_family_is_here() -> None:
    assert {name.removeprefix("inductor_ext::") for name in NAMES} == {
        "quantize_fp8_static",
        "quantize_fp8_tensor",
        "quantize_fp8_row",
        "dequantize_fp8",
        "scaled_mm",
        "amax",
        "amax_row",
        "quantize_int8_tensor",
        "quantize_int8_row",
        "quantize_int8_group",
        "dequantize_int8",
        "quantize_int4_symmetric",
        "quantize_int4_asymmetric",
        "dequantize_int4",
        "update_fp8_scale",
        "update_fp8_scale_",
        "div_rn",
        "quantize_fp8_mode",
        "quantize_mxfp8_mode",
        "quantize_int8_mode",
        "quantize_nvfp4_mode",
    }
