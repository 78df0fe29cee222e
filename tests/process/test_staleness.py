"""No cache, in another process, ever gives back code of another mode or of another source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import toys
from toys import OPAQUE

Step = Callable[..., dict[str, Any]]


def is_hit(result: dict[str, Any], graphs: int = 2) -> bool:
    """Every graph came out of AOTAutograd's cache, and nothing was compiled."""
    return result["aot_hit"] == graphs and not result["aot_miss"] and not result["fx_miss"]


def is_miss(result: dict[str, Any], graphs: int = 2) -> bool:
    return result["aot_miss"] == graphs and not result["aot_hit"] and not result["fx_hit"]


@pytest.mark.contract
def test_off_on_off_on(child: Step, tmp_path: Path) -> None:
    package = toys.write(tmp_path)
    ops = ["lowered", "by_name", "decomposed"]
    off = {"lowered": [2.0, 2.0], "by_name": [2.0, 2.0], "decomposed": [2.0, 2.0]}
    on = {"lowered": [3.0, 3.0], "by_name": [3.0, 3.0], "decomposed": [5.0, 5.0]}

    def run(enabled: bool) -> dict[str, Any]:
        return child("forward", package=package, ops=ops, enabled=enabled)

    first_off, first_on, second_off, second_on = run(False), run(True), run(False), run(True)
    assert first_off["factors"] == second_off["factors"] == off
    assert first_on["factors"] == second_on["factors"] == on
    assert first_off["calls"] == second_off["calls"] == dict.fromkeys(ops, 2)
    assert first_on["calls"] == second_on["calls"] == {}
    assert is_miss(first_off, 6)
    assert is_miss(first_on, 6)
    assert is_hit(second_off, 6), second_off
    assert is_hit(second_on, 6), second_on


CHANGES: dict[str, tuple[str, str, float, float, float | str]] = {
    # changed source: (op, what toys.write changes, factor before, after, the change)
    "lowering": ("lowered", "lowering", 3.0, 17.0, 17.0),
    "lowering by name": ("by_name", "lowering", 3.0, 17.0, 17.0),
    "decomposition": ("decomposed", "decomposition", 5.0, 19.0, 19.0),
    "version": ("versioned", "version", 11.0, 13.0, "2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_source(child: Step, tmp_path: Path, change: str) -> None:
    op, what, before, after, value = CHANGES[change]
    old = toys.write(tmp_path / "old")
    new = toys.write(tmp_path / "new", **{what: value})

    first = child("forward", package=old, ops=[op], enabled=True)
    changed = child("forward", package=new, ops=[op], enabled=True)
    again = child("forward", package=old, ops=[op], enabled=True)
    assert first["factors"] == again["factors"] == {op: [before, before]}
    assert changed["factors"] == {op: [after, after]}
    assert is_miss(changed), changed
    assert is_hit(again), again


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_changed_autograd_formula(child: Step, tmp_path: Path, enabled: bool) -> None:
    """Also with the plugin off: the rule is ours to install, so its staleness is ours to avoid."""
    old, new = toys.write(tmp_path / "old"), toys.write(tmp_path / "new", gradient=23.0)
    factor = 3.0 if enabled else OPAQUE

    first = child("backward", package=old, enabled=enabled)
    changed = child("backward", package=new, enabled=enabled)
    again = child("backward", package=old, enabled=enabled)
    assert first["factors"] == changed["factors"] == again["factors"] == [factor, factor]
    assert first["gradients"] == again["gradients"] == [7 * factor, 7 * factor]
    assert changed["gradients"] == [23 * factor, 23 * factor]
    assert is_hit(again), again


def test_numerics_are_not_shared(child: Step, tmp_path: Path) -> None:
    package = toys.write(tmp_path)

    def run(numerics: str) -> dict[str, Any]:
        return child("forward", package=package, ops=["fast"], enabled=True, numerics=numerics)

    exact, fast, again = run("exact"), run("fast"), run("exact")
    assert exact["factors"] == again["factors"] == {"fast": [3.0, 3.0]}
    assert fast["factors"] == {"fast": [100.0, 100.0]}
    assert is_hit(again), again


def test_disabled_op_is_not_shared(child: Step, tmp_path: Path) -> None:
    package = toys.write(tmp_path)

    def run(disabled: list[str]) -> dict[str, Any]:
        return child(
            "forward", package=package, ops=["lowered"], disabled_ops=disabled, enabled=True
        )

    on, off, again = run([]), run(["ixt_toy::lowered"]), run([])
    assert on["factors"] == again["factors"] == {"lowered": [3.0, 3.0]}
    assert off["factors"] == {"lowered": [OPAQUE, OPAQUE]}
    assert is_hit(again), again


def test_strict_does_not_take_a_lenient_result(child: Step, tmp_path: Path) -> None:
    package = toys.write(tmp_path)
    lenient = child("forward", package=package, ops=["lowered"], enabled=True)
    strict = child("forward", package=package, ops=["lowered"], enabled=True, strict=True)
    assert lenient["factors"] == strict["factors"] == {"lowered": [3.0, 3.0]}
    assert is_miss(strict), strict


@pytest.mark.contract
@pytest.mark.parametrize("forward_on", [True, False], ids=["on-off", "off-on"])
def test_toggle_between_forward_and_backward(child: Step, tmp_path: Path, forward_on: bool) -> None:
    """The mixed pair is right in its process and no other process is given it."""
    package = toys.write(tmp_path)
    factor, other = (3.0, OPAQUE) if forward_on else (OPAQUE, 3.0)

    mixed = child(
        "backward", package=package, enabled=forward_on, toggle={"enabled": not forward_on}
    )
    assert mixed["factors"] == [factor, factor]
    assert mixed["gradients"] == [7 * other, 7 * other]
    for enabled, value in ((forward_on, factor), (not forward_on, other)):
        pure = child("backward", package=package, enabled=enabled)
        assert pure["factors"] == [value, value]
        assert pure["gradients"] == [7 * value, 7 * value], (enabled, pure)
    assert is_hit(child("backward", package=package, enabled=forward_on))


@pytest.mark.contract
def test_our_own_ops(child: Step) -> None:
    off, on = child("quantize", enabled=False), child("quantize", enabled=True)
    off_again, on_again = child("quantize", enabled=False), child("quantize", enabled=True)
    assert off["values"] == on["values"] == off_again["values"] == on_again["values"]
    assert off["values"][0] == off["values"][1]
    assert (off["outcomes"], on["outcomes"]) == ([], ["lowered"] * 4)
    assert is_miss(on), on
    assert is_hit(off_again), off_again
    assert is_hit(on_again), on_again


def test_fast_numerics_of_our_own_ops(child: Step) -> None:
    exact = child("quantize", enabled=True, numerics="exact")
    fast = child("quantize", enabled=True, numerics="fast")
    again = child("quantize", enabled=True, numerics="exact")
    assert exact["values"] == again["values"]
    assert fast["values"] != exact["values"]  # its bf16 results are not rounded before .float()
    assert is_miss(fast), fast
