"""Every error and warning that the package raises, one class each."""

from __future__ import annotations


class InductorExtError(Exception):
    """Base of the errors below."""


class RegistrationError(InductorExtError, ValueError):
    """A call of ``register`` contradicts itself or an earlier one."""


class Decline(InductorExtError):
    """Raised *by* a lowering or decomposition to say: not for these arguments, stay opaque."""


class DeclinedError(InductorExtError, RuntimeError):
    """Strict mode: an op stayed opaque although a lowering was registered for it."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(
            f"{op} declined to be lowered: {reason}. Change the arguments, add the op to "
            "inductor_ext.config.disabled_ops, or set inductor_ext.config.strict = False to "
            "run its opaque kernel."
        )
        self.op, self.reason = op, reason


class LoweringError(InductorExtError, RuntimeError):
    """Strict mode: a lowering raised, or its result contradicts the op's fake."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(
            f"the lowering of {op} failed: {reason}. Mend the lowering, or set "
            "inductor_ext.config.strict = False to run the opaque kernel instead."
        )
        self.op, self.reason = op, reason


class CompatError(InductorExtError, ImportError):
    """A private PyTorch symbol that the plugin needs is not where the tested versions have it."""


class InductorExtWarning(UserWarning):
    """Something works, but slower or with less fused than it could; said once."""
