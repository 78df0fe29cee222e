"""Fewer instructions for a producer's element, with the bits of Inductor's own code.

What a tile costs beyond its traffic is the producer's arithmetic.  Triton subtracts from zero to
negate, and its ``/`` first looks whether the divisor is very large or very small, which takes four
instructions.  The divisor of SiLU, 1 + exp(-x), cannot be small.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_ext._compat import WrapperHandler, inductor_config

# A quarter of both keeps the reciprocal of a large divisor a normal number: no bit is lost.
_OVER_AT_LEAST_ONE = (
    "{ .reg .f32 a, b; mul.rn.f32 a, $1, 0f3E800000; mul.rn.f32 b, $2, 0f3E800000;"
    " rcp.approx.ftz.f32 b, b; mul.rn.f32 $0, a, b; }"
)


def quick(inner: Any) -> Any:
    """Return a handler of ops that writes negations and SiLU's division the short way."""

    class Quick(WrapperHandler):
        def __init__(self) -> None:
            super().__init__(inner)
            self.ones: set[str] = set()
            self.positive: set[str] = set()
            self.at_least_one: set[str] = set()

        def constant(self, value: Any, dtype: torch.dtype) -> Any:
            result = self._inner.constant(value, dtype)
            if value == 1:
                self.ones.add(str(result))
            return result

        def exp(self, x: Any) -> Any:
            result = self._inner.exp(x)
            self.positive.add(str(result))
            return result

        def add(self, x: Any, y: Any) -> Any:
            result, names = self._inner.add(x, y), {str(x), str(y)}
            if names & self.ones and names & self.positive:
                self.at_least_one.add(str(result))
            return result

        def neg(self, x: Any) -> Any:
            if getattr(x, "dtype", None) != torch.float32:
                return self._inner.neg(x)
            return self._inner.mul(x, self._inner.constant(-1.0, torch.float32))

        def truediv(self, x: Any, y: Any) -> Any:
            exact = inductor_config.eager_numerics.division_rounding
            if exact or str(y) not in self.at_least_one:
                return self._inner.truediv(x, y)
            return self._inner.inline_asm_elementwise(
                x, y, asm=_OVER_AT_LEAST_ONE, constraints="=f,f,f", dtype=torch.float32,
                is_pure=True, pack=1,
            )  # fmt: skip

    return Quick()
