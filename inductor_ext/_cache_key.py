"""What makes compile caches tell our modes apart, in memory, on disk and across processes.

PyTorch's cache keys know nothing of lowerings, decompositions or gradient formulas.  A graph pass
that never runs puts a digest of ours into all of them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from . import _compat, _state
from ._sources import package_digest
from ._tables import LOCK, Entry

_NAME = "inductor_ext"
_entry: Entry | None = None
_rule_was_traced = False


def mode_digest(installed: dict[str, str]) -> str:
    """Return the digest of a mode: configuration, plugin, and each op's sources by name."""
    from . import config

    parts = [package_digest(), config.numerics, str(config.strict), str(config.always_lower)]
    parts += [str(config.templates), config.weight_only]
    parts += sorted(f"{op}={digest}" for op, digest in installed.items())
    parts += _rules()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def place_fingerprint(on: bool) -> None:
    """Put the fingerprint into the cache keys while the plugin is on, or a rule was traced."""
    global _entry
    wanted = on or (_rule_was_traced and bool(_rules()))
    if wanted and _entry is None:
        _entry = Entry(_compat.custom_backend_passes, _NAME, _fingerprint())
    elif not wanted and _entry is not None:
        _entry.remove()
        _entry = None


def _fingerprint() -> Any:
    """Return a graph pass that never runs and whose uuid() puts our state into every cache key.

    ``custom_backend_passes`` is process-wide, survives ``torch.compile(options=...)`` and is
    hashed on every tested version; its uuid is read at each key computation, so it is live.
    """

    class Fingerprint(_compat.CustomGraphModulePass):
        def __call__(self, gm: torch.fx.GraphModule) -> None:
            return None

        def uuid(self) -> str:
            _stamp_forward()
            return f"inductor_ext {_cache_mode()}"

    return Fingerprint()


def _cache_mode() -> str:
    """Return what a compile cache must tell apart: the mode and, when off, the gradient rules."""
    return " ".join([_state.mode, *_rules()]) if _state.mode == "off" else _state.mode


def _rules() -> list[str]:
    """Return the digests of the contracts whose gradient rule is in force, plugin on or off."""
    from .registry import Autograd, contracts

    found = contracts().values()
    return sorted(f"{c.name}={c.digest}" for c in found if isinstance(c.autograd, Autograd))


def rule_runs() -> None:
    """Note that a gradient rule of ours is being traced: from now on the caches must know it.

    PyTorch's cache keys hold no ``register_autograd`` formula, and a rule is in force while the
    plugin is off.  The key is computed after tracing, so this comes in time, and a process that
    compiles no such op keeps the keys of plain PyTorch.
    """
    global _rule_was_traced
    if _rule_was_traced or _compat.TracingContext.try_get() is None:
        return
    with LOCK:
        _rule_was_traced = True
        place_fingerprint(False)


class _ModeOfForward:
    """Stands in a graph's metadata and refuses to be saved when the mode has changed since.

    AOTAutograd's key is computed with the forward, and the entry is saved when the backward has
    been compiled, which is later.  After a toggle in between, the entry would hold a backward of
    one mode under the key of the other.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __reduce__(self) -> Any:
        if self.mode != _cache_mode():
            raise _compat.BypassAOTAutogradCache(
                "inductor_ext changed its mode between forward and backward"
            )
        return str, (self.mode,)

    def __deepcopy__(self, memo: Any) -> _ModeOfForward:
        return self


def _stamp_forward() -> None:
    """Remember, with the graph being compiled, the mode in which its compilation began."""
    context = _compat.TracingContext.try_get()
    if context is None:
        return
    metadata = context.fw_metadata  # None until AOTAutograd has computed its key
    begun = vars(context).setdefault(
        "_inductor_ext_mode", _cache_mode() if metadata is None else "unknown: off, or no cache"
    )
    if metadata is not None and not isinstance(
        getattr(metadata, "_inductor_ext_mode", None), _ModeOfForward
    ):
        metadata._inductor_ext_mode = _ModeOfForward(begun)
