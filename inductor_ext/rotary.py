"""Rotary position embedding: the public function above the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ._call import call_with_gradient
from .api import _guard_mode
from .validation import check_no_grad, check_tensor


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotate the pairs of each head by their angles, in fp32, and round once.

    Args:
        x: (B, H, S, D) bfloat16, float16 or float32, any strides: a transposed view of
            (B, S, H, D) is read where it is.
        cos, sin: (S, W) or (B or 1, S, W), bfloat16, float16 or float32, without a gradient; W is
            the number of rotated elements (Hugging Face's form), or half of it.  With
            ``positions``, a table (T, W).
        positions: int32 or int64, (S,) or (B, S): the rows of the table.  A negative one counts as
            0, one behind the table as its last row; on the CPU, eagerly, the latter is an error.
        rotary_dim: how many leading elements of D are rotated, even; default all.
        interleaved: pairs are elements 2i and 2i + 1 (GPT-J) and not i and i + rotary_dim / 2.

    Returns:
        (B, H, S, D) of the dtype of ``x``, contiguous.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _guard_mode()
    check_tensor("x", x)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table)
        check_no_grad(name, table, "rope")
    if rotary_dim is not None and rotary_dim <= 0:
        raise ValueError(f"`rotary_dim` must be above 0, got {rotary_dim}")
    op = torch.ops.inductor_ext.rope.default
    result: Tensor = call_with_gradient(op, x, cos, sin, positions, rotary_dim or 0, interleaved)
    return result
