"""Every kernel once on small, ragged and strided tensors: a program for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/sanitize.py

Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own and
an access beyond its end is seen.  Results are compared with the oracle as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import cases
import test_attention_fp8
import torch
from card import FAMILIES

import inductor_ext as ixt

# Multiples of 16 in each axis, for NVFP4; of 64, for INT4; ragged in both; one row; one column.
SHAPES = {
    "fp8": ((33, 136), (7, 1031), (1, 8200), (130, 1)),
    "fp8 blocks": ((33, 136), (130, 1), (161, 72), (1, 264)),
    "mxfp8": ((33, 136), (130, 1), (161, 72), (1, 264)),
    "integers": ((33, 192), (5, 1088), (1, 8192)),
    "nvfp4": ((48, 80), (16, 144), (7, 32), (32, 7)),
}
LAYOUTS = ("contiguous", "transposed", "strided", "offset")
OTHERS = ("scaled_mm", "_mode")
"""cuBLASLt's kernels and PyTorch's."""


def on_oracles_inputs(device: str) -> Iterator[str]:
    """Each family's calls, in turns over dtypes and layouts, against the oracle."""
    turn = 0
    for name, family in FAMILIES.items():
        for shape in SHAPES[name]:
            for layout in LAYOUTS:
                dtype = list(cases.INPUTS.values())[turn % 3]
                flat = cases.values("wide", shape[0] * shape[1], dtype)
                turn += 1
                for call in family.calls(cases.lay_out(flat, shape, layout)):
                    call.check(family.op(call.op)(*call.on(device)), f"{layout}, {device}")
                    yield call.op


def on_contracts_inputs(device: str) -> Iterator[str]:
    """Every op on its contract's own inputs, the ops that no oracle has among them."""
    for contract in ixt.contracts().values():
        if contract.name.startswith("inductor_ext::") and not contract.name.endswith(OTHERS):
            assert callable(contract.inputs)
            for args in contract.inputs(torch.device(device)):
                contract.op(*args)
                yield contract.name


def on_attention(device: str) -> Iterator[str]:
    """The FP8 kernel on ragged, packed and windowed sequences, against float64."""
    route = "math" if device == "cpu" else "triton"
    for case in test_attention_fp8.EVERY.values():
        for kind in test_attention_fp8.kinds(case):
            test_attention_fp8.check_op(case, kind, device, route)
            yield "attention_fp8"


def main() -> None:
    """Run everything, and say how many calls that was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device: Any = parser.parse_args().device
    compared = len([*on_oracles_inputs(device)])
    called = len([*on_contracts_inputs(device), *on_attention(device)])
    if device != "cpu":
        torch.cuda.synchronize()
    print(f"{device}: {compared} calls have the oracle's bits, {called} more ran")


if __name__ == "__main__":
    main()
