"""Every built-in op keeps its contract on a card: its bits are those of the reference and the CPU.

What is compiled for the CPU is in test_contracts.py: here only the card's code is compiled.
"""

from __future__ import annotations

import floats
import pytest
import torch
from card import flat

import inductor_ext as ixt
from inductor_ext.testing import ALL, check_op

pytestmark = pytest.mark.gpu

CONTRACTS = {c.name: c for c in ixt.contracts().values() if c.name.startswith("inductor_ext::")}
MODES = [name for name in CONTRACTS if name.endswith("_mode")]
# Matrix products sum in an order of their own: neither the reference's bits nor the CPU's.
OTHER_BITS = {name for name in CONTRACTS if name.startswith("inductor_ext::scaled_")}


def nan_equal(name: str) -> list[bool]:
    """Codes are exact, NaN included, but for those of other libraries' casts."""
    contract = CONTRACTS[name]
    assert callable(contract.inputs)
    args = next(iter(contract.inputs(torch.device("cpu"))))
    results = [t for t in flat(contract.op(*args)) if t is not None]
    return [name in MODES or t.element_size() > 1 for t in results]


@pytest.mark.parametrize("name", CONTRACTS)
def test_contract(name: str) -> None:
    """The compiled checks take two samples, of different dtypes; the others take all."""
    without = {"across_devices"} | ({"reference"} if name in OTHER_BITS else set())
    if CONTRACTS[name].op._schema.is_mutable:
        without.add("pure")
    checks = [check for check in ALL if check not in without]
    report = check_op(
        name,
        devices=("cuda",),
        checks=floats.CHECKS if name in floats.FAMILY | floats.ROUNDED else checks,
        nan_equal=nan_equal(name),
        batches=(2, 17, 0),
        compile_samples=2,
    )
    assert all(report.ran.values()), report


@pytest.mark.parametrize(
    "name",
    [name for name in CONTRACTS if name not in OTHER_BITS | floats.FAMILY | floats.ROUNDED],
)
def test_across_devices(name: str) -> None:
    """Eager CUDA against eager CPU, on every sample."""
    checks = ("across_devices",)
    report = check_op(name, devices=("cpu", "cuda"), checks=checks, nan_equal=nan_equal(name))
    assert all(report.ran.values()), report
