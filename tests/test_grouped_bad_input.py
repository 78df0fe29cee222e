"""What grouped products refuse, in the same words from the op and from its fake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import _compat
from inductor_ext.ops import scaled_grouped_mm as family

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_public_function_refuses() -> None:
    rows, block, square = (ixt.FP8(granularity=g) for g in ("row", "block", "square"))
    a, w = ixt.quantize(torch.randn(4, 128), rows), torch.randn(2, 96, 128)
    b, ends = ixt.quantize(w, rows), torch.tensor([1, 4], dtype=torch.int32)
    refused: list[tuple[Any, type[Exception], str]] = [
        ((a, b, ends, ixt.INT8()), TypeError, "`format` must be FP8"),
        ((a, b, ends, square), ValueError, "`format` must have granularity"),
        ((a, b, ends, rows, block), ValueError, "`format_b` must be of rows"),
        ((a, b, ends, block, rows), ValueError, "`format_b` must be of blocks"),
        ((a, b, ends, ixt.FP8(granularity="block", block=64)), ValueError, "blocks of 128, got 64"),
        ((a.codes, b, ends, rows), TypeError, "`a` must be Quantized"),
        ((a, b, ends.long(), rows), TypeError, "`offsets` must be int32"),
    ]
    blocks = ixt.quantize(torch.randn(4, 128), block), ixt.quantize(w, square)
    refused.append(((*blocks, ends, block, square), ValueError, "a multiple of 128 rows"))
    for arguments, error, words in refused:
        with pytest.raises(error, match=words):
            ixt.scaled_grouped_mm(*arguments)
    with pytest.raises(ValueError, match="`fast_accum` must be False"):
        ixt.scaled_grouped_mm(*blocks, ends, block, square, fast_accum=True)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a's dtype": ({"a": torch.zeros(4, 16)}, TypeError, "`a` must be float8"),
    "a's dimensions": ({"a": torch.zeros(16).to(E4M3)}, ValueError, "`a` must have 2 dim"),
    "b's dimensions": ({"b": torch.zeros(16).to(E4M3)}, ValueError, "`b` must have 2 or 3 dim"),
    "inner sizes": ({"b": torch.zeros(2, 8, 8).to(E4M3)}, ValueError, "`b` must have as many col"),
    "experts": ({"offsets": torch.ones(3).int()}, ValueError, "`offsets` must have an element"),
    "offsets' dtype": ({"offsets": torch.ones(2).long()}, TypeError, "`offsets` must be int32"),
    "offsets' dimensions": ({"offsets": torch.ones(2, 1).int()}, ValueError, "`offsets` must have"),
    "dtype": ({"dtype": torch.int8}, TypeError, "`dtype` must"),
    "e5m2": (
        {"a": torch.zeros(4, 16).to(E5M2), "b": torch.zeros(2, 8, 16).to(E5M2)},
        TypeError, "must not both be float8_e5m2",
    ),
}  # fmt: skip
BAD_SCALES: dict[str, dict[str, tuple[dict[str, Any], type[Exception], str]]] = {
    "row": {
        "scale_a": ({"scale_a": torch.ones(3, 1)}, ValueError, "`scale_a` must broadcast"),
        "scale_b": ({"scale_b": torch.ones(8, 1, 1)}, ValueError, "`scale_b` must broadcast"),
        "scale_b's dtype": ({"scale_b": torch.ones(()).double()}, TypeError, "`scale_b` must be"),
    },
    "square": {
        "scale_a": ({"scale_a": torch.ones(4, 2)}, ValueError, "`scale_a` must have the shape"),
        "scale_b": ({"scale_b": torch.ones(1, 1)}, ValueError, "`scale_b` must have the shape"),
    },
}


@pytest.mark.parametrize("kind", ["row", "square"])
def test_refusals(kind: str) -> None:
    """The same words from the op in eager mode and from its fake."""
    scales = {"row": ((), ()), "square": ((4, 1), (2, 1, 1))}[kind]
    good = {
        "a": torch.zeros(4, 16).to(E4M3), "b": torch.zeros(2, 8, 16).to(E4M3),
        "scale_a": torch.ones(scales[0]), "scale_b": torch.ones(scales[1]),
        "offsets": torch.tensor([1, 4], dtype=torch.int32), "dtype": torch.bfloat16,
    }  # fmt: skip
    op = family.scaled_grouped_mm if kind == "row" else family.scaled_grouped_mm_fp8_block
    assert op(*good.values()).shape == (4, 8)
    for change, error, words in (BAD | BAD_SCALES[kind]).values():
        arguments = list((good | change).values())
        with pytest.raises(error, match=words):
            op(*arguments)
        mode = _compat.FakeTensorMode()
        fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in arguments]
        with mode, pytest.raises(error, match=words):
            op(*fakes)
