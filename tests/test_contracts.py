"""Every built-in op keeps its contract: the public harness on the contract's own inputs.

On CUDA: test_contracts_gpu.py.
"""

from __future__ import annotations

import floats
import pytest

import inductor_ext as ixt
from inductor_ext.testing import ALL, check_op
from inductor_ext.testing.checks import BATCHES

NAMES = [
    contract.name
    for contract in ixt.contracts().values()
    if contract.name.startswith("inductor_ext::")
]
# The others have tests of their own for bits; these see more dtypes and every batch size.
THOROUGH = {
    f"inductor_ext::{name}"
    for name in ("quantize_fp8_static", "quantize_fp8_row", "dequantize_fp8", "scaled_mm")
}
# The C++ compiler takes half a minute for code that is its two halves', which are here.
SLOW = {"inductor_ext::quantize_nvfp4_both"}


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_contract_on_cpu(name: str) -> None:
    """All but what other sizes do."""
    count = 2 if name in THOROUGH else 1
    without = {"dynamic"}
    if ixt.registry.contract(name).op._schema.is_mutable:
        without.add("pure")
    checks = [check for check in ALL if check not in without]
    if name in floats.FAMILY:
        checks = [*floats.CHECKS, "reference", "decomposition"]
    if name in floats.ROUNDED:
        checks = list(floats.CHECKS)
    report = check_op(name, compile_samples=count, checks=checks)
    if name in floats.FAMILY | floats.ROUNDED:
        assert report.ran["opcheck"] == count
        return
    assert report.ran["compiled_on"] == report.ran["compiled_off"] == report.ran["opcheck"] == count


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW | floats.FAMILY])
def test_batches_on_cpu(name: str) -> None:
    """One compilation for all batch sizes; on every torch: test_dynamic.py."""
    batches = BATCHES if name in THOROUGH else (2, 17, 0)
    report = check_op(name, compile_samples=1, batches=batches, checks=["dynamic"])
    assert report.ran == {"dynamic": 1}


def test_every_op_of_the_families_is_here() -> None:
    kinds = ("static", "tensor", "row", "column", "heads", "block")
    expected = {f"quantize_fp8_{kind}" for kind in kinds}
    expected |= {f"quantize_fp8_{kind}_both" for kind in ("static", "tensor", "block")}
    expected |= {"dequantize_fp8", "dequantize_fp8_block"}
    for name in ("mxfp8", "nvfp4"):
        expected |= {f"quantize_{name}", f"quantize_{name}_both", f"dequantize_{name}"}
    expected |= {f"quantize_int8_{kind}" for kind in ("tensor", "row", "group")}
    expected |= {"quantize_int4_symmetric", "quantize_int4_asymmetric"}
    expected |= {"dequantize_int8", "dequantize_int4", "amax", "amax_row", "amax_hadamard"}
    expected |= {"update_fp8_scale", "update_fp8_scale_", "scaled_mm", "div_rn"}
    expected |= {"scaled_grouped_mm", "scaled_grouped_mm_fp8_block"}
    for name in ("", "_fp8_block", "_mxfp8", "_nvfp4", "_int8"):
        expected |= {f"scaled_mm{name}", f"scaled_mm{name}_accumulate_"}
    expected |= {f"quantize_{name}_mode" for name in ("fp8", "mxfp8", "int8", "nvfp4")}
    weights = ("fp8", "fp8_block", "mxfp8", "nvfp4", "int8", "int4")
    expected |= {f"weight_only_mm_{name}" for name in weights}
    expected |= {"append_kv_", "append_kv_row_"}
    families = floats.FAMILY | floats.ROUNDED
    assert set(NAMES) == {f"inductor_ext::{name}" for name in expected} | families
