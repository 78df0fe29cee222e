"""FP8 with a transpose, and with a scale a column; see ``decompositions/fp8_both.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import templates
from .blocks import Blocks, as_matrix, elements, reshaped, transposed_matrix
from .fp8 import current_scale, quantize_fp8_static, quantize_fp8_tensor
from .vocabulary import F32, amax_of_groups, div_rn, f32, pointwise, stored


def quantize_fp8_static_both(x: Any, scale: Any, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_static_both``."""
    fused = templates.static_both(x, scale, dtype)
    codes, scale_inv, amax = quantize_fp8_static(x, scale, dtype)
    if fused is not None:
        return (*fused, scale_inv, amax)
    return codes, transposed_matrix(as_matrix(codes)), scale_inv, amax


def quantize_fp8_tensor_both(
    x: Any, dtype: torch.dtype, eps: float = 0.0, pow2: bool = False
) -> tuple[Any, Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_tensor_both``."""
    codes, scale_inv = quantize_fp8_tensor(x, dtype, eps, pow2)
    return codes, transposed_matrix(as_matrix(codes)), scale_inv


def quantize_fp8_column(
    x: Any,
    dtype: torch.dtype,
    transposed: bool = False,
    eps: float = 0.0,
    pow2: bool = False,
) -> tuple[Any, Any]:
    """Lower ``inductor_ext::quantize_fp8_column``."""
    matrix, device = as_matrix(x), x.get_device()
    value, limit = elements(matrix), torch.finfo(x.get_dtype()).max
    rows, columns = matrix.get_size()
    amax = amax_of_groups(matrix, lambda i, r: value([*r, *i]), [columns], [rows])

    def scale_of(index: Sequence[Any]) -> Any:
        return current_scale(amax.load(index), dtype, eps, pow2, limit, device)

    scale = stored(pointwise(x, F32, [columns], scale_of))
    load = scale.make_loader()
    column = 0 if transposed else 1

    def inverse(index: Sequence[Any]) -> Any:
        return div_rn(f32(1.0), load([index[column]]), device)

    scale_inv = pointwise(x, F32, (columns, 1) if transposed else (1, columns), inverse)
    # A block of one element for each column, with the scale of the column.
    codes = Blocks(matrix, 1, 1).codes(value, lambda i: load(i[1:]), dtype, transpose=transposed)
    return codes if transposed else reshaped(codes, x.get_size()), scale_inv
