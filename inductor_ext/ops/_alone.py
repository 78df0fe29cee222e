"""What a built-in op does under ``torch.compile`` where it has nothing to fuse with.

Its kernel is called where that is as fast as its lowering, which differs with the op, the size and
the device.  Measured on an H200: docs/benchmarks/alone-h200.txt (16384 x 8192) and
alone-sizes-h200.txt (2^14 to 2^23 elements); on two cores: ``python -m inductor_ext bench cpu``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._neighbours import amax_is_used

SMALL = 1 << 19
"""Below it generated code of one pass takes 0.3 to 1.0 of the kernel's time, above 0.7 to 2.2."""


def own_kernel(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether the op has a compiled kernel on the device of ``x``.

    For ops whose kernel is the faster one at every size: those that need an amax of the tensor
    first, or give codes in both orientations.
    """
    from inductor_ext.kernels import load

    kernels = load()
    return (kernels.cpu if x.device.type == "cpu" else kernels.cuda) is not None


def kernel_unless_small(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return :func:`own_kernel`, on a GPU for more than :data:`SMALL` elements alone.

    For what takes one pass.  On a CPU the kernel takes 0.05 to 0.8 of the generated loops' time.
    """
    return own_kernel(x) and (x.device.type == "cpu" or _elements(x) > SMALL)


def kernel_on_cpu(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return :func:`own_kernel` on a CPU, False on a GPU.

    For the dequantization of blocks, which generated takes 0.5 to 0.98 of the kernel's time there.
    """
    return x.device.type == "cpu" and own_kernel(x)


def kernel_for_amax(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return :func:`own_kernel`, on a GPU only where the graph uses the op's last result, an amax.

    The kernel takes the amax in any case, a lowering only where it is used.
    """
    return own_kernel(x) and (x.device.type == "cpu" or _takes_amax())


def kernel_for_amax_unless_small(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return True where :func:`kernel_for_amax` or :func:`kernel_unless_small` does."""
    return kernel_for_amax(x) or kernel_unless_small(x)


def kernel_but_for_plain_rows(
    codes: Tensor,
    scales: Tensor,
    block_m: int,
    block_k: int,
    dtype: torch.dtype,
    layout: str = "plain",
) -> bool:
    """Return :func:`own_kernel`, on a GPU not for squares, nor for plain scales along K.

    Generated code is the faster one for those (102 us, the kernel 104).  Vectors along M have their
    scales across rows (104 us by the kernel, 127 generated), cuBLASLt's layout those of vectors
    along K in tiles (104.5 and 108.9).
    """
    by_kernel = block_k == 1 or (block_m == 1 and layout == "gemm")
    return own_kernel(codes) and (codes.device.type == "cpu" or by_kernel)


def _elements(x: Tensor) -> int:
    """Return the number of elements, the expected one where sizes are dynamic; no guard."""
    from .._compat import V

    numel: Any = x.numel()
    if isinstance(numel, int):
        return numel
    return int(V.graph.sizevars.optimization_hint(numel.node.expr))


def _takes_amax() -> bool:
    from .._compat import V

    return amax_is_used(V.graph.current_node)
