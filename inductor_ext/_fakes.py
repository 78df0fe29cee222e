"""Move a function, with the tensors and modules it reaches, to a device that is not there."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from ._codegen import unwrap

__all__ = ["Mover", "needs_grad", "reachable"]


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _captured(fn: types.FunctionType) -> Iterator[Any]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(fn.__code__):
        if name in fn.__globals__:
            yield fn.__globals__[name]
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()


def reachable(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: arguments, a module's state, what a function captures."""
    seen = set() if seen is None else seen
    for leaf in pytree.tree_leaves(value):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from itertools.chain(leaf.parameters(), leaf.buffers())
        elif isinstance(leaf, functools.partial):
            yield from reachable((leaf.func, leaf.args, leaf.keywords), seen)
        elif isinstance(leaf, types.MethodType):
            yield from reachable(leaf.__self__, seen)
        elif callable(leaf) and unwrap(leaf) is not leaf:
            yield from reachable(unwrap(leaf), seen)
        elif isinstance(leaf, types.FunctionType) and _is_users(leaf):
            yield from reachable(list(_captured(leaf)), seen)


def _is_users(fn: types.FunctionType) -> bool:
    """Whether to look into a function: not those of torch or of this package."""
    module = (fn.__module__ or "").partition(".")[0]
    return module not in ("torch", "inductor_ext", "functools", "contextlib")


def needs_grad(value: Any) -> bool:
    """Return whether autograd would record an operation on the tensors of this value."""
    return any(tensor.requires_grad for tensor in reachable(value))


class Mover:
    """Copy values with every tensor replaced by a fake CUDA tensor of the same layout.

    Used inside an active fake mode.  Shared tensors stay shared; what holds no tensor is returned
    as it is.  Without ``keep_grad`` nothing requires a gradient any more, which leaves autograd's
    C++ code, and with it the shim, out of the matter.
    """

    def __init__(self, fake_class: Any, keep_grad: bool) -> None:
        self._fake_class, self._keep_grad = fake_class, keep_grad
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # an id is only unique while its object lives
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @contextlib.contextmanager
    def globals_moved(self) -> Iterator[None]:
        """Put what moved functions find in their modules' globals in its place, for a while.

        In place, since Dynamo looks a global up by the name of its module.
        """
        with contextlib.ExitStack() as stack:
            for space, changes in self._globals:
                stack.enter_context(mock.patch.dict(space, changes))
            yield

    def move(self, value: Any) -> Any:
        """Return the value for the fake device."""
        return pytree.tree_map(self._leaf, value)

    def _leaf(self, leaf: Any) -> Any:
        if id(leaf) in self._memo:
            return self._memo[id(leaf)]
        made = self._make(leaf)
        self._alive.append(leaf)
        self._memo[id(leaf)] = made
        return made

    def _make(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        if isinstance(leaf, torch.device):
            return torch.device("cuda", 0)
        if not callable(leaf):
            return leaf
        leaf = unwrap(leaf)
        if isinstance(leaf, torch.nn.Module):
            return self._module(leaf)
        if isinstance(leaf, functools.partial):
            func, args, keywords = self.move((leaf.func, list(leaf.args), dict(leaf.keywords)))
            return functools.partial(func, *args, **keywords)
        if isinstance(leaf, types.MethodType):
            owner = self._leaf(leaf.__self__)
            return leaf if owner is leaf.__self__ else types.MethodType(leaf.__func__, owner)
        if isinstance(leaf, types.FunctionType) and _is_users(leaf):
            return self._function(leaf)
        return leaf

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, self._fake_class) and tensor.device.type == "cuda":
            return tensor
        if tensor.layout != torch.strided:
            raise TypeError(f"only strided tensors can be moved, got {tensor.layout}")
        extent = tensor.storage_offset() + 1
        extent += sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        storage = torch.empty(max(extent, 0), dtype=tensor.dtype, device="cuda")
        offset = tensor.storage_offset() if tensor.numel() else 0
        made = storage.as_strided(tensor.shape, tensor.stride(), offset).detach()
        requires_grad = tensor.requires_grad and self._keep_grad
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=requires_grad)
        return made.requires_grad_() if requires_grad else made

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        # deepcopy takes what its memo has for an object: our fake, and the weights are not copied
        memo: dict[int, Any] = {}
        for part in module.modules():
            state = [vars(part), part._parameters, part._buffers]
            for tensor in pytree.tree_leaves(state):
                if isinstance(tensor, torch.Tensor):
                    memo[id(tensor)] = self._leaf(tensor)
        return copy.deepcopy(module, memo)

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        self._memo[id(fn)] = fn  # ends the recursion of a function that calls itself
        names = {name for name in _global_names(fn.__code__) if name in fn.__globals__}
        moved = {name: self._moved(fn.__globals__[name]) for name in sorted(names)}
        changes = {name: new for name, new in moved.items() if new is not fn.__globals__[name]}
        if changes:
            self._globals.append((fn.__globals__, changes))
        cells = tuple(self._cell(cell) for cell in fn.__closure__ or ())
        defaults, keywords = self._moved(fn.__defaults__), self._moved(fn.__kwdefaults__)
        same = all(old is new for old, new in zip(fn.__closure__ or (), cells, strict=True))
        if same and defaults is fn.__defaults__ and keywords is fn.__kwdefaults__:
            return fn
        made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults, cells)
        made.__kwdefaults__ = keywords
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        made = self._moved(value)
        return cell if made is value else types.CellType(made)

    def _moved(self, value: Any) -> Any:
        """Move, but return the very same container where nothing in it changed."""
        made = self.move(value)
        pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(made), strict=True)
        return value if all(old is new for old, new in pairs) else made
