"""One scheduling choice for kernels that hold our ops: keep a row in registers.

Inductor reads a row once for its reduction and again for what follows it when the row is longer
than 1024 elements; the second read comes from the caches but costs a fifth of the bandwidth on an
H200.  A row of up to 16384 elements fits in the registers of one thread block ("persistent
reduction"), so it is read once.  Kernels without a registered op keep Inductor's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _compat

MAX_ROW = 16384
"""Longest row, in elements, that one thread block holds."""


def wrap_persistent_choice(is_ours: Callable[[Any], bool]) -> Callable[[], None]:
    """Wrap Inductor's choice; ``is_ours(fx target)`` tells our ops. Returns the undo function."""
    choices = _compat.InductorChoices
    original = choices.should_use_persistent_reduction

    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        if original(features, cooperative_reduction):
            return True
        return not cooperative_reduction and _row_fits(features) and _holds(features, is_ours)

    wrapper = staticmethod(should_use_persistent_reduction)
    choices.should_use_persistent_reduction = wrapper

    def undo() -> None:
        if vars(choices).get("should_use_persistent_reduction") is wrapper:
            choices.should_use_persistent_reduction = staticmethod(original)

    return undo


def _row_fits(features: Any) -> bool:
    if features.get_reduction_hint() != _compat.ReductionHint.INNER:
        return False
    return bool(_compat.V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_ROW))


def _holds(features: Any, is_ours: Callable[[Any], bool]) -> bool:
    return any(
        is_ours(origin.target)
        for node in features.scheduler_nodes()
        if node.node is not None
        for origin in node.node.get_origins()
    )
