"""The kernels of every family on a card: determinism, streams, CUDA graphs, devices."""

from __future__ import annotations

import cases
import family as fp8
import nvfp4_family as nvfp4
import pytest
import torch
from card import FAMILIES, captured, flat, overwrite, raw
from torch import Tensor

from inductor_ext.ops.scaling import update_fp8_scale, update_fp8_scale_
from inductor_ext.testing import require_equal

pytestmark = pytest.mark.gpu

family_ = pytest.mark.parametrize("name", FAMILIES)


@family_
def test_deterministic(name: str) -> None:
    """1000 repeats of every op, of a size where many thread blocks reduce one amax."""
    family = FAMILIES[name]
    for call in family.on_values("wide", family.large):
        args, op = call.on("cuda"), family.op(call.op)
        first = flat(op(*args))
        call.check(first, "eager, the first time")
        bits = [raw(t) for t in first]
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for one, other in zip(flat(op(*args)), bits, strict=True):
                different += (raw(one) != other).sum()
        assert int(different) == 0, (call.op, call.args[1:])


@family_
def test_other_stream(name: str) -> None:
    """The op queues on the current stream: its input is still being written when it is called."""
    family = FAMILIES[name]
    for call in family.on_values("wide", family.large):
        args = call.on("cuda")
        late = tuple(torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            overwrite(late, args)
            got = family.op(call.op)(*late)
        stream.synchronize()
        call.check(got, "on another stream")


@family_
def test_cuda_graph(name: str) -> None:
    """Capture and replay on new values: no synchronisation, no allocation outside the pool."""
    family = FAMILIES[name]
    normal = family.on_values("normal", family.small)
    wide = family.on_values("wide", family.small, seed=5)
    for before, after in zip(normal, wide, strict=True):
        args, op = before.on("cuda"), family.op(before.op)
        graph, result = captured(lambda op=op, args=args: op(*args))
        for want in (before, after, before):
            overwrite(args, want.on("cuda"))
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

    graph, _ = captured(step)
    overwrite((history, scale), mine)
    for _ in range(20):
        amax.uniform_(0, 9)
        graph.replay()
        mine[0][0].copy_(amax)
        mine = update_fp8_scale(*mine, torch.float8_e4m3fn)
        require_equal("update_fp8_scale_", "replayed", (history, scale), mine)


def test_graph_replay_draws_as_eager_does() -> None:
    """A captured stochastic rounding follows its offset tensor, which is moved between replays."""
    x = cases.values("normal", 64 * 256, torch.bfloat16).view(64, 256).cuda()
    amax, rng = torch.tensor(4.0, device="cuda"), torch.tensor([9, 0], device="cuda")
    call = (x, amax, 1, 16, False, "plain", False)

    def step() -> Tensor:
        codes: Tensor = nvfp4.OPS["quantize"](*call, rng)[0]
        rng[1] += 1
        return codes

    graph, codes = captured(step)
    seen = []
    for offset in range(3):
        rng.copy_(torch.tensor([9, offset]))
        graph.replay()
        seen.append(codes.clone())
        want, _ = nvfp4.OPS["quantize"](*call, torch.tensor([9, offset], device="cuda"))
        assert torch.equal(seen[-1], want), offset
        assert int(rng[1]) == offset + 1
    assert not torch.equal(seen[0], seen[1])


@family_
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_other_device(name: str) -> None:
    """The kernel runs where its input is, whatever the current device."""
    family = FAMILIES[name]
    calls = family.on_values("wide", family.small)
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            for call in calls:
                got = flat(family.op(call.op)(*call.on(f"cuda:{other}")))
                call.check(got, f"on cuda:{other} from cuda:{current}")
                assert {t.device.index for t in got} == {other}
            assert torch.cuda.current_device() == current


def test_mixed_devices_are_refused() -> None:
    """The other families' are among their tests of bad input."""
    x = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError, TypeError), match="device"):
        fp8.OPS["static"](x, torch.ones(16, 1), torch.float8_e4m3fn)
    with pytest.raises((RuntimeError, ValueError), match="`amax` must be on the device of `x`"):
        nvfp4.OPS["quantize"](x, torch.tensor(1.0), 1, 16)
