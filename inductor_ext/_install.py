"""Bring Inductor's tables into line with the configuration and the registry, and back.

:func:`sync` is the only function that changes anything in PyTorch.  It computes the wanted state,
takes out what is no longer wanted and puts in what is missing; what was in a table before comes
back when ours leaves, unless somebody else has replaced our entry meanwhile.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from . import _cache_key, _compat, _state
from ._grids import wrap_grid_of_planes
from ._pairs import wrap_post_passes
from ._rounding import wrap_joint_passes
from ._schedule import wrap_persistent_choice
from ._tables import ABSENT, LOCK, Entry
from .errors import InductorExtWarning

if TYPE_CHECKING:
    from .registry import OpContract

_installed: dict[OpOverload, tuple[str, Callable[[], None]]] = {}
_global_entries: list[Callable[[], None]] = []
_warned_untested = False


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Wait until no compile is halfway through, then hold compiles and other togglers off."""
    with _compat.no_compile_running(), LOCK:
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
    _cache_key.place_fingerprint(on)
    if on and not _global_entries:
        _install_globals()
    for op, wanted_contract in wanted.items():
        if op not in _installed:
            _installed[op] = (wanted_contract.digest, _install_op(wanted_contract))
    if not on:
        while _global_entries:
            _global_entries.pop()()
    digests = {str(op): digest for op, (digest, _) in _installed.items()}
    _state.mode = f"on:{_cache_key.mode_digest(digests)}" if on else "off"


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
    entries = [Entry(_compat.lowerings, contract.op, lowering(contract))]
    if contract.strategy == "decomposition":  # the lowering above takes what it declines
        entries.append(Entry(_compat.decompositions, contract.op, decomposition(contract)))
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
    constraint = _compat.layout_constraints.pop(op, ABSENT)
    realized = op in _compat.needs_realized_inputs
    fallback = op in _compat.fallbacks
    _compat.needs_realized_inputs.discard(op)
    _compat.fallbacks.discard(op)

    def restore() -> None:
        if constraint is not ABSENT:
            _compat.layout_constraints.setdefault(op, constraint)
        if realized:
            _compat.needs_realized_inputs.add(op)
        if fallback:
            _compat.fallbacks.add(op)

    return restore


def _install_globals() -> None:
    _global_entries.append(_wrap_partitioner_lists())
    _global_entries.append(wrap_persistent_choice(_is_lowered))
    _global_entries.append(wrap_grid_of_planes())
    _global_entries.append(_install_rounding())
    _global_entries.append(wrap_joint_passes(_is_lowered))
    _global_entries.append(wrap_post_passes())


def _install_rounding() -> Callable[[], None]:
    """Install the lowering of the op that :mod:`inductor_ext._rounding` puts into graphs."""
    from inductor_ext.lowerings.rounding import round_to_dtype as lower

    from .ops.rounding import round_to_dtype as op

    restore_side_tables = _forget_fallback(op)
    entry = Entry(_compat.lowerings, op, lower)

    def remove() -> None:
        entry.remove()
        restore_side_tables()

    return remove


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
        for packet in (*recomputable_packets(), torch.ops.inductor_ext.round_to_dtype):
            lists.recomputable_ops.add(packet)
            lists.fusible_ops.add(packet)
        return lists

    module.get_default_op_list = get_default_op_list

    def remove() -> None:
        if module.get_default_op_list is get_default_op_list:
            module.get_default_op_list = original

    return remove
