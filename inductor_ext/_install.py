"""Bring Inductor's tables into line with the configuration and the registry, and back.

:func:`sync` is the only function that changes anything in PyTorch.  It computes the wanted state,
takes out what is no longer wanted and puts in what is missing; what was in a table before comes
back when ours leaves, unless somebody else has replaced our entry meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from . import _compat, _state
from ._schedule import wrap_persistent_choice
from ._sources import package_digest
from .errors import InductorExtWarning

if TYPE_CHECKING:
    from .registry import OpContract

_LOCK = threading.RLock()
_ABSENT: Any = object()
_FINGERPRINT = "inductor_ext"


class _Entry:
    """One of our values in one of PyTorch's dicts, and what stood there before."""

    def __init__(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self.table, self.key, self.value = table, key, value
        self.before = table.get(key, _ABSENT)
        table[key] = value

    def remove(self) -> None:
        if self.table.get(self.key) is self.value:
            if self.before is _ABSENT:
                del self.table[self.key]
            else:
                self.table[self.key] = self.before


_installed: dict[OpOverload, tuple[str, Callable[[], None]]] = {}
_global_entries: list[Callable[[], None]] = []
_fingerprint_entry: _Entry | None = None
_rule_was_traced = False
_warned_untested = False


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Wait until no compile is halfway through, then hold compiles and other togglers off."""
    with _compat.no_compile_running(), _LOCK:
        yield


def sync() -> None:
    """Make PyTorch's tables match ``config`` and the registry; called under :func:`exclusive`."""
    from . import config
    from .registry import contracts

    wanted: dict[OpOverload, OpContract] = {}
    on = config.enabled and _usable()
    if on:
        wanted = {op: c for op, c in contracts().items() if c.name not in config.disabled_ops}
    for op in [o for o, (digest, _) in _installed.items() if _digest_of(wanted, o) != digest]:
        _installed.pop(op)[1]()
    _place_fingerprint(on or (_rule_was_traced and bool(_rules())))
    if on and not _global_entries:
        _install_globals()
    for op, wanted_contract in wanted.items():
        if op not in _installed:
            _installed[op] = (wanted_contract.digest, _install_op(wanted_contract))
    if not on:
        while _global_entries:
            _global_entries.pop()()
    _state.mode = f"on:{_mode_digest()}" if on else "off"


def installed() -> tuple[OpOverload, ...]:
    """Return the ops whose contract is in force now."""
    return tuple(_installed)


def recomputable_packets() -> list[Any]:
    """Return the op packets that the partitioner may recompute and may fuse."""
    from .registry import contracts

    known = contracts()
    return [
        op.overloadpacket
        for op in _installed
        if known[op].recomputable and known[op].strategy != "opaque"
    ]


def _is_lowered(target: Any) -> bool:
    from .registry import contracts

    contract = contracts().get(target) if target in _installed else None
    return contract is not None and contract.strategy != "opaque"


def _digest_of(wanted: dict[OpOverload, OpContract], op: OpOverload) -> str | None:
    return wanted[op].digest if op in wanted else None


def _mode_digest() -> str:
    from . import config

    parts = [package_digest(), config.numerics, str(config.strict)]
    parts += sorted(f"{op}={digest}" for op, (digest, _) in _installed.items())
    parts += _rules()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _usable() -> bool:
    global _warned_untested
    if _compat.is_tested():
        return True
    if not _warned_untested:
        _warned_untested = True
        warnings.warn(
            f"inductor_ext is not tested with torch {torch.__version__} (tested: "
            f"{', '.join(_compat.TESTED)}); its ops work but stay opaque to the compiler. Set "
            "INDUCTOR_EXT_ALLOW_UNTESTED=1 to enable the lowerings all the same.",
            InductorExtWarning,
            stacklevel=4,
        )
    return False


def _install_op(contract: OpContract) -> Callable[[], None]:
    from ._lowering import decomposition, lowering

    restore_side_tables = _forget_fallback(contract.op)
    entries = [_Entry(_compat.lowerings, contract.op, lowering(contract))]
    if contract.strategy == "decomposition":  # the lowering above takes what it declines
        entries.append(_Entry(_compat.decompositions, contract.op, decomposition(contract)))
        _compat.clear_decomposition_cache()

    def remove() -> None:
        for entry in entries:
            entry.remove()
        restore_side_tables()
        if contract.strategy == "decomposition":
            _compat.clear_decomposition_cache()

    return remove


def _forget_fallback(op: OpOverload) -> Callable[[], None]:
    """Take out what a fallback of ``op`` left in Inductor's tables beside its lowering.

    The first compile of an op without a lowering writes four tables for good; left there, inputs
    of our lowering would be realized and constrained.  Returns a function that puts them back.
    """
    constraint = _compat.layout_constraints.pop(op, _ABSENT)
    realized = op in _compat.needs_realized_inputs
    fallback = op in _compat.fallbacks
    _compat.needs_realized_inputs.discard(op)
    _compat.fallbacks.discard(op)

    def restore() -> None:
        if constraint is not _ABSENT:
            _compat.layout_constraints.setdefault(op, constraint)
        if realized:
            _compat.needs_realized_inputs.add(op)
        if fallback:
            _compat.fallbacks.add(op)

    return restore


def _install_globals() -> None:
    _global_entries.append(_wrap_partitioner_lists())
    _global_entries.append(wrap_persistent_choice(_is_lowered))


def _place_fingerprint(wanted: bool) -> None:
    global _fingerprint_entry
    if wanted and _fingerprint_entry is None:
        _fingerprint_entry = _Entry(_compat.custom_backend_passes, _FINGERPRINT, _fingerprint())
    elif not wanted and _fingerprint_entry is not None:
        _fingerprint_entry.remove()
        _fingerprint_entry = None


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
    with _LOCK:
        _rule_was_traced = True
        _place_fingerprint(True)


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


def _wrap_partitioner_lists() -> Callable[[], None]:
    """Let the min-cut partitioner recompute and fuse our ops.

    Otherwise the activation that fusion removed is saved for the backward.  The list is wrapped
    rather than ``custom_partitioner_fn`` set, since that slot is the user's and, since torch 2.13,
    is per thread.
    """
    module = _compat.partitioners
    original = module.get_default_op_list

    def get_default_op_list() -> Any:
        lists = original()
        for packet in recomputable_packets():
            lists.recomputable_ops.add(packet)
            lists.fusible_ops.add(packet)
        return lists

    module.get_default_op_list = get_default_op_list

    def remove() -> None:
        if module.get_default_op_list is get_default_op_list:
            module.get_default_op_list = original

    return remove
