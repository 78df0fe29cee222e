"""Where an op has nothing to fuse with: is its own kernel faster than generated code?"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def cuda_kernel_is_faster(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether ``x`` is on a CUDA device and the CUDA kernels are there.

    Measured on an H200 with every op of the package (docs/benchmarks/alone-*.txt): the kernel is
    at least as fast as the lowering at every size.  On the CPU the generated loops are as fast.
    """
    from inductor_ext.kernels import load

    return x.device.type == "cuda" and load().cuda is not None
