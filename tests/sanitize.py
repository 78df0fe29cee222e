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
import kv
import test_attention_fp8
import test_decode_attention
import test_kv_cache
import test_pad
import test_rope
import test_scale_product
import torch
import weights
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
    """Every op on its contract's own inputs, the ops that no oracle has among them.

    Attention by the definition: racecheck takes cuDNN's synchronization for hazards.
    """
    with ixt.config.patch(attention="math"):
        yield from _on_contracts_inputs(device)


def _on_contracts_inputs(device: str) -> Iterator[str]:
    for contract in ixt.contracts().values():
        if contract.name.startswith("inductor_ext::") and not contract.name.endswith(OTHERS):
            assert callable(contract.inputs)
            for args in contract.inputs(torch.device(device)):
                contract.op(*args)
                yield contract.name


def on_weights(device: str) -> Iterator[str]:
    """The kernels of weight_only_mm, in turns over rows of x and dtypes, within their bound."""
    pin = "auto" if device == "cpu" else "kernel"
    with ixt.config.patch(weight_only=pin):
        for turn, (name, format) in enumerate(weights.FORMATS.items()):
            k = 5 * weights.multiple(format)
            for m, n in ((1, 7), (8, 16), (9, 33), (16, 130)):
                dtype = (torch.bfloat16, torch.float16)[(turn + m) % 2]
                case = weights.case(name, m, n, k, dtype, bias=m > 8)
                case.require(case.on(device).run().cpu(), weights.kernel_sum(k))
                yield name


def on_caches(device: str) -> Iterator[str]:
    """RoPE and appends against formula and oracle, attention by both routes: ragged, strided."""
    for arguments in test_rope.cases():
        moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        test_rope.check_rope(*moved)
        torch.ops.inductor_ext.rope_backward(*moved, True)
        yield "rope"
    for label, sample in kv.samples():
        want = kv.appended(label.partition(",")[0], sample)
        there = sample.to(device)
        append = ixt.append_kv_ if device != "cpu" else test_kv_cache.append_by_formula
        append(there.cache, there.k, there.v, there.positions)
        kv.require_same(there.cache, want, label)
        yield "append_kv_"
    for case in test_decode_attention.KERNEL:
        if device == "cpu" and max(case[4]) > case[3][2]:  # refused there
            continue
        cache, q = test_decode_attention.kernel_case(case)
        there, q = kv.moved(cache, device), q.to(device)
        for route in ("reference", "triton"):
            with ixt.config.patch(decode_attention=route):
                ixt.decode_attention(q, there, window=case[-2] or None)
            yield "decode_attention"


def on_attention(device: str) -> Iterator[str]:
    """The FP8 kernel on ragged, packed and windowed sequences, against float64."""
    route = "math" if device == "cpu" else "triton"
    for case in test_attention_fp8.EVERY.values():
        for kind in test_attention_fp8.kinds(case):
            test_attention_fp8.check_op(case, kind, device, route)
            yield "attention_fp8"


def on_products(device: str) -> Iterator[str]:
    """What stands around products, padding and scales, against PyTorch's passes."""
    for matrix in test_pad.views(device):
        test_pad.check_kernel(matrix)
        yield "_pad"
    for number, size in enumerate(test_scale_product.SIZES):
        for dtype in test_scale_product.DTYPES:
            for kind in (torch.int32, torch.float32):
                how = 37 * number + 64 * (kind is torch.float32)
                test_scale_product.check_kernel(size, kind, dtype, how % 128, device)
                yield "_scale_product_"


def main() -> None:
    """Run everything, and say how many calls that was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device: Any = parser.parse_args().device
    compared = len([*on_oracles_inputs(device)])
    multiplied = len([*on_weights(device), *on_attention(device)])
    called = len([*on_contracts_inputs(device), *on_caches(device), *on_products(device)])
    if device != "cpu":
        torch.cuda.synchronize()
    print(
        f"{device}: {compared} calls have the oracle's bits, {multiplied} products are within "
        f"their bound, {called} more ran"
    )


if __name__ == "__main__":
    main()
