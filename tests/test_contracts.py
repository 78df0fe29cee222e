"""Every built-in op keeps its contract: the public harness on the contract's own inputs.

On CUDA: test_contracts_gpu.py.
"""

from __future__ import annotations

import pytest

import inductor_ext as ixt
from inductor_ext.testing import ALL, check_op
from inductor_ext.testing.checks import BATCHES

# The others take the C++ compiler longer, and have tests of their own for bits.
THOROUGH = {
    "quantize_fp8_static",
    "quantize_fp8_tensor",
    "quantize_fp8_row",
    "dequantize_fp8",
    "scaled_mm",
}
NAMES = [
    contract.name
    for contract in ixt.contracts().values()
    if contract.name.startswith("inductor_ext::")
]


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_contract_on_cpu(name: str) -> None:
    thorough = name.removeprefix("inductor_ext::") in THOROUGH
    batches, count = (BATCHES, 2) if thorough else ((2, 17, 0), 1)
    written = ixt.registry.contract(name).op._schema.is_mutable
    checks = [check for check in ALL if check != "pure" or not written]
    report = check_op(name, compile_samples=count, batches=batches, checks=checks)
    assert report.ran["compiled_on"] == report.ran["dynamic"] == report.ran["opcheck"] == count


def test_every_op_of_the_families_is_here() -> None:
    kinds = ("static", "tensor", "row", "column", "block")
    expected = {f"quantize_fp8_{kind}" for kind in kinds}
    expected |= {f"quantize_fp8_{kind}_both" for kind in ("static", "tensor", "block")}
    expected |= {"dequantize_fp8", "dequantize_fp8_block"}
    for name in ("mxfp8", "nvfp4"):
        expected |= {f"quantize_{name}", f"quantize_{name}_both", f"dequantize_{name}"}
    expected |= {f"quantize_int8_{kind}" for kind in ("tensor", "row", "group")}
    expected |= {"quantize_int4_symmetric", "quantize_int4_asymmetric"}
    expected |= {"dequantize_int8", "dequantize_int4", "amax", "amax_row", "amax_hadamard"}
    expected |= {"update_fp8_scale", "update_fp8_scale_", "scaled_mm", "div_rn"}
    expected |= {f"quantize_{name}_mode" for name in ("fp8", "mxfp8", "int8", "nvfp4")}
    assert {name.removeprefix("inductor_ext::") for name in NAMES} == expected
