"""What a built-in op does under ``torch.compile`` where it has nothing to fuse with."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def own_kernel(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether the op has a compiled kernel on the device of ``x``.

    Called alone it makes compiled code as fast as eager code at every shape.  On the CPU it takes
    0.12 to 0.8 of the time of the generated loops (``python -m inductor_ext bench cpu``).
    """
    from inductor_ext.kernels import load

    return (x.device.type == "cpu" and load().cpu is not None) or cuda_kernel(x)


def cuda_kernel(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether ``x`` is on a CUDA device and the CUDA kernels are there.

    For ops whose loops on the CPU are as fast when generated.  On an H200, 16384 x 8192 bf16, the
    kernel alone and the lowering alone take 99.4 and 99.7 us (static), 98.8 and 99.1 (row), 160.7
    and 168.3 (tensor), 102.3 and 102.5 (dequantize): docs/benchmarks/chains-h200.txt.
    """
    from inductor_ext.kernels import load

    return x.device.type == "cuda" and load().cuda is not None
