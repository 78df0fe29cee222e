"""What only a card can show of NVFP4: huge tensors, streams, graphs, determinism, both devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import nvfp4_family as family
import pytest
import torch
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import registry
from inductor_ext.testing import bitwise_mismatches, check_op, require_equal

pytestmark = pytest.mark.gpu

HUGE = (1 << 31) + (1 << 20)


@pytest.fixture
def roomy() -> Iterator[None]:
    """Skip unless the card has 40 GiB, and leave nothing behind."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs a card with 40 GiB")
    yield
    torch.cuda.empty_cache()


def _huge(rows: int, columns: int) -> Tensor:
    torch.manual_seed(0)
    x = torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda").normal_()
    x.view(-1)[1234567::7654321] = float("nan")
    return x


def _compiled(op: Callable[..., Any], *args: Any) -> Any:
    torch.compiler.reset()
    with ixt.config.patch(enabled=True), torch.compiler.config.patch(force_disable_caches=True):
        registry.clear_records()
        result = torch.compile(op, fullgraph=True, dynamic=False)(*args)
        assert [r.outcome for r in registry.records()] == ["lowered"]
        return result


@pytest.mark.parametrize("columns", [4096, 16])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_rows_beyond_2_to_the_31(roomy: None, columns: int, way: str) -> None:
    rows = HUGE // columns
    x, amax = _huge(rows, columns), torch.tensor(6.5, device="cuda")
    op = family.OPS["quantize"]
    codes, scales = op(x, amax, 1, 16) if way == "eager" else _compiled(op, x, amax, 1, 16)
    step = (1 << 26) // columns
    for start in (0, rows // 2 // 128 * 128, rows - step):
        part = slice(start, start + step)
        want = family.REFERENCES["quantize"](x[part], amax, 1, 16)
        require_equal("rows", way, (codes[part].clone(), scales[part].clone()), want)


@pytest.mark.parametrize("rows", [HUGE // 4096, 48])
def test_columns_beyond_2_to_the_31(roomy: None, rows: int) -> None:
    columns = HUGE // rows
    x, amax = _huge(rows, columns), torch.tensor(6.5, device="cuda")
    rng = torch.tensor([1, 2], device="cuda")
    codes, scales = family.OPS["quantize"](x, amax, 16, 1, True)
    both = family.OPS["both"](x[:, : columns // 16 * 16], amax, amax, True, "gemm", False, rng)
    step = (1 << 26) // rows
    for start in (0, columns // 2, columns - step):
        part = slice(start, start + step)
        want = family.REFERENCES["quantize"](x[:, part], amax, 16, 1, True)
        require_equal("columns", "eager", (codes[part].clone(), scales[part].clone()), want)
    again = family.OPS["quantize"](
        x[:, : columns // 16 * 16], amax, 16, 16, True, "gemm", False, rng
    )
    require_equal("both", "eager", both[2:], again)


def test_dequantize_beyond_2_to_the_31(roomy: None) -> None:
    rows, columns = HUGE // 8192, 4096
    codes = torch.empty((rows, columns), dtype=torch.uint8, device="cuda").random_(0, 256)
    scales = torch.empty((rows, columns // 8), dtype=torch.uint8, device="cuda").random_(0, 127)
    scales, amax = scales.view(torch.float8_e4m3fn), torch.tensor(3.0, device="cuda")
    y = family.OPS["dequantize"](codes, scales, amax, 1, 16, torch.bfloat16)
    step = 4096
    for start in (0, rows // 2, rows - step):
        part = slice(start, start + step)
        want = family.REFERENCES["dequantize"](
            codes[part], scales[part], amax, 1, 16, torch.bfloat16
        )
        assert not bitwise_mismatches(y[part].clone(), want, nan_equal=True).any(), start


def test_strided_beyond_2_to_the_31(roomy: None) -> None:
    """Few elements, far apart: the offsets overflow 32 bits, not the count."""
    room = torch.zeros(17 << 28, dtype=torch.bfloat16, device="cuda")
    x = room.as_strided((16, 64), (1 << 28, 1))
    x.copy_(cases.values("wide", 1024, torch.bfloat16).view(16, 64))
    for call in family.quantizations(x.cpu().contiguous(), cases.f32(30.0), "far apart"):
        args = (x, *(a.cuda() if isinstance(a, Tensor) else a for a in call.args[1:]))
        call.check(family.OPS[call.op](*args), "eager, far apart")


def _calls(kind: str, seed: int = 0) -> list[family.Call]:
    x = cases.values(kind, 80 * 272, torch.bfloat16, seed).view(80, 272)
    calls = list(family.quantizations(x, family.true_amax(x), kind))
    codes, scales = calls[0].want
    return [*calls, family.dequantize(codes, scales, cases.f32(3.0), False, torch.bfloat16)]


def _flat(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_deterministic() -> None:
    """1000 repeats of every op, stochastic ones too."""
    for call in _calls("wide"):
        args = call.on("cuda")
        first = _flat(family.OPS[call.op](*args))
        call.check(first, "eager, the first time")
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000 if call.op in ("amax", "both") else 100):
            for one, other in zip(_flat(family.OPS[call.op](*args)), first, strict=True):
                different += (
                    one.view(-1).view(torch.uint8) != other.view(-1).view(torch.uint8)
                ).sum()
        assert int(different) == 0, call.op


def test_other_stream() -> None:
    """The op queues on the current stream: its input is still being written when it is called."""
    for call in _calls("wide"):
        args = call.on("cuda")
        late = tuple(torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            for target, source in zip(late, args, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)
            got = family.OPS[call.op](*late)
        stream.synchronize()
        call.check(got, "on another stream")


def test_cuda_graph() -> None:
    """Capture and replay on new values, seeds and offsets among them."""
    for before, after in zip(_calls("normal"), _calls("wide", 5), strict=True):
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
            graph.replay()
            want.check(result, "replayed")


def test_graph_replay_draws_as_eager_does() -> None:
    """A captured stochastic rounding follows its offset tensor, which is moved between replays."""
    x = cases.values("normal", 64 * 256, torch.bfloat16).view(64, 256).cuda()
    amax, rng = torch.tensor(4.0, device="cuda"), torch.tensor([9, 0], device="cuda")
    call = (x, amax, 1, 16, False, "plain", False, rng)
    family.OPS["quantize"](*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, _ = family.OPS["quantize"](*call)
        rng[1] += 1
    seen = []
    for offset in range(3):
        rng.copy_(torch.tensor([9, offset]))
        graph.replay()
        fresh = torch.tensor([9, offset], device="cuda")
        seen.append(codes.clone())
        want, _ = family.OPS["quantize"](*call[:-1], fresh)
        assert torch.equal(seen[-1], want), offset
        assert int(rng[1]) == offset + 1
    assert not torch.equal(seen[0], seen[1])


def test_mixed_devices_are_refused() -> None:
    x = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError), match="`amax` must be on the device of `x`"):
        family.OPS["quantize"](x, torch.tensor(1.0), 1, 16)


@pytest.mark.parametrize("op", list(family.OPS))
def test_contract(op: str) -> None:
    """The public harness on our own family, CUDA against CPU."""
    report = check_op(
        family.OPS[op],  # type: ignore[arg-type]
        devices=("cpu", "cuda"),
        nan_equal=op == "dequantize",
        compile_samples=2,
    )
    assert all(report.ran.values()), report
