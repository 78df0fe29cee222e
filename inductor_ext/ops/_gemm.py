"""The forms of a scaled GEMM op, and the checks that all of them share.

Each family gives ``name(operands, bias, dtype, options) -> Tensor``, the same as ``name.out``, and
``name_accumulate_(out, operands, options)``, which adds the fp32 product to ``out``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from .. import config
from .._call import KERNELS
from ..errors import InductorExtWarning
from ..registry import register
from ..validation import INPUT_DTYPES, check_dtype, check_same_device, check_tensor
from ._blocks import LAYOUTS, ceil_div, check_choice, round_up
from ._gemm_calls import ALIGNMENT, is_aligned
from ._library import LIBRARY, define

MOST_PLANS = 4096
Route = Callable[..., Any]
"""Writes the product to its first argument, which is row-major, aligned and not empty."""
Direct = Callable[..., Tensor]
"""Calls the library with an op's arguments as they are, and ``out`` where it is given."""


class Plan(NamedTuple):
    """What a call comes down to, known from shapes, strides, dtypes and alignments.

    Args:
        shape: of the result.
        route: what multiplies.
        direct: what multiplies in place of the route, with nothing to prepare.
        library: whether the library may still refuse the call, which another route then takes.
    """

    shape: tuple[int, int]
    route: Route
    direct: Direct | None = None
    library: bool = False


@dataclass(frozen=True)
class Gemm:
    """A family: making one defines and registers its ops.

    Args:
        name: of the op.
        operands: names of the tensors, the codes of A (M, K) first.
        options: the rest of the schema after ``bias`` and ``dtype``, or "".
        check: ``check(*operands, bias, dtype, *options)`` raises, or returns (M, N).
        reference: the exact definition, of the same arguments.
        choose: of the same arguments, the name of the route and why (``_routes_gemm``).
        routes: ``route(out, *operands, bias, dtype, *options)`` by name; the route "reference" is
            the exact definition.
        inputs: sample arguments for the harness.
        direct: of the same arguments, the library's call, if it takes them as they are.
        second: the route for sizes that the library turns out to refuse, if not "dequantize".
        op: the functional overload.
        _count: how many tensors come before the bias; the dtype is after that.
        _plans: by all that they depend on; see :meth:`_plan`.
    """

    name: str
    operands: str
    options: str
    check: Callable[..., tuple[int, int]]
    reference: Callable[..., Tensor]
    choose: Callable[..., tuple[str, str]]
    routes: Mapping[str, Route]
    inputs: Callable[[torch.device], Iterator[tuple[Any, ...]]]
    direct: Callable[..., Direct | None] = lambda *args: None
    second: Route | None = None
    op: OpOverload = field(init=False)
    _count: int = field(init=False)
    _plans: dict[Any, Plan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_count", len(self.operands.split()))
        tensors = ", ".join(f"Tensor {each}" for each in self.operands.split())
        tail = f", {self.options}" if self.options else ""
        arguments = f"{tensors}, Tensor? bias, ScalarType dtype{tail}"
        op = self._define("", f"({arguments}) -> Tensor", self._fake, self.run)
        out = f"({arguments}, *, Tensor(a!) out) -> ()"
        self._define(".out", out, self._fake_out, self.run_out)
        into = f"(Tensor(a!) out, {tensors}{tail}) -> ()"
        into_op = self._define("_accumulate_", into, self._fake_accumulate_, self.run_accumulate_)
        register(
            op, reference=self.reference, opaque=True, autograd=None, inputs=self.inputs,
            why=self._why,
        )  # fmt: skip
        register(
            into_op, reference=self._reference_accumulate_, opaque=True, autograd=None,
            inputs=self._inputs_accumulate_, why=lambda out, *args: self._why(*self._whole(args)),
        )  # fmt: skip
        object.__setattr__(self, "op", op)

    def _define(
        self, form: str, signature: str, fake: Callable[..., Any], run: Callable[..., Any]
    ) -> OpOverload:
        name = self.name + form
        op = define(name + signature, fake=fake, reference=run, compiled=False)
        LIBRARY.impl(name, run, "CUDA")
        KERNELS[op] = run
        return op

    def _whole(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the missing bias and dtype into the arguments of the accumulating form."""
        return (*args[: self._count], None, torch.float32, *args[self._count :])

    def _why(self, *args: Any) -> str:
        return ": ".join(self.choose(*args))

    def _fake(self, *args: Any) -> Tensor:
        return args[0].new_empty(self.check(*args), dtype=args[self._count + 1])

    def _fake_out(self, *args: Any, out: Tensor) -> None:
        _check_out("out", out, args[0], self.check(*args), args[self._count + 1])

    def _fake_accumulate_(self, out: Tensor, *args: Any) -> None:
        _check_out("out", out, args[0], self.check(*self._whole(args)), torch.float32)

    def run(self, *args: Any) -> Tensor:
        """Check, and multiply by the route that is chosen: the op, on every device."""
        return self._without_grad(self._plan(args), args, None)

    def run_out(self, *args: Any, out: Tensor) -> None:
        """Do the same into a tensor of any strides; rows that are aligned need no copy."""
        plan = self._plan(args)
        _check_out("out", out, args[0], plan.shape, args[self._count + 1])
        if is_aligned(out) and out.stride() == (plan.shape[1], 1):
            self._without_grad(plan, args, out)
        else:
            out.detach().copy_(self._without_grad(plan, args, None))

    def run_accumulate_(self, out: Tensor, *args: Any) -> None:
        """Add the fp32 product to ``out``."""
        whole = self._whole(args)
        plan = self._plan(whole)
        _check_out("out", out, args[0], plan.shape, torch.float32)
        out.detach().add_(self._without_grad(plan, whole, None))

    def _without_grad(self, plan: Plan, args: tuple[Any, ...], out: Tensor | None) -> Tensor:
        """Multiply as a compiled kernel does: the op has no gradient rule."""
        if not torch.is_grad_enabled():
            return self._multiply(plan, args, out)
        torch.set_grad_enabled(False)  # half the time of a `with torch.no_grad()`
        try:
            return self._multiply(plan, args, out)
        finally:
            torch.set_grad_enabled(True)

    def _multiply(self, plan: Plan, args: tuple[Any, ...], out: Tensor | None) -> Tensor:
        shape, route, direct, library = plan
        try:
            if direct is not None:
                return direct(*args, out=out)
            if out is None:
                out = args[0].new_empty(shape, dtype=args[self._count + 1])
            route(out, *args)
        except RuntimeError as error:
            if not library or not _is_refusal(error):
                raise
            _warn_of_refusal(self.name, tuple(args[0].shape), shape, error)
            second = Plan(shape, self.second or self.routes["dequantize"])
            self._plans[self._key(args)] = second  # for now and later
            return self._multiply(second, args, out)
        return out

    def _plan(self, args: tuple[Any, ...]) -> Plan:
        """Return the plan of a call; raises for what the op does not take.

        What was found once is kept: the checks of a call take longer than the call of a GEMM.
        """
        key = self._key(args)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan_of(self.check(*args), args)
        return plan

    def _key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all that a plan depends on; the host's time of a call is spent here."""
        key: list[Any] = [config.gemm, *args[self._count + 1 :]]
        for t in args[: self._count + 1]:
            if t is None:
                key.append(None)
            else:
                place = t.data_ptr() % ALIGNMENT
                key += t.shape, t.stride(), t.dtype, t.get_device(), place
        return tuple(key)

    def _plan_of(self, shape: tuple[int, int], args: tuple[Any, ...]) -> Plan:
        if 0 in (*args[0].shape, *args[1].shape):
            return Plan(shape, self._nothing)
        name, _ = self.choose(*args)
        if name == "reference":
            return Plan(shape, lambda out, *args: out.copy_(self.reference(*args)))
        if name != "library":
            return Plan(shape, self.routes[name])
        return Plan(shape, self.routes[name], self.direct(*args), config.gemm != "library")

    def _nothing(self, out: Tensor, *args: Any) -> None:
        """Sum no products (K = 0), or write no numbers."""
        bias = args[self._count]
        out.zero_() if bias is None else out.copy_(bias)

    def forget(self) -> None:
        """Drop the plans: for tests, which change what the device is."""
        self._plans.clear()

    def _reference_accumulate_(self, out: Tensor, *args: Any) -> None:
        out.add_(self.reference(*self._whole(args)))

    def _inputs_accumulate_(self, device: torch.device) -> Iterator[tuple[Any, ...]]:
        for args in self.inputs(device):
            out = torch.ones(self.check(*args), device=device)
            yield (out, *args[: self._count], *args[self._count + 2 :])


def _warn_of_refusal(
    op: str, a: tuple[int, ...], out: tuple[int, ...], error: RuntimeError
) -> None:
    warnings.warn(
        f"torch's GEMM refuses inductor_ext::{op} with codes {a} and a result {out}, which another "
        f"route takes (docs/gemm.md): {str(error).splitlines()[0]}",
        InductorExtWarning,
        stacklevel=2,
    )


def _is_refusal(error: RuntimeError) -> bool:
    """Return whether the library has no kernel for the sizes, which it says before any launch.

    cuBLASLt has none for rows of FP8 with a large K and a small M on an H100: pytorch/ao#4582.
    """
    return "NOT_SUPPORTED" in str(error) or isinstance(error, NotImplementedError)


def _check_out(
    name: str, out: Tensor, a: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    check_tensor(name, out)
    check_dtype(name, out.dtype, (dtype,))
    check_same_device(name, out, "a", a)
    if out.dim() != 2 or out.shape[0] != shape[0] or out.shape[1] != shape[1]:
        raise ValueError(f"`{name}` must have the shape {shape}, got {tuple(out.shape)}")
    steps = zip(out.shape, out.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in steps):
        raise ValueError(f"`{name}` must not be expanded: it is written to")


def check_operands(
    a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, ...], **others: Tensor | None
) -> tuple[int, int]:
    """Raise unless ``a`` (M, K) and ``b`` (N, K) are codes that multiply; return (M, N).

    Args:
        dtypes: what the codes may be.
        others: tensors that must be on the device of ``a``.
    """
    for name, matrix in (("a", a), ("b", b)):
        check_tensor(name, matrix)
        check_dtype(name, matrix.dtype, dtypes)
        if matrix.dim() != 2:
            raise ValueError(f"`{name}` must have 2 dimensions, got {matrix.dim()}")
    for name, tensor in (("b", b), *others.items()):
        if tensor is not None:
            check_tensor(name, tensor)
            check_same_device(name, tensor, "a", a)
    check_same_k(a.shape[1], b.shape[1])
    check_not_both_e5m2(a, b)
    return a.shape[0], b.shape[0]


def check_same_k(k_of_a: int, k_of_b: int) -> None:
    """Raise ValueError unless the operands have as many elements to sum."""
    if k_of_a != k_of_b:
        raise ValueError(f"`b` must have the K of `a`, {k_of_a}, got {k_of_b}")


def check_not_both_e5m2(a: Tensor, b: Tensor) -> None:
    """Raise TypeError for two float8_e5m2 operands."""
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError("`a` and `b` must not both be float8_e5m2: no GPU multiplies them")


def check_result(bias: Tensor | None, n: int, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is wide and ``bias`` is None or (N,) of it."""
    check_dtype("dtype", dtype, INPUT_DTYPES)
    if bias is not None:
        check_dtype("bias", bias.dtype, (dtype,))
        if bias.dim() != 1 or bias.shape[0] != n:
            raise ValueError(f"`bias` must have the shape ({n},), got {tuple(bias.shape)}")


def check_block_scale(
    name: str,
    scale: Tensor,
    dtype: torch.dtype,
    codes: tuple[int, int],
    block: tuple[int, int],
    layout: str,
    tiled: bool,
) -> None:
    """Raise unless ``scale`` is what quantizing (rows, K) to such codes gives.

    Args:
        codes: rows and K of the operand.
        block: (1, G) or (G, G), what shares a scale.
        layout: "plain" or "gemm".
        tiled: whether "gemm" means cuBLASLt's tiles of 128 x 4, a scale for every row; else it is
            column-major for (1, G) and padded to a multiple of 4 along K for (G, G).
    """
    check_choice(f"layout_{name[-1]}", layout, LAYOUTS)
    check_dtype(name, scale.dtype, (dtype,))
    rows, along_k = ceil_div(codes[0], block[0]), ceil_div(codes[1], block[1])
    if layout == "gemm" and tiled:
        rows, along_k = round_up(codes[0], 128), round_up(along_k, 4)
    elif layout == "gemm" and block[0] == block[1]:
        along_k = round_up(along_k, 4)
    if scale.dim() != 2 or scale.shape[0] != rows or scale.shape[1] != along_k:
        raise ValueError(
            f"`{name}` must have the shape {(rows, along_k)}, got {tuple(scale.shape)}"
        )
