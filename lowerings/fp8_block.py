"""FP8 with a scale a block as Inductor IR; the arithmetic is ``decompositions/fp8_block.py``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext._compat import ops

from . import templates
from .blocks import (
    Blocks,
    divides,
    elements,
    load_within,
    round_up,
    swapped,
    transposed_matrix,
)
from .fp8 import current_scale, rule_of
from .vocabulary import F32, div_rn, f32, pointwise, stored


def quantize_fp8_block(
    x: Any,
    dtype: torch.dtype,
    block_m: int,
    block_k: int,
    transposed: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
    layout: str = "plain",
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_block``."""
    fused = templates.quantize(
        x,
        rule_of(x, dtype, eps, pow2),
        max(block_m, block_k),
        layout,
        along_k=block_m == 1 and not transposed,
        along_m=block_k == 1 and transposed,
    )
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    blocks = Blocks(x, block_m, block_k, matrix=transposed or layout == "gemm")
    value, device = elements(blocks.x), x.get_device()
    amax, limit = blocks.amax(value), torch.finfo(x.get_dtype()).max

    def scale_of(index: Sequence[Any]) -> Any:
        return current_scale(amax.load(index), dtype, eps, pow2, limit, device)

    scale = stored(pointwise(x, F32, blocks.size, scale_of))
    load_scale = scale.make_loader()
    inverse = pointwise(x, F32, blocks.size, lambda i: div_rn(f32(1.0), load_scale(i), device))
    codes = blocks.codes(value, load_scale, dtype, transpose=transposed)
    return codes, _laid_out(inverse, block_m == block_k, transposed, layout)


def _laid_out(inverse: Any, square: bool, transposed: bool, layout: str) -> Any:
    """Return (nM, nK) scales in their layout: transposed, column-major, padded."""
    if layout == "gemm" and not square:  # (R, C), with the strides (1, R)
        return swapped(inverse if transposed else transposed_matrix(inverse))
    if transposed:
        inverse = transposed_matrix(inverse)
    if layout == "plain":
        return inverse
    rows, columns = inverse.get_size()
    load, bound = inverse.make_loader(), None if divides(4, columns) else columns
    return pointwise(
        inverse,
        F32,
        (rows, round_up(columns, 4)),
        lambda i: load_within(load, i, (None, bound), 0.0),
    )


def quantize_fp8_block_both(
    x: Any,
    dtype: torch.dtype,
    block: int,
    square: bool,
    eps: float = 0.0,
    pow2: bool = False,
    layout: str = "plain",
) -> tuple[Any, Any, Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_block_both``."""
    fused = templates.quantize(
        x, rule_of(x, dtype, eps, pow2), block, layout, along_k=not square, along_m=not square
    )
    if fused is not None:
        return fused  # type: ignore[no-any-return]
    other = block if square else 1
    rows = quantize_fp8_block(x, dtype, other, block, False, eps, pow2, layout)
    columns = quantize_fp8_block(x, dtype, block, other, True, eps, pow2, layout)
    return (*rows, *columns)


def dequantize_fp8_block(
    codes: Any,
    scale_inv: Any,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> Any:
    """Lower ``inductor_ext::dequantize_fp8_block``."""
    blocks = Blocks(codes, block_m, block_k, matrix=layout == "gemm")
    load = blocks.x.make_loader()
    return blocks.values(lambda i: ops.to_dtype(load(i), F32), scale_inv.make_loader(), dtype)
