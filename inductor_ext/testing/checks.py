"""The checks of the parity harness, one function each; a check raises ParityError or returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inductor_ext import registry
from inductor_ext.registry import OpContract

from . import running
from .compare import ParityError, metadata_problem, require_equal, tensors
from .samples import Sample, differentiable, require_grad

BATCHES = (1, 2, 3, 17, 0)
_EXPECTED = {"lowering": "lowered", "decomposition": "decomposed", "opaque": "opaque"}


@dataclass(frozen=True)
class Context:
    """What every check needs: the op's contract, and how to compare and vary its samples."""

    contract: OpContract
    nan_equal: bool | Sequence[bool]
    batches: Sequence[int]
    grad_reference: Callable[..., Any] | None

    def fail(
        self, check: str, detail: str, sample: Sample, output: int | None = None
    ) -> ParityError:
        return ParityError(self.contract.name, check, detail, sample=str(sample), output=output)

    def equal(
        self, check: str, got: Any, expected: Any, sample: Sample, *, same_device: bool = True
    ) -> None:
        require_equal(
            self.contract.name,
            check,
            got,
            expected,
            args=sample.args,
            nan_equal=self.nan_equal,
            sample=str(sample),
            same_device=same_device,
        )

    def equal_grads(
        self,
        got: Sequence[Tensor | None],
        expected: Sequence[Tensor | None],
        way: str,
        sample: Sample,
        positions: Sequence[int],
    ) -> None:
        nan_equal = self.nan_equal if isinstance(self.nan_equal, bool) else any(self.nan_equal)
        for position, one, other in zip(positions, got, expected, strict=True):
            if (one is None) != (other is None):
                have = "no gradient" if one is None else "a gradient"
                detail = f"input {position} has {have} ({way}), the other way has not"
                if one is None:
                    detail = f"input {position} has {have} ({way}), the other way has one"
                raise self.fail("autograd", detail, sample)
            require_equal(
                self.contract.name,
                f"autograd ({way}), gradient of input {position}",
                one,
                other,
                args=sample.args,
                nan_equal=nan_equal,
                sample=str(sample),
            )

    @contextlib.contextmanager
    def must_run(self, check: str, what: str, sample: Sample) -> Iterator[None]:
        try:
            yield
        except ParityError:
            raise
        except Exception as error:
            detail = f"{what} raised {type(error).__name__}: {error}"
            raise self.fail(check, detail, sample) from error

    def eager(self, check: str, sample: Sample) -> Any:
        with self.must_run(check, "the op in eager mode", sample):
            return self.contract.op(*sample.args)


_OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def opcheck(context: Context, sample: Sample) -> None:
    """torch.library.opcheck: schema, autograd registration, fakes, AOT dispatch.

    ``test_schema`` compares values with ``allclose``, which PyTorch has not for float8 tensors;
    for those ops the check ``pure`` alone looks for mutated inputs.
    """
    result = context.eager("opcheck", sample)
    narrow = any(
        t.dtype.is_floating_point and t.element_size() == 1
        for t in (*tensors(result), *tensors(sample.args))
    )
    with context.must_run("opcheck", "torch.library.opcheck", sample):
        torch.library.opcheck(
            context.contract.op, sample.clone().args, test_utils=_OPCHECKS[narrow:]
        )


def fake(context: Context, sample: Sample) -> None:
    """The fake's dtype, shape, strides, storage offset and device are the real result's."""
    real = tensors(context.eager("fake", sample))
    with context.must_run("fake", "the fake", sample):
        faked = tensors(running.fake_result(context.contract, sample.args))
    if len(real) != len(faked):
        detail = f"the op returns {len(real)} tensors, the fake {len(faked)}"
        raise context.fail("fake", detail, sample)
    for number, (one, other) in enumerate(zip(faked, real, strict=True)):
        problem = metadata_problem(one, other)
        if problem:
            detail = f"output {number} of the fake: {problem}"
            raise context.fail("fake", detail, sample, number)


def pure(context: Context, sample: Sample) -> None:
    """The op leaves its inputs alone and gives the same bits twice."""
    mine = sample.clone()
    first = context.eager("pure", mine)
    for position, (after, before) in enumerate(zip(mine.args, sample.args, strict=True)):
        if isinstance(after, Tensor):
            what = f"pure: input {position} after the call"
            require_equal(context.contract.name, what, after, before, sample=str(sample))
    context.equal("pure", context.eager("pure", mine), first, sample)


def reference(context: Context, sample: Sample) -> None:
    """Eager gives the reference's bits."""
    with context.must_run("reference", "the reference", sample):
        expected = context.contract.reference(*sample.args)
    context.equal("reference", context.eager("reference", sample), expected, sample)


def decomposition(context: Context, sample: Sample) -> None:
    """The decomposition, run eagerly, gives eager's bits."""
    if context.contract.strategy != "decomposition":
        return
    expected = context.eager("decomposition", sample)
    with context.must_run("decomposition", "the decomposition", sample):
        got = running.implementation(context.contract)(*sample.args)
    context.equal("decomposition", got, expected, sample)


def compiled_on(context: Context, sample: Sample) -> None:
    """Compiled with the plugin: eager's bits, by the strategy that the contract names."""
    expected = context.eager("compiled_on", sample)
    with running.plugin(True):
        registry.clear_records()
        with context.must_run("compiled_on", "compiling with the plugin", sample):
            got = running.compiled(running.caller(context.contract.op))(*sample.args)
        _require_outcome(context, "compiled_on", sample)
    context.equal("compiled_on", got, expected, sample)


def compiled_off(context: Context, sample: Sample) -> None:
    """Compiled without the plugin: eager's bits."""
    expected = context.eager("compiled_off", sample)
    with (
        running.plugin(False),
        context.must_run("compiled_off", "compiling without the plugin", sample),
    ):
        got = running.compiled(running.caller(context.contract.op))(*sample.args)
    context.equal("compiled_off", got, expected, sample)


def dynamic(context: Context, sample: Sample) -> None:
    """Batches 1, 2, 3, 17 and 0: eager's bits, and no compilation for each size.

    PyTorch itself compiles once more for each of the sizes 0 and 1; all others share one graph.
    With that switched off (``backed_size_oblivious``) at most 2 compilations serve every size.
    A batch that happens to be as long as another dimension is not taken for the same size.
    """
    if sample.batch() in (None, 0):
        return
    general = [size for size in context.batches if size > 1]
    with running.plugin(True), running.no_size_is_equal():
        run = running.compiled(running.caller(context.contract.op, "dynamic"), dynamic=True)
        registry.clear_records()
        _run_batches(context, run, general, 1, sample)
        _require_outcome(context, "dynamic", sample)
        special = [size for size in context.batches if size <= 1]
        _run_batches(context, run, special, len(special), sample)
        with running.no_size_is_special():
            run = running.compiled(running.caller(context.contract.op, "sizes"), dynamic=True)
            _run_batches(context, run, context.batches, 2, sample)


def _run_batches(
    context: Context, run: Callable[..., Any], sizes: Sequence[int], most: int, sample: Sample
) -> None:
    before = running.graphs()
    for size in sizes:
        batch = sample.batched(size)
        with context.must_run("dynamic", f"batch {size}", batch):
            got = run(*batch.args)
        context.equal("dynamic", got, context.eager("dynamic", batch), batch)
    spent = running.graphs() - before
    if spent > most:
        sizes_told = ", ".join(map(str, sizes))
        detail = f"batches {sizes_told} took {spent} compilations, at most {most} allowed"
        raise context.fail("dynamic", detail, sample)


def autograd(context: Context, sample: Sample) -> None:
    """With a rule: gradients, and the same bits from eager and both compilations; else none.

    With ``grad_reference``, eager's gradients are also those of its ordinary autograd.
    """
    contract, positions = context.contract, differentiable(sample.args)
    if not positions:
        return
    if contract.autograd is None:
        _require_no_gradient(context, sample, positions)
        return
    expected = _gradients(context, contract.op, "eager", sample, positions)
    if context.grad_reference is not None:
        theirs = _gradients(context, context.grad_reference, "the reference", sample, positions)
        context.equal_grads(expected, theirs, "eager against the reference", sample, positions)
    for on in (True, False):
        with running.plugin(on):
            run = running.compiled(running.caller(contract.op, "grad"))
            way = f"compiled, plugin {'on' if on else 'off'}"
            got = _gradients(context, run, way, sample, positions)
        context.equal_grads(got, expected, way, sample, positions)


def _require_no_gradient(context: Context, sample: Sample, positions: list[int]) -> None:
    try:
        result = context.contract.op(*require_grad(sample.args))
    except Exception:  # refusing inputs that require grad is one way to have no gradient
        return
    for number, out in enumerate(tensors(result)):
        node = out.grad_fn.name() if out.grad_fn is not None else ""
        if node and not _is_a_stub(out):
            detail = f"output {number} has the gradient {node}, the contract says autograd=None"
            raise context.fail("autograd", detail, sample, number)


def _gradients(
    context: Context, fn: Callable[..., Any], way: str, sample: Sample, positions: list[int]
) -> list[Tensor | None]:
    args = require_grad(sample.args)
    with context.must_run("autograd", f"the forward ({way})", sample):
        outs = [t for t in tensors(fn(*args)) if t.requires_grad]
    if not outs or any(_is_a_stub(t) for t in outs):
        detail = f"no output has a gradient ({way}), the contract has an autograd rule"
        raise context.fail("autograd", detail, sample)
    cotangents = [_cotangent(t) for t in outs]
    leaves = [args[p] for p in positions]
    with context.must_run("autograd", f"the backward ({way})", sample):
        return list(torch.autograd.grad(outs, leaves, cotangents, allow_unused=True))


def _is_a_stub(t: Tensor) -> bool:
    """Return whether the gradient is what PyTorch gives an op without one: it only warns."""
    return t.grad_fn is not None and "NotImplemented" in t.grad_fn.name()


def _cotangent(t: Tensor) -> Tensor:
    """Small integers of both signs: exact in every dtype, different for neighbours."""
    steps = torch.arange(t.numel(), device=t.device) % 7 - 3
    return steps.to(t.dtype).reshape(t.shape)


def _require_outcome(context: Context, check: str, sample: Sample) -> None:
    """Every call of the op was compiled as the contract says, or its ``supports`` declined."""
    contract, wanted = context.contract, _EXPECTED[context.contract.strategy]
    found = running.records_of(contract)
    if running.stays_opaque(contract, sample.args):
        wanted = "declined"
    odd = next((r for r in found if r.outcome != wanted), None)
    if odd is not None:
        reason = f" ({odd.reason})" if odd.reason else ""
        detail = f"the contract says the op is {wanted}, but it {_was(odd.outcome)}{reason}"
        raise context.fail(check, detail, sample)
    if not found:
        detail = f"the contract says the op is {wanted}, but the compiler never asked for it"
        raise context.fail(check, detail, sample)


def _was(outcome: str) -> str:
    return outcome if outcome in ("declined", "failed") else f"was {outcome}"


def across_devices(context: Context, sample: Sample, other: Sample) -> None:
    """Another device gives this one's bits for the same arguments."""
    expected = context.eager("across_devices", sample)
    got = context.eager("across_devices", other)
    context.equal("across_devices", got, expected, sample, same_device=False)


CHECKS: dict[str, Callable[[Context, Sample], None]] = {
    "fake": fake,
    "pure": pure,
    "reference": reference,
    "decomposition": decomposition,
    "opcheck": opcheck,
    "compiled_on": compiled_on,
    "compiled_off": compiled_off,
    "dynamic": dynamic,
    "autograd": autograd,
}
