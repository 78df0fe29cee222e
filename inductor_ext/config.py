"""Flags of the plugin, process-wide, in the manner of PyTorch's config modules.

=================  =========================  ================================================
flag               environment variable       meaning
=================  =========================  ================================================
``enabled``        INDUCTOR_EXT_ENABLED       install the lowerings and decompositions (off)
``strict``         INDUCTOR_EXT_STRICT        a decline or failing lowering raises (off)
``numerics``       INDUCTOR_EXT_NUMERICS      "exact": compiled code gives eager's bits;
                                              "fast": intermediate roundings may be skipped
``disabled_ops``   INDUCTOR_EXT_DISABLED_OPS  names ("namespace::op") that stay opaque
``always_lower``   INDUCTOR_EXT_ALWAYS_LOWER  lower an op also where its own kernel is known to be
                                              faster, as it has nothing to fuse with, or plain
                                              loops are, as the tensor is small (off)
``templates``      INDUCTOR_EXT_TEMPLATES     fuse producers into Triton templates of our own where
                                              a plain lowering takes more kernels (on)
``gemm``           INDUCTOR_EXT_GEMM          "auto", or the route of every scaled GEMM: "library",
                                              "dequantize", "reference" (docs/gemm.md)
``grouped_gemm``   INDUCTOR_EXT_GROUPED_GEMM  "auto", or the route of every grouped GEMM: "library",
                                              "triton", "reference" (docs/grouped_gemm.md)
``weight_only``    INDUCTOR_EXT_WEIGHT_ONLY   "auto", or the route of products with a quantized
                                              weight: "kernel" or "dequantize"
                                              (docs/weight_only.md)
``attention``      INDUCTOR_EXT_ATTENTION     "auto", or the back end of attention: "cudnn",
                                              "flash", "efficient", "math"; of FP8: "triton",
                                              "cudnn_frontend", "dequantize" (docs/attention.md)
``decode_attention``  INDUCTOR_EXT_DECODE_ATTENTION  "auto", or the route of attention over a KV
                                              cache on CUDA: "triton", "reference"
                                              (docs/kv_cache.md)
=================  =========================  ================================================

Assign to a flag, or use :func:`patch` for a while.  Inductor's tables are shared by all threads,
so the flags are too (torch's own config modules are per thread since 2.13).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_TRUE, _FALSE = {"1", "true", "on", "yes"}, {"0", "false", "off", "no", ""}


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"config.{name} must be a bool, got {value!r}")
    return value


def _numerics(name: str, value: Any) -> str:
    if value not in ("exact", "fast"):
        raise ValueError(f'config.{name} must be "exact" or "fast", got {value!r}')
    return str(value)


def _route_of(*routes: str) -> Callable[[str, Any], str]:
    said = ", ".join(f'"{route}"' for route in routes)

    def check(name: str, value: Any) -> str:
        if value not in routes:
            raise ValueError(f"config.{name} must be one of {said}, got {value!r}")
        return str(value)

    return check


def _op_names(name: str, value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"config.{name} must be a collection of op names, got {value!r}")
    names = frozenset(value)
    for op in names:
        if not isinstance(op, str) or "::" not in op:
            raise ValueError(f'config.{name} must hold names like "namespace::op", got {op!r}')
    return names


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "enabled": _bool,
    "strict": _bool,
    "numerics": _numerics,
    "disabled_ops": _op_names,
    "always_lower": _bool,
    "templates": _bool,
    "gemm": _route_of("auto", "library", "dequantize", "reference"),
    "grouped_gemm": _route_of("auto", "library", "triton", "reference"),
    "weight_only": _route_of("auto", "kernel", "dequantize"),
    "attention": _route_of(
        "auto", "cudnn", "flash", "efficient", "math", "triton", "cudnn_frontend", "dequantize"
    ),
    "decode_attention": _route_of("auto", "triton", "reference"),
}


def _from_env(name: str, default: Any) -> Any:
    variable = "INDUCTOR_EXT_" + name.upper()
    text = os.environ.get(variable)
    if text is None:
        return default
    if isinstance(default, bool):
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(f"{variable} must be 0 or 1, got {text!r}")
        return text.lower() in _TRUE
    if isinstance(default, frozenset):
        return _op_names(name, [op for op in text.replace(",", " ").split() if op])
    return str(_CHECKS[name](name, text))


enabled: bool = _from_env("enabled", False)
strict: bool = _from_env("strict", False)
numerics: str = _from_env("numerics", "exact")
disabled_ops: frozenset[str] = _from_env("disabled_ops", frozenset())
always_lower: bool = _from_env("always_lower", False)
templates: bool = _from_env("templates", True)
gemm: str = _from_env("gemm", "auto")
grouped_gemm: str = _from_env("grouped_gemm", "auto")
weight_only: str = _from_env("weight_only", "auto")
attention: str = _from_env("attention", "auto")
decode_attention: str = _from_env("decode_attention", "auto")

_lock = threading.RLock()


def _assign(changes: dict[str, Any]) -> None:
    """Set several flags and bring Inductor into line once; on failure nothing is changed."""
    for name in changes:
        if name not in _CHECKS:
            raise AttributeError(
                f"inductor_ext.config has no flag {name!r}; the flags are {', '.join(_CHECKS)}"
            )
    checked = {name: _CHECKS[name](name, value) for name, value in changes.items()}
    from . import _install

    with _install.exclusive(), _lock:
        before = {name: globals()[name] for name in checked}
        globals().update(checked)
        try:
            _install.sync()
        except BaseException:
            globals().update(before)
            _install.sync()
            raise


@contextlib.contextmanager
def patch(**changes: Any) -> Iterator[None]:
    """Set flags inside a ``with`` block (or decorated function) and put the old values back.

    Process-wide, like the flags themselves.  Keep a training step whole inside one block: the
    backward is compiled when it first runs.
    """
    from . import _install

    with _install.exclusive(), _lock:  # in this order everywhere
        before = {name: globals()[name] for name in changes if name in _CHECKS}
        _assign(changes)
    try:
        yield
    finally:
        _assign(before)


def to_dict() -> dict[str, Any]:
    """Return the flags and their values."""
    return {name: globals()[name] for name in _CHECKS}


class _ConfigModule(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            _assign({name: value})

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"inductor_ext.config.{name} cannot be deleted")


sys.modules[__name__].__class__ = _ConfigModule
