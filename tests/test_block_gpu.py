"""The block formats on a card: repeats, graphs, large and huge tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_ext.decompositions import fp8_block, fp8_both, mxfp8
from inductor_ext.testing import bitwise_mismatches

pytestmark = pytest.mark.gpu

OPS = torch.ops.inductor_ext
E4M3 = torch.float8_e4m3fn
FP8_BLOCKS: tuple[tuple[int, int], ...] = ((1, 128), (128, 1), (64, 64), (1, 32), (32, 1))
Run = Callable[[Tensor], tuple[Tensor, ...]]


def _run(op: Callable[..., Any], *options: Any) -> Run:
    return lambda x: op(x, E4M3, *options)


def _back(op: Callable[..., Any], *arguments: Any) -> Run:
    return lambda _: (op(*arguments),)


def _quantizations(device: str) -> Iterator[tuple[str, Run]]:
    """Every kernel and orientation, plain and for a GEMM."""
    for layout in ("plain", "gemm"):
        for transposed in (False, True):
            for block in FP8_BLOCKS:
                if layout == "gemm" and block[1] == 1 and not transposed:
                    continue
                label = f"fp8 {block} transposed={transposed} {layout}"
                yield label, _run(OPS.quantize_fp8_block, *block, transposed, 0.0, False, layout)
            for block in ((1, 32), (32, 1), (32, 32)):
                label = f"mx {block} transposed={transposed} {layout}"
                yield label, _run(OPS.quantize_mxfp8, *block, transposed, "ceil", layout)
            for square in (False, True):
                label = f"mx both square={square} transposed={transposed} {layout}"
                yield label, _run(OPS.quantize_mxfp8_both, square, transposed, "floor", layout)
        for square in (False, True):
            label = f"fp8 both square={square} {layout}"
            yield label, _run(OPS.quantize_fp8_block_both, 128, square, 0.0, False, layout)
    scale = torch.tensor([37.7], device=device)
    yield "static both", lambda x: OPS.quantize_fp8_static_both(x, scale, E4M3)
    yield "tensor both", _run(OPS.quantize_fp8_tensor_both)
    yield "column", _run(OPS.quantize_fp8_column)
    yield "column transposed", _run(OPS.quantize_fp8_column, True)


def _dequantizations(x: Tensor) -> Iterator[tuple[str, Run]]:
    """Calls that take the codes of ``x`` from outside, so that only they are repeated."""
    for layout in ("plain", "gemm"):
        for block in FP8_BLOCKS:
            if layout == "gemm" and block[1] == 1:
                continue
            fp8 = OPS.quantize_fp8_block(x, E4M3, *block, False, 0.0, False, layout)
            back = _back(OPS.dequantize_fp8_block, *fp8, *block, x.dtype, layout)
            yield f"fp8 {block} {layout}", back
        for block in ((1, 32), (32, 1), (32, 32)):
            mx = OPS.quantize_mxfp8(x, E4M3, *block, False, "ceil", layout)
            back = _back(OPS.dequantize_mxfp8, *mx, *block, x.dtype, layout)
            yield f"mx {block} {layout}", back


def _input(rows: int, columns: int, device: str = "cuda") -> Tensor:
    torch.manual_seed(0)
    x = torch.empty((rows, columns), dtype=torch.bfloat16, device=device).normal_()
    x[3::17, 5::23] = float("nan")
    return x


def _require(got: tuple[Tensor, ...], want: tuple[Tensor, ...], label: str) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.shape == other.shape, (label, number)
        wrong = bitwise_mismatches(one, other.to(one.device))
        assert not wrong.any(), (label, number, int(wrong.sum()))


def test_deterministic() -> None:
    """1000 repeats, of a size where many thread blocks reduce one amax."""
    x = _input(777, 4104)
    for label, run in (*_quantizations("cuda"), *_dequantizations(x)):
        first = run(x)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for one, other in zip(run(x), first, strict=True):
                different += bitwise_mismatches(one, other).sum()
        assert int(different) == 0, label


def test_cuda_graph() -> None:
    """Capture, then replay on new values."""
    x = _input(300, 1032)
    new = x * 3
    for label, run in (*_quantizations("cuda"), *_dequantizations(x)):
        static = x.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(static)
        static.copy_(new)
        for _ in range(2):
            graph.replay()
        _require(result, run(new), label)


@pytest.mark.parametrize("shape", [(4104, 8448), (8192, 4128), (33000, 1032)])
def test_scales_of_large_tensors(shape: tuple[int, int]) -> None:
    """Beyond 2**25 elements the scales of both sides take a second kernel."""
    x = _input(*shape)
    assert x.numel() > 1 << 25
    got = OPS.quantize_fp8_block_both(x, E4M3, 128, False)
    _require(got, fp8_block.quantize_fp8_block_both(x, E4M3, 128, False), "fp8")
    for transposed in (False, True):
        got = OPS.quantize_mxfp8_both(x, E4M3, False, transposed)
        want = mxfp8.quantize_mxfp8_both(x, E4M3, False, transposed)
        _require(got, want, f"mx {transposed}")


def test_beyond_2_to_the_31() -> None:
    """The last rows of a tensor whose elements 32 bits cannot count."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs a card with 40 GiB")
    x = torch.empty(((1 << 17) + 130, 16400), dtype=torch.bfloat16, device="cuda").normal_()
    start = x.shape[0] // 128 * 128 - 256
    tail = x[start:].contiguous()

    want = fp8_block.quantize_fp8_block_both(tail, E4M3, 128, False)
    codes, scales, codes_t, scales_t = OPS.quantize_fp8_block_both(x, E4M3, 128, False)
    last = (codes[start:], scales[start:], codes_t[:, start:], scales_t[:, start // 128 :])
    _require(tuple(t.contiguous() for t in last), want, "both")
    y = OPS.dequantize_fp8_block(codes, scales, 1, 128, torch.bfloat16)
    values = fp8_block.dequantize_fp8_block(*want[:2], 1, 128, torch.bfloat16)
    _require((y[start:],), (values,), "dequantize")
    del y, codes, scales, codes_t, scales_t

    codes, scales = OPS.quantize_fp8_block(x, E4M3, 1, 128)
    _require((codes[start:], scales[start:]), want[:2], "rows")
    del codes, scales

    codes, scales, codes_m, scales_m = OPS.quantize_mxfp8_both(x, E4M3, False, False)
    last = (codes[start:], scales[start:], codes_m[start:], scales_m[start // 32 :])
    _require(last, mxfp8.quantize_mxfp8_both(tail, E4M3, False, False), "mx")
    del codes, scales, codes_m, scales_m

    scale = torch.tensor([37.7], device="cuda")
    codes, codes_t, _, amax = OPS.quantize_fp8_static_both(x, scale, E4M3)
    whole = fp8_both.quantize_fp8_static_both(tail, scale, E4M3)
    _require((codes[start:], codes_t[:, start:].contiguous()), whole[:2], "static both")
    assert float(amax) == max(float(part.abs().max()) for part in x.split(8192))
