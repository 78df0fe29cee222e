"""The contract of an op, and the one door through which every op comes in: :func:`register`.

Our own ops and anyone else's use the same call.  A contract says what the op computes
(``reference``), how the compiler is to see it (exactly one of ``lowering``, ``decomposition``,
``opaque``), whether it has a gradient, when it must stay opaque, and how to make inputs for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from . import _cache_key, _install
from ._sources import source_of
from .errors import RegistrationError

Strategy = Literal["lowering", "decomposition", "opaque"]
Inputs = Callable[[torch.device], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True)
class Autograd:
    """A gradient rule, as ``torch.library.register_autograd`` takes it.

    Args:
        backward: ``backward(ctx, *grads)`` in terms of ops that compile.
        setup_context: ``setup_context(ctx, inputs, output)``, or None when nothing is saved.
    """

    backward: Callable[..., Any]
    setup_context: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Record:
    """What became of one call of a registered op in one compilation.

    ``outcome`` is "lowered", "decomposed", "declined" (``reason`` says why), "failed" (the
    lowering raised or contradicted the fake), "opaque" (registered so) or "kernel" (nothing to
    fuse with, and the op's own kernel is the faster).
    """

    op: str
    outcome: Literal["lowered", "decomposed", "declined", "failed", "opaque", "kernel"]
    reason: str = ""


@dataclass(frozen=True, eq=False)
class OpContract:
    """Everything that is known of one op; made by :func:`register`."""

    op: OpOverload
    reference: Callable[..., Any]
    strategy: Strategy
    implementation: Callable[..., Any] | str | None
    autograd: Autograd | Literal["native"] | None
    supports: Callable[..., bool | str] | None
    kernel_alone: Callable[..., bool] | None
    why: Callable[..., str] | None
    inputs: Inputs | None
    version: str
    recomputable: bool
    digest: str
    _library: list[torch.library.Library] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        """The op's name, "namespace::op" (with ".overload" unless it is the default)."""
        return op_name(self.op)

    def unregister(self) -> None:
        """Take the contract back: the op is opaque again, its autograd rule is removed."""
        with _install.exclusive(), _LOCK:
            if _CONTRACTS.get(self.op) is not self:
                return
            del _CONTRACTS[self.op]
            _install.sync()
            for library in self._library:
                library._destroy()
            self._library.clear()


_LOCK = threading.RLock()
_CONTRACTS: dict[OpOverload, OpContract] = {}
_RECORDS: list[Record] = []
_MAX_RECORDS = 10_000


def op_name(op: OpOverload) -> str:
    """Return "namespace::op", with the overload's name unless it is "default"."""
    return str(op.name() if op._overloadname != "default" else op._schema.name)


def contracts() -> dict[OpOverload, OpContract]:
    """Return the registered contracts, in the order of their registration."""
    with _LOCK:
        return dict(_CONTRACTS)


def contract(op: OpOverload | str) -> OpContract:
    """Return the contract of an op, given as OpOverload or by name; KeyError if there is none."""
    with _LOCK:
        for key, value in _CONTRACTS.items():
            if key is op or value.name == op:
                return value
    raise KeyError(f"{op} is not registered with inductor_ext; registered are: {_names()}")


def records() -> list[Record]:
    """Return what became of each op in the compilations since :func:`clear_records`.

    A compilation answered from a cache lowers nothing and so records nothing.
    """
    with _LOCK:
        return list(_RECORDS)


def clear_records() -> None:
    """Forget the records so far."""
    with _LOCK:
        _RECORDS.clear()


def add_record(record: Record) -> None:
    """Keep a record (the oldest are dropped after ten thousand)."""
    with _LOCK:
        _RECORDS.append(record)
        del _RECORDS[:-_MAX_RECORDS]


def register(
    op: OpOverload | Callable[[], OpOverload],
    *,
    reference: Callable[..., Any],
    lowering: Callable[..., Any] | str | None = None,
    decomposition: Callable[..., Any] | str | None = None,
    opaque: bool = False,
    autograd: Autograd | Literal["native"] | None,
    supports: Callable[..., bool | str] | None = None,
    kernel_alone: Callable[..., bool] | None = None,
    why: Callable[..., str] | None = None,
    inputs: Inputs | None = None,
    version: str = "",
    recomputable: bool = True,
    override: bool = False,
) -> OpContract:
    """Register how the compiler is to see a custom op.

    Args:
        op: the OpOverload (``torch.ops.ns.op.default``), or a function that returns it.
        reference: plain-PyTorch definition of the result, the oracle of the parity harness.
        lowering: takes and returns Inductor IR, like a function given to Inductor's own
            ``register_lowering``; a callable, or "module:function", imported on first use.
            It raises :class:`inductor_ext.Decline` to leave a call opaque.
        decomposition: the op in terms of ATen ops; a callable or "module:function".
        opaque: True says that the op stays the call of its own kernel.
        autograd: an :class:`Autograd` rule to install; "native" if the op brings its own;
            None says that it has no gradient.  There is no default: silence loses gradients.
        supports: called with the op's (fake) arguments; returns True, or False or a reason for
            these arguments to stay opaque.
        kernel_alone: asked where a lowered op has no neighbour to fuse with, with its (fake)
            arguments; True says that its own kernel is faster then, and is called.
        why: for an opaque op that has several kernels: called with its (fake) arguments, it says
            which of them the op will call and why; the reason of the op's record.
        inputs: ``inputs(device)`` yields argument tuples for the parity harness.
        version: anything that changes the generated code and is not in the source files of the
            functions above; part of the cache key.  Required where a source cannot be read.
        recomputable: whether the backward may recompute the op instead of saving its result.
        override: replace an earlier contract of the same op instead of refusing.

    Returns:
        The contract; its ``unregister()`` undoes the registration.

    Raises:
        RegistrationError: on none or several strategies, a duplicate, or an unreadable source.
    """
    given = isinstance(op, (OpOverload, torch._ops.OpOverloadPacket)) or not callable(op)
    overload = op if given else op()
    if not isinstance(overload, OpOverload):
        raise RegistrationError(
            "`op` must be an OpOverload such as torch.ops.ns.op.default, or a function that "
            f"returns one, got {type(overload).__name__}"
        )
    name = op_name(overload)
    strategy, implementation = _one_strategy(name, lowering, decomposition, opaque)
    if not (autograd is None or autograd == "native" or isinstance(autograd, Autograd)):
        raise RegistrationError(
            f'{name}: `autograd` must be an Autograd rule, "native" or None, got {autograd!r}'
        )
    rule = (autograd.backward, autograd.setup_context) if isinstance(autograd, Autograd) else ()
    choices = f"{version}\0{strategy}\0{recomputable}"
    digest = source_of(name, choices, bool(version), implementation, supports, kernel_alone, *rule)
    made = OpContract(
        op=overload,
        reference=reference,
        strategy=strategy,
        implementation=implementation,
        autograd=autograd,
        supports=supports,
        kernel_alone=kernel_alone,
        why=why,
        inputs=inputs,
        version=version,
        recomputable=recomputable,
        digest=digest,
    )
    with _install.exclusive(), _LOCK:
        earlier = _CONTRACTS.get(overload)
        if earlier is not None:
            if not override:
                raise RegistrationError(
                    f"{name} is registered already; pass override=True to replace its contract, "
                    "or call unregister() on the first one"
                )
            earlier.unregister()
        try:
            if isinstance(autograd, Autograd):
                made._library.append(_install_autograd(overload, autograd))
            _CONTRACTS[overload] = made
            _install.sync()
        except BaseException:
            made.unregister()
            raise
    return made


def _install_autograd(op: OpOverload, rule: Autograd) -> torch.library.Library:
    library = torch.library.Library(op.namespace, "FRAGMENT")

    def setup_context(**said: Any) -> None:
        _cache_key.rule_runs()
        if rule.setup_context is not None:
            rule.setup_context(**said)

    torch.library.register_autograd(op, rule.backward, setup_context=setup_context, lib=library)
    return library


def _one_strategy(
    name: str,
    lowering: Callable[..., Any] | str | None,
    decomposition: Callable[..., Any] | str | None,
    opaque: bool,
) -> tuple[Strategy, Callable[..., Any] | str | None]:
    given: list[tuple[Strategy, Callable[..., Any] | str | None]] = []
    if lowering is not None:
        given.append(("lowering", lowering))
    if decomposition is not None:
        given.append(("decomposition", decomposition))
    if opaque:
        given.append(("opaque", None))
    if len(given) != 1:
        said = " and ".join(strategy for strategy, _ in given) or "none"
        raise RegistrationError(
            f"{name}: give exactly one of `lowering`, `decomposition` and `opaque=True`, got {said}"
        )
    return given[0]


def _names() -> str:
    return ", ".join(c.name for c in _CONTRACTS.values()) or "none"
