"""Inputs that every FP8 test shares: shapes, layouts, and values chosen to break roundings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from oracle.grids import BF16, E4M3, E5M2, FLT_MAX, FP16, decode_bits, largest_input
from torch import Tensor

INPUTS: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
TARGETS: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAMES: dict[torch.dtype, str] = {v: k for k, v in (INPUTS | TARGETS).items()}
_RAW: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (7,),
    (0, 5),
    (5, 0),
    (3, 1),
    (1, 1),
    (17, 129),
    (33, 1000),
    (64, 128),
    (4, 3, 257),
    (2, 0, 3),
    (2, 3, 1, 5),
    (1, 4099),
)
LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "offset", "rotated")


# ---- bits ----


def raw(t: Tensor) -> np.ndarray:
    """Unsigned integer bits of a tensor, in logical order, on the host."""
    flat = t.detach().cpu().contiguous()
    size = flat.element_size()
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    return flat.view(_RAW[size]).numpy().view(unsigned)


def floats(t: Tensor) -> np.ndarray:
    """float32 values of a tensor, decoded from its bits without a cast."""
    return decode_bits(raw(t), NAMES[t.dtype])


def from_raw(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Tensor of `dtype` with exactly these bits, NaN payloads included."""
    size = torch.empty((), dtype=dtype).element_size()
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[size]
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
    array = np.array(bits, dtype=unsigned, order="C")  # a copy that stays 0-d
    return torch.from_numpy(array.view(signed)).view(dtype)


def f32(value: float | np.ndarray) -> Tensor:
    """float32 tensor of a numpy float32 value, bit for bit."""
    return from_raw(np.asarray(value, dtype=np.float32).view(np.uint32), torch.float32)


# ---- values ----


def _to(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Bits of float64 values rounded to `dtype` with the oracle's own rounding."""
    name = NAMES[dtype]
    if name == "fp32":
        with np.errstate(all="ignore"):
            return values.astype(np.float32).view(np.uint32)
    return {"bf16": BF16, "fp16": FP16}[name].encode(values)


def _normal(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    return _to(rng.standard_normal(2048), dtype)


def _wide(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    """Every exponent of the dtype, subnormals included, evenly in the logarithm."""
    low, high = (-24.0, 15.9) if dtype == torch.float16 else (-148.0, 127.9)
    return _to(np.exp2(rng.uniform(low, high, 4096)) * rng.choice([-1.0, 1.0], 4096), dtype)


def _zeros(_: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    return _to(np.array([0.0, -0.0] * 8), dtype)


def _infinities(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    return _to(np.concatenate([rng.standard_normal(61), [np.inf, -np.inf, 0.0]]), dtype)


def _nans(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    """Finite values between quiet and signalling NaNs of both signs and several payloads."""
    bits = _to(rng.standard_normal(256) * 3, dtype)
    payloads = {
        torch.bfloat16: [0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF, 0x7FA5, 0xFFD3],
        torch.float16: [0x7E00, 0xFE00, 0x7C01, 0xFC01, 0x7FFF, 0xFFFF, 0x7D55, 0xFEAA],
        torch.float32: [
            0x7FC00000,
            0xFFC00000,
            0x7F800001,
            0xFF800001,
            0x7FFFFFFF,
            0xFFFFFFFF,
            0x7FA12345,
        ],
    }[dtype]
    bits[3::17][: len(payloads)] = payloads
    return bits


def _only_nans(_: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    one = {torch.bfloat16: 0xFFC1, torch.float16: 0xFE01, torch.float32: 0xFFC00001}[dtype]
    return np.full(16, one, dtype=_to(np.zeros(1), dtype).dtype)


def _subnormals(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    """Subnormals of the dtype only: `max_finite / amax` overflows where the dtype allows it."""
    mantissa = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    size = torch.empty((), dtype=dtype).element_size() * 8
    magnitude = rng.integers(0, 1 << mantissa, 512)
    magnitude[:4] = [1, (1 << mantissa) - 1, 0, 2]
    sign = rng.integers(0, 2, 512) << (size - 1)
    return (magnitude | sign).astype(_to(np.zeros(1), dtype).dtype)


def _near_max(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    top = float(largest_input(NAMES[dtype]))
    return _to(np.concatenate([[top, -top], rng.uniform(-1, 1, 510) * top]), dtype)


def _ties(grid_name: str) -> Callable[[np.random.Generator, torch.dtype], np.ndarray]:
    """Ties of the target grid and their neighbours; amax = max_finite, so the current scale is 1.

    The neighbours are fp32's; in bf16 and fp16 most of them round back onto the tie.
    """

    def make(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
        grid = {"e4m3": E4M3, "e5m2": E5M2}[grid_name]
        mid = grid.midpoints[:-1]
        near = np.concatenate(
            [mid, np.nextafter(mid.astype(np.float32), np.float32(0)).astype(np.float64)]
        )
        near = np.concatenate(
            [near, np.nextafter(mid.astype(np.float32), FLT_MAX).astype(np.float64)]
        )
        everything = np.concatenate([near, grid.values, [grid.max]])
        return _to(np.concatenate([everything, -everything]), dtype)

    return make


def _tiny_amax(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    """Magnitudes around the edge where `448 / amax` stops being finite."""
    edge = 448.0 / float(FLT_MAX)
    scale = edge * rng.choice([0.25, 0.5, 0.99, 1.0, 1.01, 2.0, 128.0, 129.0], 512)
    return _to(scale * rng.choice([-1.0, 1.0], 512), dtype)


def _powers(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    """Powers of two and their neighbours, where a `pow2` scale changes."""
    low, high = (-14, 15) if dtype == torch.float16 else (-120, 120)
    p = np.exp2(rng.integers(low, high, 256).astype(np.float64))
    return _to(np.concatenate([p, p * (1 + 2.0**-7), p * 1.75, -p]), dtype)


VALUES: dict[str, Callable[[np.random.Generator, torch.dtype], np.ndarray]] = {
    "normal": _normal,
    "wide": _wide,
    "zeros": _zeros,
    "infinities": _infinities,
    "nans": _nans,
    "only_nans": _only_nans,
    "subnormals": _subnormals,
    "near_max": _near_max,
    "ties_e4m3": _ties("e4m3"),
    "ties_e5m2": _ties("e5m2"),
    "tiny_amax": _tiny_amax,
    "powers": _powers,
}


def values(kind: str, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`count` elements of `kind`, flat: the special values first, then repeats."""
    pool = VALUES[kind](np.random.default_rng([seed, len(kind), count % 1009]), dtype)
    repeats = max(1, math.ceil(count / len(pool)))
    return from_raw(np.tile(pool, repeats)[:count], dtype)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 bit patterns of a 16-bit dtype as (256, 256); of float32 as many, evenly spread."""
    if dtype == torch.float32:
        step = np.arange(65536, dtype=np.uint64) * np.uint64(65537)
        return from_raw(step.astype(np.uint32), dtype).view(256, 256)
    return from_raw(np.arange(65536, dtype=np.uint16), dtype).view(256, 256)


def every_code(dtype: torch.dtype) -> Tensor:
    """All 256 codes of an fp8 dtype."""
    return from_raw(np.arange(256, dtype=np.uint8), dtype)


def rows_of_everything(dtype: torch.dtype, columns: int = 129) -> Tensor:
    """One row group for each value kind, so that one call covers every amax a row can have."""
    return torch.cat([values(kind, 5 * columns, dtype).view(5, columns) for kind in VALUES])


def few_long_rows(device: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, str]]:
    """Rows too few to fill a GPU and too long for a block, of every kind: whole, ragged and apart.

    The largest value of a row of normal ones is its last; on a CPU the shapes are fewer.
    """
    sizes = ((1, 3), (65537,)) if device == "cpu" else ((1, 3, 32), (65537, 1 << 20, 77816))
    for columns in sizes[1]:
        made = torch.stack([values(kind, columns, dtype) for kind in VALUES])
        made[0, -1] = -100.0
        for rows in sizes[0]:
            for gap in (0, 3, 16):
                room = torch.zeros(rows, columns + gap, dtype=dtype)
                room[:, :columns] = made[torch.arange(rows) % len(made)]
                yield room.to(device)[:, :columns], f"{rows} x {columns} of {columns + gap}"


def scales(rng_seed: int = 0) -> list[Tensor]:
    """0-d float32 scales worth giving to the static op."""
    bits = [
        0x3F800000,  # 1
        0x40490FDB,  # pi: every product is rounded
        0x3EAAAAAB,  # 1/3
        0x42E00000,  # 112
        0x00000001,  # smallest subnormal: scale_inv is inf
        0x007FFFFF,  # largest subnormal
        0x7F7FFFFF,  # FLT_MAX: scale_inv is subnormal
        0x7E967699,
        0x00000000,
        0x80000000,
        0x7F800000,  # inf
        0x7FC00000,  # NaN
        0xC0000000,  # -2
    ]
    return [from_raw(np.asarray(b, dtype=np.uint32), torch.float32) for b in bits]


# ---- layouts ----


def lay_out(flat: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """Tensor of `shape` with the elements `flat` in logical order (expanded: its first row)."""
    dense = flat[: math.prod(shape)].view(shape)
    rank = len(shape)
    if layout == "contiguous" or rank == 0 or math.prod(shape) == 0:
        return dense.clone()
    if layout == "transposed":
        return dense.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "rotated":  # dimension 0 is innermost: for rank 2 the same as transposed
        order, back = (*range(1, rank), 0), (rank - 1, *range(rank - 1))
        return dense.permute(order).contiguous().permute(back)
    if layout == "offset":
        room = dense.new_empty(dense.numel() + 3)
        room[3:] = dense.reshape(-1)
        return room[3:].view(shape)
    if layout == "strided":
        room = dense.new_zeros((*shape[:-1], 2 * shape[-1] + 1))
        view = room[..., 1::2]
        view.copy_(dense)
        return view
    if layout == "expanded":
        if rank == 1:
            return dense[:1].clone().expand(shape)
        return dense[:1].clone().expand(shape)
    raise ValueError(f"`layout` must be one of {LAYOUTS}, got {layout!r}")


def layouts_for(shape: tuple[int, ...]) -> Iterator[str]:
    """Layouts that differ from contiguous for this shape."""
    if len(shape) == 0 or math.prod(shape) <= 1:
        yield "contiguous"
        return
    yield from LAYOUTS if len(shape) > 1 else ("contiguous", "strided", "expanded", "offset")
