"""Fingerprints of source code: what a compile cache must know and does not."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ._version import __version__
from .errors import RegistrationError


def source_of(
    name: str, choices: str, versioned: bool, *functions: Callable[..., Any] | str | None
) -> str:
    """Return a digest of an op's functions: the whole source file of each, and ``choices``.

    The whole file, because a lowering calls helpers beside it.  Where a source cannot be read
    (an interactive session, a compiled module) a ``version`` among the choices must speak for it.
    """
    digest = hashlib.sha256(f"{name}\0{choices}".encode())
    for function in functions:
        if function is None:
            continue
        label, text = _read(function)
        if text is None and not versioned:
            raise RegistrationError(
                f"{name}: the source of {label} cannot be read, so compile caches would not "
                'notice a change of it; pass version="..." and change it with the code'
            )
        digest.update(f"\0{label}\0".encode() + (text or b""))
    return digest.hexdigest()[:32]


def _read(function: Callable[..., Any] | str) -> tuple[str, bytes | None]:
    if isinstance(function, str):
        module = function.partition(":")[0]
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise RegistrationError(f"there is no module {module!r} (of {function!r})")
        return function, _file(spec.origin)
    target = inspect.unwrap(function)
    label = f"{target.__module__}:{getattr(target, '__qualname__', repr(target))}"
    try:
        return label, _file(inspect.getsourcefile(target))
    except TypeError:
        return label, None


def _file(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError:
        return None


@cache
def package_digest() -> str:
    """Return a digest of the plugin itself: its version and every Python file it consists of."""
    digest = hashlib.sha256(__version__.encode())
    for folder in _package_folders():
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def _package_folders() -> list[Path]:
    """Return the folders of the plugin's own code (a package's __path__ may hold more)."""
    folders = [Path(__file__).parent]
    for package in ("inductor_ext.lowerings", "inductor_ext.decompositions"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    return folders
