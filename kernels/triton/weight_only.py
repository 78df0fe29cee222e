"""x @ W^T with W dequantized inside the loop: a Triton kernel for any number of rows.

A weight is what its format's dequantize gives in fp32, rounded to the dtype of x, as if it had been
written out; the sum is in fp32.  Not measured on a card yet: the block sizes are a first guess.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Triton reads the annotations of its functions: they have those that it knows, and no others.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(code):
    """Exponent and mantissa at the lower end of fp32, where subnormals are linear as well."""
    magnitude = (code & 0x7F).to(tl.int32)
    value = _as_float(magnitude << 20) * 1.329227995784916e36  # 2^120
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code > 0x7F, -value, value)


@triton.jit
def _e5m2(code):
    magnitude = (code & 0x7F).to(tl.int32)
    value = _as_float(magnitude << 21) * 5.192296858534828e33  # 2^112
    value = tl.where(magnitude == 0x7C, float("inf"), value)
    value = tl.where(magnitude > 0x7C, float("nan"), value)
    return tl.where(code > 0x7F, -value, value)


@triton.jit
def _e2m1(code):
    value = _as_float((code & 7).to(tl.int32) << 22) * 8.507059173023462e37  # 2^126
    return tl.where(code > 7, -value, value)


@triton.jit
def _e8m0(code):
    e = code.to(tl.int32)
    return _as_float(tl.where(e == 0, 0x00400000, tl.where(e == 255, 0x7FC00000, e << 23)))


@triton.jit
def _codes(codes, row, column, inside, k, KIND: tl.constexpr):
    """Return codes as uint8, 0 where not inside."""
    if KIND == "int4" or KIND == "e2m1":
        byte = tl.load(codes + row * (k // 2) + column // 2, inside, 0)
        code = (byte >> (column % 2 * 4).to(tl.uint8)) & 15
    else:
        code = tl.load(codes + row * k + column, inside, 0)
    return code


@triton.jit
def _value(code, byte, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Return what a code is worth before its scale; ``byte`` is its group's."""
    if KIND == "int8":
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "e4m3":
        value = _e4m3(code)
    elif KIND == "e5m2":
        value = _e5m2(code)
    elif KIND == "e2m1":
        value = _e2m1(code)
    elif PACKED:
        value = code.to(tl.float32) - byte.to(tl.float32)
    else:
        value = (code.to(tl.int32) ^ 8).to(tl.float32) - 8.0
    return value


@triton.jit
def _factor(scale, byte, of_rows, KIND: tl.constexpr, PACKED: tl.constexpr,
            LAST: tl.constexpr):  # fmt: skip
    """Return what the value of a code is multiplied by, in fp32."""
    if KIND == "e2m1":
        factor = (_e4m3(byte) * of_rows) * 0.000372023815216496587753296  # fl(1 / 2688)
    elif LAST:
        factor = of_rows
    elif PACKED and KIND != "int4":
        factor = _e8m0(byte)
    else:
        factor = scale
    return factor


@triton.jit
def _weight(codes, scale, packed, last, rows, columns, inside,
            k, groups, KIND: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr,
            GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Return fp32 (BLOCK_N, BLOCK_K): elements (rows, columns) of W, where inside."""
    column = columns[None, :]
    code = _codes(codes, rows.to(tl.int64)[:, None], column, inside, k, KIND)
    group = (rows // ROWS)[:, None] * groups + column // GROUP
    byte, of_group, of_rows = code, 0.0, 0.0  # what is not there is not looked at
    if PACKED:
        byte = tl.load(packed + group, inside, 0)
    if LAST:
        of_rows = tl.load(last + (rows if LAST == 2 else rows * 0))[:, None]
    elif not PACKED or KIND == "int4":
        of_group = tl.load(scale + group, inside, 0.0)
    factor = _factor(of_group, byte, of_rows, KIND, PACKED, LAST)
    return _value(code, byte, KIND, PACKED) * factor


@triton.jit
def product(x, codes, scale, packed, last, bias, y,
            m, n, groups, K: tl.constexpr,
            KIND: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr,
            GROUP: tl.constexpr, ROWS: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """One program a tile of y; LAST is 0, 1 (one multiplier of all) or 2 (one a row of W).

    K is fixed at compile time: a model has few of them.
    """
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    of_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    of_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(of_n, n - 1)  # rows behind the end are not stored
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        of_k = start + tl.arange(0, BLOCK_K)
        at = of_m.to(tl.int64)[:, None] * K + of_k[None, :]
        left = tl.load(x + at, (of_m < m)[:, None] & (of_k < K)[None, :], 0.0)
        inside = (of_n < n)[:, None] & (of_k < K)[None, :]
        w = _weight(codes, scale, packed, last, rows, of_k, inside, K, groups,
                    KIND, PACKED, LAST, GROUP, ROWS)  # fmt: skip
        w = tl.where(inside, w, 0.0)
        total = tl.dot(left, tl.trans(w.to(left.dtype)), total)
    if BIAS:
        total += tl.load(bias + rows).to(tl.float32)[None, :]
    to = of_m.to(tl.int64)[:, None] * n + of_n[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), (of_m < m)[:, None] & (of_n < n)[None, :])


def multiply(
    x: Tensor,
    codes: Tensor,
    bias: Tensor | None,
    kind: str,
    scale: Tensor | None,
    packed: Tensor | None,
    last: Tensor | None,
    group: int,
    rows: int,
) -> Tensor:
    """Return (M, N) in the dtype of ``x``; arguments as those of the op ``_weight_only_decode``."""
    m, k = x.shape
    n = codes.shape[0]
    y = x.new_empty((m, n))
    block_m = min(max(triton.next_power_of_2(m), 16), 64)
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, 64))
    product[grid](
        x, codes.view(torch.uint8), scale, packed, last, bias, y, m, n,
        -(-k // group) if group else 1,
        K=k, KIND=kind, PACKED=packed is not None, BIAS=bias is not None,
        LAST=0 if last is None else 1 if last.numel() == 1 else 2,
        GROUP=group or 1, ROWS=rows, BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=64,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
