"""One call of an op with its true result: what every family's bit tests are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from inductor_ext.testing import require_equal


@dataclass(frozen=True)
class Call:
    """One call of an op and its true result, as CPU tensors."""

    op: str
    args: tuple[Any, ...]
    want: tuple[Tensor, ...]
    label: str = ""

    contiguous: ClassVar[bool] = True  # whether every result of the family is

    def nan_equal(self) -> bool | list[bool]:
        """Codes are exact, NaN included; a wider NaN keeps no particular payload."""
        return [w.element_size() > 1 for w in self.want]

    def on(self, device: str) -> tuple[Any, ...]:
        return tuple(on_device(a, device) if isinstance(a, Tensor) else a for a in self.args)

    def check(self, got: Any, way: str) -> None:
        """Compare a result with the oracle's: dtype, shape, strides, and every bit."""
        results = got if isinstance(got, tuple) else (got,)
        constants = [a for a in self.args if not isinstance(a, Tensor)]
        require_equal(
            self.op,
            f"{way} against the oracle",
            results,
            self.want,
            args=self.args,
            nan_equal=self.nan_equal(),
            sample=f"{self.label} {constants}",
            same_device=False,
        )
        assert not self.contiguous or all(r.is_contiguous() for r in results)


def on_device(t: Tensor, device: str) -> Tensor:
    """Copy to a device with the same strides and storage offset."""
    if device == "cpu":
        return t
    storage = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).to(device)
    return torch.empty(0, dtype=t.dtype, device=device).set_(
        storage.untyped_storage(), t.storage_offset(), t.shape, t.stride()
    )
