"""What only a card can show of the integer ops: huge tensors, graphs, determinism, the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import ints
import pytest
import torch
from torch import Tensor

from inductor_ext.ops.scaling import update_fp8_scale, update_fp8_scale_
from inductor_ext.testing import bitwise_mismatches, check_op, require_equal

pytestmark = pytest.mark.gpu

CHUNK = 1 << 26
HUGE = (1 << 31) + 4096
CONTRACTS = [*ints.OPS, "update_fp8_scale_"]


@pytest.fixture
def roomy() -> Iterator[None]:
    """Skip unless the card has 40 GiB, and leave nothing behind."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs a card with 40 GiB")
    yield
    torch.cuda.empty_cache()


def _huge(shape: tuple[int, ...]) -> Tensor:
    """Random bf16 values, the largest of them last, beyond what 32 bits can count."""
    torch.manual_seed(0)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    flat = x.view(-1)
    flat[1234567::7654321] = float("nan")
    flat[-5], flat[-1] = -8.5, 7.25
    return x


def _by_chunks(op: str, x: Tensor, results: tuple[Tensor, ...], *options: Any) -> None:
    """Compare rows with the reference, some at a time."""
    step = max(1, CHUNK // x.shape[-1])
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        want = ints.REFERENCES[op](x[part], *options)
        require_equal(op, f"rows from {start}", tuple(r[part].clone() for r in results), want)


@pytest.mark.parametrize("columns", [4096, 4099])
def test_rows_beyond_2_to_the_31(roomy: None, columns: int) -> None:
    x = _huge((HUGE // columns + 2, columns))
    for op, options in (("quantize_int8_row", ()), ("quantize_int8_group", (128,))):
        results = ints.OPS[op](x, *options)
        _by_chunks(op, x, results, *options)
        back = (*options, 0)[0], torch.bfloat16
        wide = ints.OPS["dequantize_int8"](*results, *back)
        step = CHUNK // columns
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            want = ints.REFERENCES["dequantize_int8"](*(r[part] for r in results), *back)
            assert not bitwise_mismatches(wide[part], want).any(), start
        del results, wide
    rows = ints.OPS["amax_row"](x)
    require_equal("amax_row", "huge", rows, ints.REFERENCES["amax_row"](x[:, -columns:]))


@pytest.mark.parametrize("op", ["quantize_int4_symmetric", "quantize_int4_asymmetric"])
def test_int4_beyond_2_to_the_31(roomy: None, op: str) -> None:
    x = _huge((HUGE // 4096 + 2, 4096))
    results = ints.OPS[op](x, 64)
    _by_chunks(op, x, results, 64)
    zero = results[2] if len(results) > 2 else None
    wide = ints.OPS["dequantize_int4"](*results[:2], zero, 64, torch.bfloat16)
    step = CHUNK // 4096
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        parts = [None if t is None else t[part] for t in (*results[:2], zero)]
        want = ints.REFERENCES["dequantize_int4"](*parts, 64, torch.bfloat16)
        assert not bitwise_mismatches(wide[part], want).any(), start


def test_whole_beyond_2_to_the_31(roomy: None) -> None:
    x = _huge((HUGE,))
    assert float(ints.OPS["amax"](x)) == 8.5
    codes, scale = ints.OPS["quantize_int8_tensor"](x)
    assert bool(scale == torch.tensor(8.5, device="cuda") / torch.tensor(127.0, device="cuda"))
    for start in range(0, HUGE, CHUNK):
        part = slice(start, start + CHUNK)
        v = x[part].float()
        want = torch.where(v.isnan(), 0.0, v / scale).round().to(torch.int8)
        assert torch.equal(codes[part], want), start


def test_strided_beyond_2_to_the_31(roomy: None) -> None:
    """Few elements, far apart: the offsets overflow 32 bits, not the count."""
    room = torch.zeros(3 << 30, dtype=torch.bfloat16, device="cuda")
    for strides in ((1 << 30, 1048573), (1 << 30, 1)):
        x = room.as_strided((3, 1024), strides)
        x.copy_(cases.values("wide", 3072, torch.bfloat16).view(3, 1024))
        on_cpu = x.cpu().contiguous()
        for call in (*ints.of_any_shape(on_cpu), *ints.of_groups(on_cpu, 128)):
            call.check(ints.OPS[call.op](x, *call.args[1:]), "eager, far apart")


def _calls(x: Tensor) -> list[ints.Call]:
    calls = [*ints.of_any_shape(x), *ints.of_groups(x, 64)]
    return calls + [back for c in calls for back in ints.dequantizations(c, torch.bfloat16)]


def test_deterministic() -> None:
    """1000 repeats of every op, of a size where many blocks reduce one amax."""
    x = cases.values("wide", 777 * 4096, torch.bfloat16).view(777, 4096)
    for call in _calls(x):
        args = call.on("cuda")
        first = ints.OPS[call.op](*args)
        call.check(first, "eager, the first time")
        firsts = first if isinstance(first, tuple) else (first,)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            again = ints.OPS[call.op](*args)
            for one, other in zip(
                again if isinstance(again, tuple) else (again,), firsts, strict=True
            ):
                different += bitwise_mismatches(one, other).sum()
        assert int(different) == 0, call.op


def _replayed(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def test_cuda_graph() -> None:
    """Capture and replay on new values: no synchronisation, no allocation outside the pool."""
    one = cases.values("normal", 100 * 1024, torch.bfloat16).view(100, 1024)
    two = cases.values("wide", 100 * 1024, torch.bfloat16, seed=5).view(100, 1024)
    for before, after in zip(_calls(one), _calls(two), strict=True):
        args = before.on("cuda")
        graph, result = _replayed(lambda op=before.op, args=args: ints.OPS[op](*args))
        for want in (before, after, before):
            for target, source in zip(args, want.on("cuda"), strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            for _ in range(3):
                graph.replay()
            want.check(result, "replayed")


def test_update_in_a_cuda_graph() -> None:
    """Each replay is a step of the history."""
    history = torch.rand(16, 3, device="cuda")
    scale = torch.ones(3, device="cuda")
    mine = (history.clone(), scale.clone())
    amax = torch.rand(3, device="cuda")

    def step() -> None:
        history[0].copy_(amax)
        update_fp8_scale_(history, scale, torch.float8_e4m3fn)

    graph, _ = _replayed(step)
    history.copy_(mine[0])
    scale.copy_(mine[1])
    for _ in range(20):
        amax.uniform_(0, 9)
        graph.replay()
        mine[0][0].copy_(amax)
        mine = update_fp8_scale(*mine, torch.float8_e4m3fn)
        require_equal("update_fp8_scale_", "replayed", (history, scale), mine)


def test_other_stream() -> None:
    """The op queues on the current stream: its input is still being written when it is called."""
    x = cases.values("wide", 1000 * 1024, torch.bfloat16).view(1000, 1024)
    for call in _calls(x):
        args = call.on("cuda")
        late = tuple(torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for target, source in zip(late, args, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            got = ints.OPS[call.op](*late)
        stream.synchronize()
        call.check(got, "on another stream")


@pytest.mark.parametrize("op", CONTRACTS)
def test_contract(op: str) -> None:
    """The public harness on our own family, on CUDA, and CUDA against CPU."""
    name = f"inductor_ext::{op}"
    checks = ("reference", "fake", "opcheck", "compiled_on")
    report = check_op(name, devices=("cuda",), checks=checks, compile_samples=1)
    assert all(report.ran.values()), report
    check_op(name, devices=("cpu", "cuda"), checks=("across_devices",))
