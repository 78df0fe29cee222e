"""Tensors that 32 bits cannot count, on a card: eager and compiled against the references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import pytest
import torch
from blocks import op_of, reference_of
from card import FAMILIES, flat
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry
from inductor_ext.decompositions import fp8_block, mxfp8
from inductor_ext.decompositions.blocks import swizzle
from inductor_ext.testing import require_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("roomy")]

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Shape = tuple[int, ...]
Tensors = tuple[Tensor | None, ...]

OVER = 1 << 31
CHUNK = 1 << 26
FLAT = (OVER + 4096 + 3,)
ODD = (OVER // 4099 + 3, 4099)
EVEN = (OVER // 4096 + 256, 4096)
RAGGED = (OVER // 4160 // 128 * 128 + 128 + 32, 4160)  # in blocks of 128, not in those of 32
NARROW = (OVER // 16 + (1 << 16), 16)
WIDE = (48, OVER // 48 // 16 * 16 + 4096)


# ---- inputs ----


def random(shape: Shape) -> Tensor:
    """Random bf16 values, the largest of them in the last place."""
    torch.manual_seed(0)
    x = torch.empty(shape, dtype=BF16, device="cuda").normal_()
    x.view(-1)[1234567::7654321] = float("nan")
    x.view(-1)[-1] = -8.5
    return x


def plain(shape: Shape) -> Tensors:
    return (random(shape),)


def largest_last(shape: Shape) -> Tensors:
    """The largest value of each column in its last place."""
    x = random(shape)
    x[-1] = -8.5
    return (x,)


def scaled(shape: Shape) -> Tensors:
    return random(shape), torch.tensor(37.7, device="cuda")


def nvfp4(shape: Shape) -> Tensors:
    return random(shape), torch.tensor(6.5, device="cuda")


def nvfp4_twice(shape: Shape) -> Tensors:
    return (*nvfp4(shape), torch.tensor(5.5, device="cuda"))


def any_bytes(shape: Shape, low: int = 0, high: int = 256) -> Tensor:
    torch.manual_seed(0)
    return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(low, high)


def fp8_codes(shape: Shape) -> Tensors:
    return any_bytes(shape).view(E4M3), torch.tensor(0.37, device="cuda")


def scales(rows: int, columns: int) -> Tensor:
    return torch.empty((rows, columns), device="cuda").uniform_(0.001, 10)


def block_codes(shape: Shape) -> Tensors:
    return any_bytes(shape).view(E4M3), scales(shape[0], shape[1] // 32)


def mx_codes(shape: Shape) -> Tensors:
    return any_bytes(shape).view(E4M3), any_bytes((shape[0], shape[1] // 32), 100, 140)


def nvfp4_codes(shape: Shape) -> Tensors:
    exponents = any_bytes((shape[0], shape[1] // 16), 0, 127).view(E4M3)
    return any_bytes((shape[0], shape[1] // 2)), exponents, torch.tensor(3.0, device="cuda")


def int8_codes(group: int) -> Callable[[Shape], Tensors]:
    def make(shape: Shape) -> Tensors:
        count = -(-shape[1] // group) if group else 1
        return any_bytes(shape).view(torch.int8), scales(shape[0], count)

    return make


def int4_codes(zero: bool) -> Callable[[Shape], Tensors]:
    def make(shape: Shape) -> Tensors:
        count = shape[0], shape[1] // 64
        zeros = any_bytes(count, 0, 16) if zero else None
        return any_bytes((shape[0], shape[1] // 2)), scales(*count), zeros

    return make


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """A call on a huge tensor, which is compared with the reference piece by piece.

    Attributes:
        op: its name.
        shape: of the elements.
        make: gives the tensors, which come first among the arguments.
        constants: the other arguments.
        axes: for each result, the axis along which the pieces lie; None: a result of the whole.
        cut: the axis of the elements along which they are cut.
        compiled: whether it is compiled as well.
    """

    op: str
    shape: Shape
    make: Callable[[Shape], Tensors]
    constants: tuple[Any, ...]
    axes: tuple[int | None, ...]
    cut: int = 0
    compiled: bool = False

    def pieces(self, tensors: Tensors, start: int, stop: int) -> Tensors:
        """Return the arguments of a piece; the last place is added where a result is a whole's."""
        length = self.shape[self.cut]

        def piece(t: Tensor | None) -> Tensor | None:
            if t is None or t.dim() <= self.cut or t.shape[self.cut] != length:
                return t
            part = t.narrow(self.cut, start, stop - start)
            last = t.narrow(self.cut, length - 1, 1)
            return torch.cat([part, last], self.cut) if None in self.axes else part

        return tuple(piece(t) for t in tensors)

    def part(self, t: Tensor, axis: int | None, start: int, stop: int) -> Tensor:
        """Return what a piece gave, of the whole result."""
        if axis is None:
            return t
        each = -(-self.shape[self.cut] // t.shape[axis])  # 1, or the elements of a block or byte
        return t.narrow(axis, start // each, -(-(stop - start) // each)).clone()


BOTH = (0, 0, 1, 1)
CASES: dict[str, Case] = {
    "fp8 static": Case(
        "quantize_fp8_static", FLAT, scaled, (E4M3,), (0, None, None), compiled=True
    ),
    "fp8 tensor": Case("quantize_fp8_tensor", FLAT, plain, (E4M3,), (0, None), compiled=True),
    "fp8 rows": Case("quantize_fp8_row", EVEN, plain, (E4M3,), (0, 0), compiled=True),
    "fp8 odd rows": Case("quantize_fp8_row", ODD, plain, (E4M3,), (0, 0), compiled=True),
    "fp8 one row": Case("quantize_fp8_row", (1, *FLAT), plain, (E4M3,), (1, None), cut=1),
    "fp8 back": Case("dequantize_fp8", FLAT, fp8_codes, (BF16,), (0,), compiled=True),
    "fp8 static both": Case(
        "quantize_fp8_static_both", RAGGED, scaled, (E4M3,), (0, 1, None, None)
    ),
    "fp8 tensor both": Case("quantize_fp8_tensor_both", RAGGED, plain, (E4M3,), (0, 1, None)),
    "fp8 columns": Case("quantize_fp8_column", RAGGED, largest_last, (E4M3,), (0, None)),
    "fp8 columns turned": Case(
        "quantize_fp8_column", RAGGED, largest_last, (E4M3, True), (1, None)
    ),
    "fp8 1x128": Case("quantize_fp8_block", RAGGED, plain, (E4M3, 1, 128), (0, 0), compiled=True),
    "fp8 128x1": Case(
        "quantize_fp8_block", RAGGED, plain, (E4M3, 128, 1, True), (1, 1), compiled=True
    ),
    "fp8 128x128": Case(
        "quantize_fp8_block", RAGGED, plain, (E4M3, 128, 128), (0, 0), compiled=True
    ),
    "fp8 blocks both": Case(
        "quantize_fp8_block_both", RAGGED, plain, (E4M3, 128, False), BOTH, compiled=True
    ),
    "fp8 blocks back": Case(
        "dequantize_fp8_block", RAGGED, block_codes, (1, 32, BF16), (0,), compiled=True
    ),
    "mx 32x1": Case("quantize_mxfp8", RAGGED, plain, (E4M3, 32, 1), (0, 0), compiled=True),
    "mx both": Case("quantize_mxfp8_both", RAGGED, plain, (E4M3, False), BOTH, compiled=True),
    "mx both, not turned": Case(
        "quantize_mxfp8_both", RAGGED, plain, (E4M3, False, False), (0, 0, 0, 0)
    ),
    "mx back": Case("dequantize_mxfp8", RAGGED, mx_codes, (1, 32, BF16), (0,), compiled=True),
    "amax": Case("amax", FLAT, plain, (), (None,)),
    "amax rows": Case("amax_row", ODD, plain, (), (0,)),
    "int8 tensor": Case("quantize_int8_tensor", FLAT, plain, (), (0, None)),
    "int8 rows": Case("quantize_int8_row", EVEN, plain, (), (0, 0)),
    "int8 odd rows": Case("quantize_int8_row", ODD, plain, (), (0, 0)),
    "int8 groups": Case("quantize_int8_group", EVEN, plain, (128,), (0, 0)),
    "int8 ragged groups": Case("quantize_int8_group", ODD, plain, (128,), (0, 0)),
    "int8 back": Case("dequantize_int8", ODD, int8_codes(0), (0, BF16), (0,)),
    "int8 groups back": Case("dequantize_int8", ODD, int8_codes(128), (128, BF16), (0,)),
    "int4 symmetric": Case("quantize_int4_symmetric", EVEN, plain, (64,), (0, 0)),
    "int4 asymmetric": Case("quantize_int4_asymmetric", EVEN, plain, (64,), (0, 0, 0)),
    "int4 symmetric back": Case("dequantize_int4", EVEN, int4_codes(False), (64, BF16), (0,)),
    "int4 asymmetric back": Case("dequantize_int4", EVEN, int4_codes(True), (64, BF16), (0,)),
    "nvfp4 rows": Case("quantize_nvfp4", EVEN, nvfp4, (1, 16), (0, 0), compiled=True),
    "nvfp4 narrow": Case("quantize_nvfp4", NARROW, nvfp4, (1, 16), (0, 0), compiled=True),
    "nvfp4 columns": Case("quantize_nvfp4", EVEN, nvfp4, (16, 1, True), (1, 1)),
    "nvfp4 wide": Case("quantize_nvfp4", WIDE, nvfp4, (16, 1, True), (0, 0), cut=1),
    "nvfp4 both": Case("quantize_nvfp4_both", EVEN, nvfp4_twice, (True,), BOTH),
    "nvfp4 amax": Case("amax_hadamard", EVEN, largest_last, (False,), (None,)),
    "nvfp4 back": Case("dequantize_nvfp4", EVEN, nvfp4_codes, (1, 16, BF16), (0,)),
}


def ways(case: Case) -> list[tuple[str, Callable[..., Any]]]:
    """The op in eager mode and, where the case wants it, compiled with the plugin."""
    op = op_of(case.op)

    def call(*tensors: Tensor) -> Any:
        return op(*tensors, *case.constants)

    def compiled(*tensors: Tensor) -> Any:
        torch.compiler.reset()
        with (
            ixt.config.patch(enabled=True),
            torch.compiler.config.patch(force_disable_caches=True),
        ):
            registry.clear_records()
            result = torch.compile(call, fullgraph=True, dynamic=False)(*tensors)
            assert [r.outcome for r in registry.records()] == ["lowered"]
            return result

    return [("eager", call), ("compiled", compiled)][: 2 if case.compiled else 1]


@pytest.mark.parametrize("name", CASES)
def test_beyond_2_to_the_31(name: str) -> None:
    case = CASES[name]
    elements, length = 1, case.shape[case.cut]
    for size in case.shape:
        elements *= size
    assert elements > OVER
    step = max(1, CHUNK * length // elements // 128) * 128
    tensors = case.make(case.shape)
    for way, run in ways(case):
        results = flat(run(*tensors))
        for start in range(0, length, step):
            stop = min(start + step, length)
            want = flat(reference_of(case.op)(*case.pieces(tensors, start, stop), *case.constants))
            got, expected = [], []
            for result, one, axis in zip(results, want, case.axes, strict=True):
                got.append(case.part(result, axis, start, stop))
                same = axis is None
                expected.append(one if same else one.narrow(axis, 0, got[-1].shape[axis]).clone())
            exact = [one.element_size() > 1 for one in expected]
            require_equal(case.op, f"{way}, from {start}", got, expected, nan_equal=exact)
        del results, got


def test_mx_scales_for_a_gemm() -> None:
    """Those of the plain layout, in their places."""
    x, op = random(RAGGED), op_of("quantize_mxfp8")
    for transposed in (False, True):
        block = (32, 1) if transposed else (1, 32)
        plain = op(x, E4M3, *block, transposed, "ceil", "plain")
        gemm = op(x, E4M3, *block, transposed, "ceil", "gemm")
        require_equal("mx", "swizzled", (gemm[0], gemm[1]), (plain[0], swizzle(plain[1])))
    few = reference_of("quantize_mxfp8")(x[:128], E4M3, 1, 32)[1]
    require_equal("mx", "plain", op(x, E4M3, 1, 32)[1][:128].clone(), few)


@pytest.mark.parametrize("shape", [EVEN, WIDE])
def test_nvfp4_draws_for_a_gemm(shape: Shape) -> None:
    """Both orientations at once draw the numbers that the single one draws."""
    x, amax = random(shape), torch.tensor(6.5, device="cuda")
    rng = torch.tensor([1, 2], device="cuda")
    both = op_of("quantize_nvfp4_both")(x, amax, amax, True, "gemm", False, rng)
    again = op_of("quantize_nvfp4")(x, amax, 16, 16, True, "gemm", False, rng)
    require_equal("both", "eager", both[2:], again)


@pytest.mark.parametrize("strides", [(1 << 27, 1), (1 << 27, 1048573)])
@pytest.mark.parametrize("name", FAMILIES)
def test_far_apart(name: str, strides: tuple[int, int]) -> None:
    """Few elements, far apart: the offsets overflow 32 bits, not the count."""
    host = cases.values("wide", 32 * 128, BF16).view(32, 128)
    room = torch.zeros(32 << 27, dtype=BF16, device="cuda")
    x = room.as_strided((32, 128), strides)
    x.copy_(host)
    for call in FAMILIES[name].calls(host):
        if call.args[0] is host:
            args = (x, *(a.cuda() if isinstance(a, Tensor) else a for a in call.args[1:]))
            call.check(FAMILIES[name].op(call.op)(*args), "eager, far apart")


@pytest.mark.parametrize("shape", [(4104, 8448), (8192, 4128), (33000, 1032)])
def test_scales_of_large_tensors(shape: tuple[int, int]) -> None:
    """Beyond 2**25 elements the scales of both sides take a second kernel."""
    x = random(shape)
    assert x.numel() > 1 << 25
    got = op_of("quantize_fp8_block_both")(x, E4M3, 128, False)
    want = fp8_block.quantize_fp8_block_both(x, E4M3, 128, False)
    require_equal("fp8", "both", got, want)
    for transposed in (False, True):
        got = op_of("quantize_mxfp8_both")(x, E4M3, False, transposed)
        want = mxfp8.quantize_mxfp8_both(x, E4M3, False, transposed)
        require_equal("mx", f"both, transposed={transposed}", got, want)
