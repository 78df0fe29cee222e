"""What the tests on a card share: every family's calls, captured graphs, the bits of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import blocks
import cases
import family
import ints
import numpy as np
import nvfp4_family as nvfp4
import torch
from torch import Tensor

BF16 = torch.bfloat16


class Call(Protocol):
    """One call of an op and its true result, as each family has them."""

    op: str
    args: tuple[Any, ...]
    want: tuple[Tensor, ...]

    def on(self, device: str) -> tuple[Any, ...]: ...
    def check(self, got: Any, way: str) -> None: ...


@dataclass(frozen=True)
class Family:
    """Ops that share a format.

    Attributes:
        op: the op of a call's name.
        calls: every op on a matrix, and the way back from some of the results.
        large: a shape with many thread blocks and ragged ends, where the format has those.
        small: a shape with few.
    """

    op: Callable[[str], Callable[..., Any]]
    calls: Callable[[Tensor], Iterable[Call]]
    large: tuple[int, int]
    small: tuple[int, int]

    def on_values(self, kind: str, shape: tuple[int, int], seed: int = 0) -> list[Call]:
        count = shape[0] * shape[1]
        return list(self.calls(cases.values(kind, count, BF16, seed).view(shape)))


def _fp8(x: Tensor) -> Iterator[Any]:
    made = [*family.quantizations(x, "e4m3")]
    codes, scale_inv = made[-1].want
    yield from made
    yield family.dequantize(codes, scale_inv, BF16)


def _fp8_blocks(x: Tensor) -> Iterator[Any]:
    for call in blocks.fp8_calls(x, "e4m3"):
        yield call
        if call.op == "quantize_fp8_block" and 128 in call.args[2:4]:
            block_m, block_k, transposed = call.args[2:5]
            if call.args[-1] == "plain" or (block_m if transposed else block_k) > 1:
                yield blocks.dequantize_block(call, BF16)


def _mxfp8(x: Tensor) -> Iterator[Any]:
    made = [*blocks.mx_calls(x, "e4m3")]
    yield from made
    for block_m, block_k in blocks.MX_BLOCKS:
        count = -(-x.shape[0] // block_m), -(-x.shape[1] // block_k)
        e = np.resize(np.arange(256, dtype=np.uint8), count)
        for layout in ("plain", "gemm"):
            yield blocks.dequantize_mx(made[0].want[0], e, block_m, block_k, BF16, layout)


def _integers(x: Tensor) -> Iterator[Any]:
    for call in (*ints.of_any_shape(x), *ints.of_groups(x, 64)):
        yield call
        yield from ints.dequantizations(call, BF16)


def _nvfp4(x: Tensor) -> Iterator[Any]:
    made = [*nvfp4.quantizations(x, nvfp4.true_amax(x))]
    yield from made
    yield nvfp4.dequantize(*made[0].want, cases.f32(np.float32(3.0)), False, BF16)


FAMILIES: dict[str, Family] = {
    "fp8": Family(family.OPS.__getitem__, _fp8, (777, 4099), (100, 1031)),
    "fp8 blocks": Family(blocks.op_of, _fp8_blocks, (333, 1096), (100, 296)),
    "mxfp8": Family(blocks.op_of, _mxfp8, (333, 1096), (100, 296)),
    "integers": Family(ints.OPS.__getitem__, _integers, (777, 4096), (100, 1024)),
    "nvfp4": Family(nvfp4.OPS.__getitem__, _nvfp4, (80, 272), (32, 80)),
}


def flat(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def raw(t: Tensor) -> Tensor:
    """The bytes of a tensor, on its device."""
    return t.reshape(-1).view(torch.uint8)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run once on a stream of its own, as PyTorch wants it, then capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def overwrite(targets: Iterable[Any], sources: Iterable[Any]) -> None:
    """Copy the tensors among some arguments into those of a call that was captured."""
    for target, source in zip(targets, sources, strict=True):
        if isinstance(target, Tensor):
            target.copy_(source)
