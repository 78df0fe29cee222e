"""What only a card can show: huge tensors, streams, graphs, determinism, devices side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import family
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry
from inductor_ext.testing import bitwise_mismatches, check_op, require_equal

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
CHUNK = 1 << 26
HUGE = (1 << 31) + 4096 + 3
_NAN = {op: family.NAN_EQUAL.get(op, True) for op in family.OPS}


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


def _both(op: Callable[..., Any], *options: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The op in eager mode, and compiled with the plugin."""
    torch.compiler.reset()

    def call(*tensors: Tensor) -> Any:
        return op(*tensors, *options)

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


def _require_codes(codes: Tensor, x: Tensor, scale: Tensor, way: str) -> None:
    """Compare codes with the reference, a chunk at a time."""
    for start in range(0, x.numel(), CHUNK):
        want = family.REFERENCES["static"](x.view(-1)[start : start + CHUNK], scale, E4M3)[0]
        got = codes.view(-1)[start : start + CHUNK]
        wrong = bitwise_mismatches(got, want)
        assert not wrong.any(), (way, start + int(wrong.to(torch.uint8).argmax()))


def test_static_beyond_2_to_the_31(roomy: None) -> None:
    x, scale = _huge((HUGE,)), torch.tensor(37.7, device="cuda")
    for way, run in _both(family.OPS["static"], E4M3):
        codes, scale_inv, amax = run(x, scale)
        assert float(amax) == 8.5, way
        assert bool(scale_inv == torch.ones((), device="cuda") / scale), way
        _require_codes(codes, x, scale, way)
        del codes


def test_tensor_beyond_2_to_the_31(roomy: None) -> None:
    x = _huge((HUGE,))
    scale = torch.tensor(448.0, device="cuda") / torch.tensor(8.5, device="cuda")
    for way, run in _both(family.OPS["tensor"], E4M3):
        codes, scale_inv = run(x)
        assert bool(scale_inv == torch.ones((), device="cuda") / scale), way
        _require_codes(codes, x, scale, way)
        del codes


@pytest.mark.parametrize("columns", [4099, 4096])
def test_rows_beyond_2_to_the_31(roomy: None, columns: int) -> None:
    rows = HUGE // columns + 2
    x = _huge((rows, columns))
    for way, run in _both(family.OPS["row"], E4M3):
        codes, scale_inv = run(x)
        step = CHUNK // columns
        for start in range(0, rows, step):
            part = slice(start, start + step)
            want = family.REFERENCES["row"](x[part], E4M3)
            require_equal("row", way, (codes[part].clone(), scale_inv[part].clone()), want)
        del codes, scale_inv


def test_one_row_beyond_2_to_the_31(roomy: None) -> None:
    x = _huge((1, HUGE))
    scale = torch.tensor(448.0, device="cuda") / torch.tensor(8.5, device="cuda")
    codes, scale_inv = family.OPS["row"](x, E4M3)
    assert bool(scale_inv == torch.ones((), device="cuda") / scale)
    _require_codes(codes, x, scale, "eager")


def test_strided_beyond_2_to_the_31(roomy: None) -> None:
    """Few elements, far apart: the offsets overflow 32 bits, not the count."""
    room = torch.zeros(3 << 30, dtype=torch.bfloat16, device="cuda")
    x = room.as_strided((3, 1000), (1 << 30, 1048573))
    x.copy_(cases.values("wide", 3000, torch.bfloat16).view(3, 1000))
    for call in family.quantizations(x.cpu().contiguous(), "e4m3", "far apart"):
        args = (x, *(a.cuda() if isinstance(a, Tensor) else a for a in call.args[1:]))
        call.check(family.OPS[call.op](*args), "eager, far apart")


def test_dequantize_beyond_2_to_the_31(roomy: None) -> None:
    codes = torch.empty(HUGE, dtype=torch.uint8, device="cuda").random_(0, 256).view(E4M3)
    scale_inv = torch.tensor(0.37, device="cuda")
    for way, run in _both(family.OPS["dequantize"], torch.bfloat16):
        y = run(codes, scale_inv)
        for start in range(0, HUGE, CHUNK):
            part = slice(start, start + CHUNK)
            want = family.REFERENCES["dequantize"](codes[part], scale_inv, torch.bfloat16)
            wrong = bitwise_mismatches(y[part], want, nan_equal=True)
            assert not wrong.any(), (way, start)
        del y


def _calls(x: Tensor) -> list[family.Call]:
    calls = list(family.quantizations(x, "e4m3"))
    codes, scale_inv = calls[-1].want
    return [*calls, family.dequantize(codes, scale_inv, torch.bfloat16)]


def test_deterministic() -> None:
    """1000 repeats of every op, of a size where many blocks reduce one amax."""
    x = cases.values("wide", 777 * 4099, torch.bfloat16).view(777, 4099)
    for call in _calls(x):
        args = call.on("cuda")
        first = family.OPS[call.op](*args)
        firsts = first if isinstance(first, tuple) else (first,)
        call.check(first, "eager, the first time")
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            again = family.OPS[call.op](*args)
            for one, other in zip(
                again if isinstance(again, tuple) else (again,), firsts, strict=True
            ):
                different += bitwise_mismatches(one, other).sum()
        assert int(different) == 0, call.op


def test_other_stream() -> None:
    """The op queues on the current stream: its input is still being written when it is called."""
    x = cases.values("wide", 1000 * 1024, torch.bfloat16).view(1000, 1024)
    for call in _calls(x):
        args = call.on("cuda")
        late = tuple(torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for target, source in zip(late, args, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            got = family.OPS[call.op](*late)
        stream.synchronize()
        call.check(got, "on another stream")


def test_cuda_graph() -> None:
    """Capture and replay on new values: no synchronisation, no allocation outside the pool."""
    one = cases.values("normal", 100 * 1031, torch.bfloat16).view(100, 1031)
    two = cases.values("wide", 100 * 1031, torch.bfloat16, seed=5).view(100, 1031)
    for before, after in zip(_calls(one), _calls(two), strict=True):
        args, new = before.on("cuda"), after.on("cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            family.OPS[before.op](*args)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = family.OPS[before.op](*args)
        for want in (before, after, before):
            for target, source in zip(args, new if want is after else want.on("cuda"), strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            for _ in range(3):
                graph.replay()
            want.check(result, "replayed")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_other_device() -> None:
    """The kernel runs where its input is, whatever the current device."""
    x = cases.values("wide", 33 * 1000, torch.bfloat16).view(33, 1000)
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            for call in _calls(x):
                got = family.OPS[call.op](*call.on(f"cuda:{other}"))
                call.check(got, f"on cuda:{other} from cuda:{current}")
                where = got[0] if isinstance(got, tuple) else got
                assert where.device.index == other
            assert torch.cuda.current_device() == current


def test_mixed_devices_are_refused() -> None:
    x = torch.randn(4, 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError, TypeError), match="device"):
        family.OPS["static"](x, torch.ones(4, 1), E4M3)


@pytest.mark.parametrize("op", list(family.OPS))
def test_contract(op: str) -> None:
    """The public harness on our own family, CUDA against CPU."""
    report = check_op(
        family.OPS[op],  # type: ignore[arg-type]
        devices=("cpu", "cuda"),
        nan_equal=_NAN[op],
        compile_samples=4,
    )
    assert all(report.ran.values()), report
