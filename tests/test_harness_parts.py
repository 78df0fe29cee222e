"""What the harness is made of: comparing bits, moving and resizing samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_ext.testing import bitwise_mismatches, samples
from inductor_ext.testing.samples import Sample

X = torch.arange(1.0, 13.0).view(3, 4)


@pytest.mark.parametrize(
    ("got", "expected", "mask"),
    [
        (torch.tensor([0.0, -0.0]), torch.zeros(2), [False, True]),
        (torch.tensor(1.0), torch.tensor(1.0), False),
        (torch.tensor([True, False]), torch.tensor([True, True]), [False, True]),
        (torch.tensor([1 + 0j, 0j]), torch.tensor([1 + 0j, 1e-300j]), [False, True]),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), [False] * 2),
        (torch.empty(0, 3), torch.empty(0, 3), []),
    ],
    ids=["zeros", "0-d", "bool", "complex", "bf16", "empty"],
)
def test_bitwise_mismatches(got: Tensor, expected: Tensor, mask: Any) -> None:
    if got.is_complex():
        got, expected = got.to(torch.complex128), expected.to(torch.complex128)
        expected[1] = complex(0.0, 1e-300)
    assert bitwise_mismatches(got, expected).tolist() == mask


def test_bitwise_mismatches_of_fp8() -> None:
    codes = torch.tensor([0x7F, 0xFF, 0x00], dtype=torch.uint8).view(torch.float8_e4m3fn)
    other = torch.tensor([0x7F, 0x7F, 0x80], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert bitwise_mismatches(codes, other).tolist() == [False, True, True]
    assert bitwise_mismatches(codes, other, nan_equal=True).tolist() == [False, False, True]
    with pytest.raises(ValueError, match="dtype"):
        bitwise_mismatches(codes, other.float())
    with pytest.raises(ValueError, match="shape"):
        bitwise_mismatches(codes, other[:2])


def test_samples_keep_strides_and_offsets() -> None:
    room = torch.arange(40.0)
    views = (room[3:].view(37)[:12].view(3, 4).t(), room[5:6].expand(4, 4), room[::3])
    for copy, view in zip(Sample(views, 0).clone().args, views, strict=True):
        assert copy.stride() == view.stride()
        assert copy.storage_offset() == view.storage_offset()
        assert torch.equal(copy, view)
        assert copy.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_batched_samples() -> None:
    scale = torch.tensor([[1.0], [2.0], [3.0]])
    codes = X.to(torch.float8_e4m3fn)
    (one,) = samples(
        [(codes, scale, torch.tensor(5.0), "word", torch.ones(4))], torch.device("cpu")
    )
    big, rows, scalar, word, other = one.batched(5).args
    assert big.float()[:, 0].tolist() == [1.0, 5.0, 9.0, 1.0, 5.0]
    assert rows.flatten().tolist() == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert (scalar.shape, word, other.shape) == ((), "word", (4,))
    assert one.batched(0).args[0].shape == (0, 4)
