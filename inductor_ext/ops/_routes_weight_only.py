"""Which code multiplies by quantized weights on CUDA, and why: plain data and sizes.

"kernel" is ``kernels/cuda/weights.cuh``'s, for few rows of x: on an H200 faster than the other at
every size and format measured (docs/weight_only.md).  "dequantize" writes the weight out in the
dtype of x and calls cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import config

MOST_ROWS = 16
"""Rows of x that the CUDA kernel takes."""


class Call(NamedTuple):
    """What a route is chosen by.

    Attributes:
        rows, n, k: sizes of the product (rows, k) x (n, k)^T.
        dtype: of x.
        bits: of a code, 4 or 8.
        layout: of the scales, "plain" or "gemm".
    """

    rows: int
    n: int
    k: int
    dtype: torch.dtype
    bits: int
    layout: str


def choose_weight_only(call: Call) -> tuple[str, str]:
    """Return the route's name and the reason.

    Raises:
        ValueError: if ``config.weight_only`` names a route that cannot take this call.
    """
    pin = config.weight_only
    if pin != "auto":
        why_not = _PINNED_CANNOT[pin](call)
        if why_not:
            raise ValueError(
                f'config.weight_only must be "auto" or "dequantize" for this call, got "{pin}": '
                + why_not
            )
        return pin, "pinned by config.weight_only"
    if _kernel_cannot(call):
        return "dequantize", _kernel_cannot(call)
    return "kernel", f"{call.rows} rows of x: each byte of the weight is read once"


def _no_product(call: Call) -> str:
    if call.rows == 0 or call.n == 0 or call.k == 0:
        return "the product is empty"
    if call.dtype == torch.float32:
        return "x is float32, and tensor cores multiply 16-bit numbers"
    if call.layout != "plain":
        return 'the scales have layout "gemm", which dequantize reads'
    return ""


def _kernel_cannot(call: Call) -> str:
    if _no_product(call):
        return _no_product(call)
    if call.rows > MOST_ROWS:
        return f"x has {call.rows} rows, the kernel takes {MOST_ROWS}"
    multiple = 128 // call.bits
    if call.k % multiple:
        return f"K is {call.k}, and rows of codes begin on 16 bytes for multiples of {multiple}"
    return ""


_PINNED_CANNOT: dict[str, Callable[[Call], str]] = {
    "kernel": _kernel_cannot,
    "dequantize": lambda call: "",
}
