"""Stochastic rounding: Philox's known answers, no bias, independent streams, the same again."""

from __future__ import annotations

import math

import cases
import nvfp4_family as family
import pytest
import torch
from oracle import nvfp4 as oracle
from torch import Tensor

from inductor_ext.decompositions.philox import block_bits, philox4x32

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
device_ = pytest.mark.parametrize("device", DEVICES)
ONE = 2688.0  # with this global amax, and 6 as a block's largest element, elements are scaled by 1

KNOWN = [  # counter, key, result: the vectors that are published with the generator
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]
) -> None:
    def words(values: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(v) for v in values)

    assert tuple(int(w) for w in philox4x32(words(counter), words(key))) == want  # type: ignore[arg-type]
    assert oracle.philox(counter, key) == want  # type: ignore[arg-type]


def test_block_bits() -> None:
    """The counter of a block, in ATen and in Python integers, beyond 2^32 too."""
    for stream, rng in ((0, (5, 6)), (1, family.RNG)):
        ours = block_bits(7, stream, torch.tensor(rng))
        assert ours.tolist() == oracle.random_bytes(7, stream, *rng).tolist()


def _drawn(value: float, device: str, seed: int, *, transposed: bool = False) -> Tensor:
    """Return 256 x 960 stochastic roundings of one value, as fp32 (the 16th elements are 6)."""
    x = torch.full((256, 1024), value, device=device)
    if transposed:
        x = x.t().contiguous()
        x[15::16] = 6.0
    else:
        x[:, 15::16] = 6.0
    amax = torch.tensor(ONE, device=device)
    rng = torch.tensor([seed, 3], device=device)
    block = (16, 1) if transposed else (1, 16)
    codes, scales = family.OPS["quantize"](x, amax, *block, transposed, "plain", False, rng)
    assert bool((scales.view(torch.uint8) == 0x38).all())
    y = family.OPS["dequantize"](codes, scales, amax, 1, 16, torch.float32)
    return y.view(256, 64, 16)[..., :15].flatten().double()


VALUES = (0.1, 0.3, -0.77, 1.2, 1.9, -2.2, 3.3, 3.95, -4.4, 5.1, 5.93)


@device_
def test_unbiased(device: str) -> None:
    """The mean of many roundings is within 4 standard errors of what 8 random bits can give."""
    for seed, value in enumerate(VALUES):
        drawn = _drawn(value, device, seed)
        a = abs(value)
        step = 0.5 if a < 2 else 1.0 if a < 4 else 2.0
        low = math.floor(a / step) * step
        # u takes 256 values: the chance to reach the next grid value is a multiple of 1/256
        chance = sum(a + u / 256 * step >= low + step for u in range(256)) / 256
        assert abs(chance - (a - low) / step) <= 1 / 256
        assert set(drawn.abs().unique().tolist()) <= {low, low + step}
        mean = math.copysign(low + chance * step, value)
        error = step * math.sqrt(chance * (1 - chance) / drawn.numel())
        assert abs(float(drawn.mean()) - mean) < 4 * error, value
        assert float(drawn.var()) > 0


@device_
def test_grid_values_stay(device: str) -> None:
    for value in (0.0, 0.5, 1.0, -1.5, 2.0, -3.0, 4.0, 6.0):
        assert set(_drawn(value, device, 1).tolist()) == {value}


@device_
def test_streams_are_uncorrelated(device: str) -> None:
    """Rows and columns, seeds, offsets, neighbours: within 4 standard errors of independence."""
    draws = {
        "rows": _drawn(1.25, device, 7),
        "columns": _drawn(1.25, device, 7, transposed=True),
        "seed": _drawn(1.25, device, 8),
    }
    count = draws["rows"].numel()
    rows = draws["rows"] - draws["rows"].mean()
    spread = rows.std()
    others = {name: d - d.mean() for name, d in draws.items() if name != "rows"}
    others["neighbour"] = rows.roll(1)
    others["next block"] = rows.roll(15)
    others["next row"] = rows.roll(960)
    for name, other in others.items():
        correlation = float((rows * other).mean() / (spread * other.std()))
        assert abs(correlation) < 4 / math.sqrt(count), name


@device_
def test_bytes_are_uniform(device: str) -> None:
    """Chi-square of the 256 values of a byte, and of each place in a block."""
    bits = block_bits(1 << 14, 0, torch.tensor([11, 12], device=device))
    for place in range(16):
        counts = torch.bincount(bits[:, place], minlength=256).double()
        expected = (1 << 14) / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255), place


@device_
def test_same_again(device: str) -> None:
    """The same seed and offset give the same bits; another of either does not."""
    x = cases.values("normal", 64 * 64, torch.bfloat16).view(64, 64).to(device)
    amax = torch.tensor(4.0, device=device)

    def run(seed: int, offset: int) -> list[int]:
        rng = torch.tensor([seed, offset], device=device)
        codes, _ = family.OPS["quantize"](x, amax, 1, 16, False, "plain", False, rng)
        return codes.flatten().tolist()

    first = run(1, 2)
    assert run(1, 2) == first
    assert run(2, 2) != first
    assert run(1, 3) != first
    assert run(1 + (1 << 32), 2) != first
    assert run(1, 2 + (1 << 32)) != first
