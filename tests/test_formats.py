"""Format objects, and the plain tensors that quantize returns: JSON, pytrees, files, compile."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import inductor_ext as ixt

E5M2 = torch.float8_e5m2
X = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

FORMATS: tuple[ixt.Format, ...] = (
    ixt.FP8(granularity="tensor", eps=1e-12),
    ixt.FP8(dtype=E5M2, pow2=True),
    ixt.FP8(granularity="block"),
    ixt.FP8(granularity="square", block=32, layout="gemm"),
    ixt.MXFP8(),
    ixt.MXFP8(dtype=E5M2, square=True, mode="floor", layout="gemm"),
    ixt.NVFP4(),
    ixt.NVFP4(hadamard=True, layout="gemm"),
    ixt.NVFP4(granularity="row"),
    ixt.NVFP4(square=True),
    ixt.INT8(granularity="tensor"),
    ixt.INT8(),
    ixt.INT8(granularity="group", group=32),
    ixt.INT4(),
    ixt.INT4(group=32, symmetric=False),
)
# Half of the last bit of the coarsest format, as a fraction of the group's largest value.
ERROR = {ixt.FP8: 1 / 8, ixt.MXFP8: 1 / 8, ixt.NVFP4: 1 / 4, ixt.INT8: 1 / 128, ixt.INT4: 1 / 8}


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in the order of its elements."""
    return t.contiguous().view(-1).view(torch.uint8)


each = pytest.mark.parametrize("fmt", FORMATS, ids=repr)


@each
def test_values(fmt: ixt.Format) -> None:
    """Compare, hash, print as the call that makes them, go to JSON and back, refuse to change."""
    again = ixt.format_from_json(fmt.to_json())
    assert again == fmt
    assert hash(again) == hash(fmt)
    assert json.loads(fmt.to_json())["format"] == type(fmt).__name__
    names = {kind.__name__: kind for kind in ERROR}
    assert eval(repr(fmt), {"torch": torch, **names}) == fmt
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.layout = "plain"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ixt.FP8(block=16), "`block` must be 32, 64 or 128, got 16"),
        (lambda: ixt.FP8(block=128.0), "`block` must be 32, 64 or 128, got 128.0"),  # type: ignore[arg-type]
        (lambda: ixt.FP8(layout="gemm"), '`layout` must be "plain" for granularity "tensor" and'),
        (lambda: ixt.MXFP8(dtype=torch.int8), "`dtype` must be float8_e4m3fn or float8_e5m2"),
        (lambda: ixt.MXFP8(mode="even"), '`mode` must be "ceil" or "floor", got \'even\''),  # type: ignore[arg-type]
        (lambda: ixt.MXFP8(square=1), "`square` must be a bool, got 1"),  # type: ignore[arg-type]
        (lambda: ixt.NVFP4(granularity="block"), '`granularity` must be "tensor" or "row"'),  # type: ignore[arg-type]
        (lambda: ixt.NVFP4(square=True, hadamard=True), "`square` must be False together with"),
        (lambda: ixt.INT8(group=0), "`group` must be 32, 64, 128 or 256, got 0"),
        (lambda: ixt.INT8(group=True), "`group` must be 32, 64, 128 or 256, got True"),
        (lambda: ixt.INT4(group=16), "`group` must be 32, 64, 128 or 256, got 16"),
        (lambda: ixt.format_from_json("{}"), "`text` must be the JSON of a format"),
        (lambda: ixt.format_from_json("[1"), "`text` must be the JSON of a format"),
        (lambda: ixt.format_from_json('{"format": "INT8", "size": 1}'), "got also size"),
        (lambda: ixt.format_from_json('{"format": "FP8", "dtype": "nn"}'), "`dtype` must be"),
    ],
)  # fmt: skip
def test_validation(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def _both(fmt: ixt.Format) -> ixt.BothWays:
    return ixt.quantize(X, fmt, orientation="both")


@each
def test_round_trip(fmt: ixt.Format) -> None:
    """Both orientations give back the matrix, within the format's resolution."""
    q = _both(fmt)
    for part, x in ((q.row, X), (q.column, X.t())):
        if isinstance(fmt, ixt.NVFP4) and fmt.hadamard and part is q.column:
            continue  # the values are those of the transformed matrix
        y = ixt.dequantize(part, fmt, torch.float32)
        assert y.shape == x.shape
        limit = ERROR[type(fmt)] * float(X.abs().max())
        assert float((y - x.float()).abs().max()) < limit


@each
def test_both_is_row_and_column(fmt: ixt.Format) -> None:
    q = _both(fmt)
    row = ixt.quantize(X, fmt)
    column = ixt.quantize(X, fmt, orientation="column")
    for got, want in zip(pytree.tree_leaves(q), pytree.tree_leaves((row, column)), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == want.dtype
            assert torch.equal(bits(got), bits(want))


@each
def test_compiled(fmt: ixt.Format) -> None:
    """A format is a literal and its results are plain tensors: one graph, eager's bits."""

    def both(x: torch.Tensor) -> ixt.BothWays:
        return ixt.quantize(x, fmt, orientation="both")

    torch.compiler.reset()  # every format comes to the same code object
    with ixt.config.patch(enabled=True):
        got = torch.compile(both, fullgraph=True)(X)
    assert isinstance(got, ixt.BothWays)
    assert isinstance(got.row, ixt.Quantized)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(_both(fmt)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(bits(a), bits(b))
            assert a.stride() == b.stride()


@each
def test_files(fmt: ixt.Format, tmp_path: Path) -> None:
    """torch.save and safetensors take the tensors as they are."""
    safetensors = pytest.importorskip("safetensors.torch")
    q = _both(fmt).row
    memory = io.BytesIO()
    torch.save(tuple(q), memory)
    memory.seek(0)
    saved = torch.load(memory, weights_only=True)
    tensors = {k: v.contiguous() for k, v in q._asdict().items() if v is not None}
    safetensors.save_file(tensors, tmp_path / "q.safetensors", {"format": fmt.to_json()})
    with safetensors.safe_open(tmp_path / "q.safetensors", "pt") as file:
        assert ixt.format_from_json(file.metadata()["format"]) == fmt
        loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        for got in (loaded[name], saved[q._fields.index(name)]):
            assert torch.equal(bits(got), bits(tensor))
    assert torch.equal(ixt.dequantize(saved, fmt), ixt.dequantize(q, fmt))
