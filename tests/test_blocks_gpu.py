"""What only a card can show of the block formats: huge tensors, streams, graphs, determinism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import blocks
import cases
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry
from inductor_ext.decompositions.blocks import swizzle
from inductor_ext.testing import require_equal

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
COLUMNS = 4096 + 64
ROWS = (1 << 31) // COLUMNS // 128 * 128 + 128 + 32  # beyond what 32 bits can count, exact for 32
STEP = 128 * 128


@pytest.fixture
def roomy() -> Iterator[None]:
    """Skip unless the card has 40 GiB, and leave nothing behind."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs a card with 40 GiB")
    yield
    torch.cuda.empty_cache()


def huge() -> Tensor:
    torch.manual_seed(0)
    x = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 1 << 31
    x.view(-1)[1234567::7654321] = float("nan")
    x[-1, -1] = 77.0
    return x


def ways(op: Callable[..., Any], *constants: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The op in eager mode, and compiled with the plugin."""
    torch.compiler.reset()

    def call(*tensors: Tensor) -> Any:
        return op(*tensors, *constants)

    def compiled(*tensors: Tensor) -> Any:
        with (
            ixt.config.patch(enabled=True),
            torch.compiler.config.patch(force_disable_caches=True),
        ):
            registry.clear_records()
            result = torch.compile(call, fullgraph=True, dynamic=False)(*tensors)
            assert [r.outcome for r in registry.records()] == ["lowered"]
            return result

    return [("eager", call), ("compiled", compiled)]


# name: (op, constants, which results run along M in their last dimension)
HUGE: dict[str, tuple[str, tuple[Any, ...], tuple[bool, ...]]] = {
    "fp8 1x128": ("quantize_fp8_block", (E4M3, 1, 128), (False, False)),
    "fp8 128x1": ("quantize_fp8_block", (E4M3, 128, 1, True), (True, True)),
    "fp8 128x128": ("quantize_fp8_block", (E4M3, 128, 128), (False, False)),
    "fp8 both": ("quantize_fp8_block_both", (E4M3, 128, False), (False, False, True, True)),
    "mx both": ("quantize_mxfp8_both", (E4M3, False), (False, False, True, True)),
    "mx 32x1": ("quantize_mxfp8", (E4M3, 32, 1), (False, False)),
}


@pytest.mark.parametrize("name", HUGE)
def test_beyond_2_to_the_31(roomy: None, name: str) -> None:
    """Compared with the reference, some rows of blocks at a time."""
    op, constants, along_m = HUGE[name]
    x = huge()
    for way, run in ways(blocks.op_of(op), *constants):
        results = run(x)
        assert len(results) == len(along_m)
        for first in range(0, ROWS, STEP):
            rows = slice(first, min(first + STEP, ROWS))
            want = blocks.reference_of(op)(x[rows], *constants)
            got = [
                part(result, turned, first, expected)
                for result, turned, expected in zip(results, along_m, want, strict=True)
            ]
            require_equal(name, f"{way}, rows from {first}", got, list(want))
        del results, got


def part(result: Tensor, turned: bool, first: int, expected: Tensor) -> Tensor:
    """Return the piece of a result that belongs to the rows of ``x`` from ``first`` on."""
    axis = 1 if turned else 0
    rows_each = -(-ROWS // result.shape[axis])  # 1, or the rows of a block
    return result.narrow(axis, first // rows_each, expected.shape[axis]).clone()


def test_swizzle_beyond_2_to_the_31(roomy: None) -> None:
    """The scales of a huge tensor for a GEMM: those of the plain layout, in their places."""
    x = huge()
    op, reference = blocks.op_of("quantize_mxfp8"), blocks.reference_of("quantize_mxfp8")
    for transposed in (False, True):
        block = (32, 1) if transposed else (1, 32)
        plain = op(x, E4M3, *block, transposed, "ceil", "plain")
        gemm = op(x, E4M3, *block, transposed, "ceil", "gemm")
        require_equal("mx", "swizzled", (gemm[0], gemm[1]), (plain[0], swizzle(plain[1])))
    few = reference(x[:128], E4M3, 1, 32)[1]
    require_equal("mx", "plain", op(x, E4M3, 1, 32)[1][:128].clone(), few)


@pytest.mark.parametrize("name", ["dequantize_fp8_block", "dequantize_mxfp8"])
def test_dequantize_beyond_2_to_the_31(roomy: None, name: str) -> None:
    codes = torch.empty(ROWS, COLUMNS, dtype=torch.uint8, device="cuda").random_(0, 256)
    shape = ROWS, COLUMNS // 32
    if name == "dequantize_mxfp8":
        scales = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(100, 140)
    else:
        scales = torch.empty(shape, device="cuda").uniform_(0.001, 10)
    for way, run in ways(blocks.op_of(name), 1, 32, torch.bfloat16):
        y = run(codes.view(E4M3), scales)
        for first in range(0, ROWS, STEP):
            rows = slice(first, first + STEP)
            want = blocks.reference_of(name)(
                codes[rows].view(E4M3), scales[rows], 1, 32, torch.bfloat16
            )
            require_equal(name, way, y[rows].clone(), want, nan_equal=True)
        del y


def calls(x: Tensor) -> list[blocks.Call]:
    """Every op of ours, in its layouts, and what undoes it."""
    made = [*blocks.fp8_calls(x, "e4m3", groups=(128,)), *blocks.mx_calls(x, "e4m3")]
    made.append(blocks.dequantize_block(made[0], torch.bfloat16))
    codes = made[0].want[0]
    e = torch.arange(math.prod(x.shape) // 32).view(-1, x.shape[1] // 32)
    made.append(blocks.dequantize_mx(codes, (e % 256).byte().numpy(), 1, 32, torch.bfloat16))
    return made


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def test_deterministic() -> None:
    """1000 repeats of every op, of a size with many blocks and ragged ends of each kind."""
    x = cases.values("wide", 333 * 1056, torch.bfloat16).view(333, 1056)
    for call in calls(x):
        args = call.on("cuda")
        first = as_tuple(blocks.op_of(call.op)(*args))
        call.check(first, "eager, the first time")
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            again = as_tuple(blocks.op_of(call.op)(*args))
            for one, other in zip(again, first, strict=True):
                different += (bits(one) != bits(other)).sum()
        assert int(different) == 0, (call.op, call.args[1:])


def test_other_stream() -> None:
    """The op queues on the current stream: its input is still being written when it is called."""
    x = cases.values("wide", 500 * 1024, torch.bfloat16).view(500, 1024)
    for call in calls(x):
        args = call.on("cuda")
        late = tuple(torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for target, source in zip(late, args, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            got = blocks.op_of(call.op)(*late)
        stream.synchronize()
        call.check(got, "on another stream")


def test_cuda_graph() -> None:
    """Capture and replay on new values: no synchronisation, no allocation outside the pool."""
    one = cases.values("normal", 100 * 1056, torch.bfloat16).view(100, 1056)
    two = cases.values("wide", 100 * 1056, torch.bfloat16, seed=5).view(100, 1056)
    for before, after in zip(calls(one), calls(two), strict=True):
        args, op = before.on("cuda"), blocks.op_of(before.op)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            op(*args)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = op(*args)
        for want in (before, after, before):
            for target, source in zip(args, want.on("cuda"), strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            for _ in range(3):
                graph.replay()
            want.check(result, "replayed")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_other_device() -> None:
    """The kernel runs where its input is, whatever the current device."""
    x = cases.values("wide", 33 * 1024, torch.bfloat16).view(33, 1024)
    for call in calls(x):
        got = as_tuple(blocks.op_of(call.op)(*call.on("cuda:1")))
        call.check(got, "on cuda:1 from cuda:0")
        assert {t.device.index for t in got} == {1}
