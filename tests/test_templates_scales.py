"""The PTX that makes FP8's scales, run by a reader of the few instructions it has.

Triton's interpreter runs none of it, and a card is not always there.  The reader rounds as PTX
says; of the approximate reciprocal it takes each result that is allowed, within an ulp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from inductor_ext.lowerings.templates.formulas import Rule, functions

BF16_MAX = torch.finfo(torch.bfloat16).max
RULES = [
    Rule("fp8", False, limit=BF16_MAX),
    Rule("fp8", True, limit=BF16_MAX, pow2=True),
    Rule("fp8", False, limit=65504.0, pow2=True),
    Rule("fp8", True, limit=65504.0),
]


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def number(word: int) -> np.float32:
    return np.uint32(word).view(np.float32)


def fma(a: np.float32, b: np.float32, c: np.float32) -> float:
    """Round once: to odd in double, then to fp32."""
    if not all(map(math.isfinite, (a, b, c))):
        return float(a) * float(b) + float(c)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    rounded = float(exact)
    if Fraction(rounded) != exact and not int(np.float64(rounded).view(np.uint64)) & 1:
        rounded = math.nextafter(rounded, math.inf if exact > rounded else -math.inf)
    return rounded


def reciprocal(ulp: int) -> Callable[[np.float32], np.float32]:
    def rcp(a: np.float32) -> np.float32:
        exact = np.float32(1) / a
        inside = bool(np.isfinite(exact)) and abs(exact) >= 2.0**-125
        return number(bits(exact) + ulp) if inside else np.float32(0) * exact

    return rcp


def execute(text: str, inputs: list[float], ulp: int) -> list[int]:
    """Return the bits of the outputs $0, $1 ... that come before the inputs."""
    rcp = reciprocal(ulp)
    count = 2 * len(inputs)
    words: dict[str, int] = {f"${count + j}": bits(value) for j, value in enumerate(inputs)}
    lines = [line.strip() for line in text.strip("{ }").replace("DONE:", "DONE:;").split(";")]
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        guard = re.match(r"@(!?)(\w+) ", line)
        if guard:
            if bool(words[guard[2]]) == bool(guard[1]):
                continue
            line = line[guard.end() :]
        if not line or line.startswith(".reg") or line == "DONE:":
            continue
        name, _, rest = line.partition(" ")
        if name == "bra":
            at = lines.index(f"{rest}:")
            continue
        target, *operands = [operand.strip() for operand in rest.split(",")]
        given = [words[o] if o in words else int(o.replace("0f", "0x"), 0) for o in operands]
        words[target] = instruction(name, given, rcp)
    return [words[f"${j}"] for j in range(count)]


def instruction(name: str, given: list[int], rcp: Callable[[np.float32], np.float32]) -> int:
    x = [number(word) for word in given]
    kind, _, form = name.partition(".")
    if kind == "setp":
        compare = {"gt.f32": x[0] > x[1], "lt.and.f32": x[0] < x[1], "eq.f32": x[0] == x[1],
                   "le.u32": given[0] <= given[1]}  # fmt: skip
        return int(bool(compare[form]) and (".and" not in form or bool(given[2])))
    whole: dict[str, Callable[[], int]] = {
        "mov": lambda: given[0],
        "and": lambda: given[0] & given[1],
        "sub": lambda: (given[0] - given[1]) % 2**32,
        "max": lambda: max(given),
        "neg": lambda: given[0] ^ 0x80000000,
    }
    if kind in whole:
        return whole[kind]()
    real: dict[str, Callable[[], float]] = {
        "mul": lambda: x[0] * x[1],
        "div": lambda: x[0] / x[1],
        "fma": lambda: fma(*x),
        "rcp": lambda: rcp(x[0]),
    }
    return bits(real[kind]())


def expected(rule: Rule, amax: float) -> tuple[int, int]:
    """Scale and inverse by docs/formats.md."""
    value, largest = np.float32(amax), np.float32(57344 if rule.e5m2 else 448)
    if not 0 < value < math.inf:
        return bits(1.0), bits(1.0)
    scale = largest / value
    if np.isinf(scale):
        scale = np.float32(rule.limit)
    if rule.pow2:
        scale = number(bits(scale) & 0xFF800000)
    return bits(scale), bits(np.float32(1) / scale)


def amaxes(dtype: torch.dtype) -> list[float]:
    """Return what the amax of numbers of ``dtype`` may be."""
    generator = np.random.default_rng(0)
    mantissas = 1 + generator.random(60)
    usual = mantissas * np.exp2(generator.integers(-99, 99, 60))
    named = [0.0, math.inf, math.nan, 1.0, 448.0, 57344.0, 2.0**-149, 2.0**-126, 2.0**-110]
    named += [2.0**-100, 2.0**-101, 2.0**100, 2.0**127, BF16_MAX]
    return torch.tensor([*usual, *named]).to(dtype).tolist()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("ulp", [-1, 0, 1])
@pytest.mark.parametrize("pack", [1, 8])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.name} {'pow2' * r.pow2} {r.limit:g}")
def test_scales(rule: Rule, pack: int, ulp: int) -> None:
    """Usual ones alone, and beside such as take the branch: a scale does not depend on others."""
    text = re.search(r'"(\{ \.reg[^"]*mov\.b32 w[^"]*)"', functions(rule, pack))
    assert text is not None
    values = amaxes(torch.bfloat16 if rule.limit == BF16_MAX else torch.float16)
    values += values[: -len(values) % pack]
    for first in range(0, len(values), pack):
        given = values[first : first + pack]
        got = execute(text[1], given, ulp)
        want = [expected(rule, amax) for amax in given]
        assert got == [scale for scale, _ in want] + [inverse for _, inverse in want], given
