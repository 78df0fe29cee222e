"""Custom low-precision ops with CUDA kernels in eager mode that torch.compile can see through.

    import torch, inductor_ext as ixt
    ixt.enable()                       # or INDUCTOR_EXT_ENABLED=1
    q = ixt.quantize(x, ixt.FP8(granularity="row"))

Importing changes nothing in PyTorch's compiler; ``enable()`` does, ``disable()`` undoes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if not (Path(__file__).parent / "lowerings").exists():
    # A source checkout: the sub-packages are this folder's neighbours.
    __path__.append(str(Path(__file__).parents[1]))

from . import config, ops
from ._version import __version__
from .api import dequantize, quantize
from .errors import (
    CompatError,
    Decline,
    DeclinedError,
    InductorExtError,
    InductorExtWarning,
    LoweringError,
    RegistrationError,
)
from .formats import (
    FP8,
    INT4,
    INT8,
    MXFP8,
    NVFP4,
    BothWays,
    Format,
    Quantized,
    format_from_json,
)
from .functional import (
    add_rms_norm,
    geglu,
    gelu,
    layer_norm,
    relu2,
    rms_norm,
    silu,
    swiglu,
)
from .gemm import scaled_mm, scaled_mm_accumulate_
from .grouped import scaled_grouped_mm
from .kv_cache import KVCache, append_kv_, decode_attention
from .registry import Autograd, OpContract, Record, clear_records, contracts, records, register
from .rotary import rope
from .sdpa import attention
from .weight_only import weight_only_mm

if TYPE_CHECKING:
    from .explain import explain

__all__ = [
    "FP8", "INT4", "INT8", "MXFP8", "NVFP4", "Autograd", "BothWays", "CompatError", "Decline",
    "DeclinedError", "Format", "InductorExtError", "InductorExtWarning", "KVCache",
    "LoweringError", "OpContract", "Quantized", "Record", "RegistrationError", "__version__",
    "add_rms_norm", "append_kv_", "attention", "clear_records", "config", "contracts",
    "decode_attention", "dequantize", "disable", "enable", "explain", "format_from_json", "geglu",
    "gelu", "layer_norm", "ops", "quantize", "records", "register", "relu2", "rms_norm", "rope",
    "scaled_grouped_mm", "scaled_mm", "scaled_mm_accumulate_", "silu", "swiglu", "weight_only_mm",
]  # fmt: skip


def enable() -> None:
    """Install the lowerings and decompositions: ``config.enabled = True``."""
    config.enabled = True


def disable() -> None:
    """Put Inductor back as it was: ``config.enabled = False``."""
    config.enabled = False


def __getattr__(name: str) -> Any:
    if name == "explain":
        from .explain import explain

        globals()["explain"] = explain
        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _start() -> None:
    from inductor_ext.kernels import load

    load()
    if config.enabled:
        config.enabled = True


_start()
