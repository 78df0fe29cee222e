"""What ``bench kernels`` measures: every op that has a CUDA kernel, in its variants, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CASES", "Case", "Input", "Source", "inputs"]


@dataclass(frozen=True)
class Input:
    """A tensor that a case takes, by its name in :func:`inputs` or among a source's results."""

    name: str


@dataclass(frozen=True)
class Source:
    """The quantize op whose results, "codes", "scales" and "zero", a dequantize op takes."""

    op: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One op with its arguments.

    Attributes:
        goal: percent of a copy's speed that issue 3 asks for at 16384 x 8192; None for no goal.
        reads: how often the floor counts ``x``: 2 where its amax is needed before any code.
        source: for dequantize ops.
    """

    family: str
    name: str
    op: str
    arguments: tuple[Any, ...]
    goal: int | None = None
    reads: int = 1
    source: Source | None = None

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


X, SCALE, AMAX, ROWS, COLUMNS, RNG = map(Input, ("x", "scale", "amax", "rows", "columns", "rng"))
HISTORY, SCALES_OF_HISTORY = Input("history"), Input("scales_of_history")
OTHER, THIRD, WEIGHT, RSTD = map(Input, ("other", "third", "weight", "rstd"))
CODES, SCALES, ZERO = Input("codes"), Input("scales"), Input("zero")
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
_FLOAT = (0.0, False)
"""No eps, scales that are no powers of two."""
_GEMM = (False, *_FLOAT, "gemm")
_MX_GEMM = (False, "ceil", "gemm")


def inputs(shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of the cases for ``x`` of this shape, bfloat16 and random normal."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, dtype=BF16)
    return {
        "x": x,
        "scale": torch.tensor(37.5, device=device),
        "amax": x.abs().amax().float(),
        "rows": x.abs().amax(1, keepdim=True).float(),
        "columns": x.abs().amax(0).float().view(-1, 1),
        "rng": torch.tensor([1, 2], device=device),
        "history": torch.rand(1024, 300, device=device),
        "scales_of_history": torch.rand(300, device=device),
        "other": torch.randn(shape, device=device, dtype=BF16),
        "third": torch.randn(shape, device=device, dtype=BF16),
        "weight": torch.randn(shape[1], device=device, dtype=BF16),
        "rstd": torch.rand(shape[0], 1, device=device),
    }


def _block(m: int, k: int, *rest: Any) -> tuple[Any, ...]:
    return (X, E4M3, m, k, *rest)


def _fp8() -> list[Case]:
    static, tensor, row = "quantize_fp8_static", "quantize_fp8_tensor", "quantize_fp8_row"
    column, block, pair = "quantize_fp8_column", "quantize_fp8_block", "quantize_fp8_block_both"
    return [
        Case("FP8", "static", static, (X, SCALE, E4M3), 95),
        Case("FP8", "static both", static + "_both", (X, SCALE, E4M3), 90),
        Case("FP8", "tensor", tensor, (X, E4M3), 93, reads=2),
        Case("FP8", "tensor both", tensor + "_both", (X, E4M3), 90, reads=2),
        Case("FP8", "row", row, (X, E4M3), 93),
        Case("FP8", "column", column, (X, E4M3), reads=2),
        Case("FP8", "column transposed", column, (X, E4M3, True), reads=2),
        Case("FP8", "1x128", block, _block(1, 128), 93),
        Case("FP8", "1x128 gemm", block, _block(1, 128, *_GEMM), 93),
        Case("FP8", "1x32", block, _block(1, 32)),
        Case("FP8", "128x1", block, _block(128, 1)),
        Case("FP8", "128x1 transposed", block, _block(128, 1, True)),
        Case("FP8", "128x1 transposed gemm", block, _block(128, 1, True, *_GEMM[1:])),
        Case("FP8", "1x128 both", pair, (X, E4M3, 128, False), 88),
        Case("FP8", "1x128 both gemm", pair, (X, E4M3, 128, *_GEMM), 88),
        Case("FP8", "1x32 both", pair, (X, E4M3, 32, False)),
        Case("FP8", "128x128", block, _block(128, 128), 93),
        Case("FP8", "128x128 gemm", block, _block(128, 128, *_GEMM), 93),
        Case("FP8", "128x128 transposed", block, _block(128, 128, True)),
        Case("FP8", "128x128 both", pair, (X, E4M3, 128, True), 90),
        Case("FP8", "128x128 both gemm", pair, (X, E4M3, 128, True, *_FLOAT, "gemm"), 90),
    ]


def _mxfp8() -> list[Case]:
    op, pair = "quantize_mxfp8", "quantize_mxfp8_both"
    return [
        Case("MXFP8", "K", op, _block(1, 32), 93),
        Case("MXFP8", "K gemm", op, _block(1, 32, *_MX_GEMM), 93),
        Case("MXFP8", "M", op, _block(32, 1)),
        Case("MXFP8", "M gemm", op, _block(32, 1, *_MX_GEMM)),
        Case("MXFP8", "M transposed", op, _block(32, 1, True), 85),
        Case("MXFP8", "M transposed gemm", op, _block(32, 1, True, *_MX_GEMM[1:]), 85),
        Case("MXFP8", "both", pair, (X, E4M3, False), 85),
        Case("MXFP8", "both gemm", pair, (X, E4M3, False, True, "ceil", "gemm"), 85),
        Case("MXFP8", "both, not transposed", pair, (X, E4M3, False, False)),
        Case("MXFP8", "32x32", op, _block(32, 32)),
        Case("MXFP8", "32x32 gemm", op, _block(32, 32, *_MX_GEMM)),
        Case("MXFP8", "32x32 both", pair, (X, E4M3, True)),
        Case("MXFP8", "32x32 both gemm", pair, (X, E4M3, True, True, "ceil", "gemm")),
    ]


def _nvfp4() -> list[Case]:
    op, pair = "quantize_nvfp4", "quantize_nvfp4_both"
    k, m, square = (X, AMAX, 1, 16, False), (X, AMAX, 16, 1, True), (X, AMAX, 16, 16)
    both = (X, AMAX, AMAX, False, "gemm")
    return [
        Case("NVFP4", "K", op, k, 90),
        Case("NVFP4", "K gemm", op, (*k, "gemm"), 90),
        Case("NVFP4", "K gemm, amax of rows", op, (X, ROWS, 1, 16, False, "gemm")),
        Case("NVFP4", "K gemm, stochastic", op, (*k, "gemm", False, RNG)),
        Case("NVFP4", "K gemm, Hadamard", op, (*k, "gemm", True)),
        Case("NVFP4", "M transposed", op, m),
        Case("NVFP4", "M transposed gemm", op, (*m, "gemm")),
        Case("NVFP4", "M transposed gemm, amax of columns", op, (X, COLUMNS, 16, 1, True, "gemm")),
        Case("NVFP4", "M transposed gemm, stochastic", op, (*m, "gemm", False, RNG)),
        Case("NVFP4", "M transposed gemm, Hadamard", op, (*m, "gemm", True)),
        Case("NVFP4", "16x16", op, square),
        Case("NVFP4", "16x16 gemm", op, (*square, False, "gemm")),
        Case("NVFP4", "16x16 transposed gemm", op, (*square, True, "gemm")),
        Case("NVFP4", "both", pair, both[:4]),
        Case("NVFP4", "both gemm", pair, both),
        Case("NVFP4", "both gemm, stochastic", pair, (*both, False, RNG)),
        Case("NVFP4", "both gemm, Hadamard", pair, (*both, True)),
        Case("NVFP4", "16x16 both gemm", pair, (X, AMAX, AMAX, True, "gemm")),
        Case("NVFP4", "amax of the Hadamard transform along K", "amax_hadamard", (X, False)),
        Case("NVFP4", "amax of the Hadamard transform along M", "amax_hadamard", (X, True)),
    ]


def _integers() -> list[Case]:
    symmetric, asymmetric = "quantize_int4_symmetric", "quantize_int4_asymmetric"
    update = (HISTORY, SCALES_OF_HISTORY, E4M3)
    return [
        Case("INT8", "tensor", "quantize_int8_tensor", (X,), reads=2),
        Case("INT8", "row", "quantize_int8_row", (X,), 93),
        Case("INT8", "1x128", "quantize_int8_group", (X, 128)),
        Case("INT8", "1x32", "quantize_int8_group", (X, 32)),
        Case("INT4", "symmetric 128", symmetric, (X, 128)),
        Case("INT4", "symmetric 32", symmetric, (X, 32)),
        Case("INT4", "asymmetric 128", asymmetric, (X, 128)),
        Case("INT4", "asymmetric 32", asymmetric, (X, 32)),
        Case("amax", "tensor", "amax", (X,)),
        Case("amax", "row", "amax_row", (X,)),
        Case("scale update", "300 of 1024", "update_fp8_scale", update),
        Case("scale update", "300 of 1024, in place", "update_fp8_scale_", update),
    ]


def _dequantize() -> list[Case]:
    """Return a case per dequantize op and kind of scales; issue 3's goal is the same for all."""
    fp8, block, mx, nv = (f"dequantize_{n}" for n in ("fp8", "fp8_block", "mxfp8", "nvfp4"))
    nv_of, sym, asym = "quantize_nvfp4", "quantize_int4_symmetric", "quantize_int4_asymmetric"
    pair, tail, nv_tail = (CODES, SCALES), (BF16, "gemm"), (CODES, SCALES, AMAX)
    kinds: list[tuple[str, str, str, tuple[Any, ...], str, tuple[Any, ...]]] = [
        ("FP8", "tensor", fp8, (*pair, BF16), "quantize_fp8_tensor", (X, E4M3)),
        ("FP8", "row", fp8, (*pair, BF16), "quantize_fp8_row", (X, E4M3)),
    ]
    for m, k in ((1, 128), (128, 1), (128, 128)):
        source = "quantize_fp8_block", _block(m, k)
        kinds.append(("FP8", f"{m}x{k}", block, (*pair, m, k, BF16), *source))
    for m, k in ((1, 128), (128, 128)):
        source = "quantize_fp8_block", _block(m, k, *_GEMM)
        kinds.append(("FP8", f"{m}x{k} gemm", block, (*pair, m, k, *tail), *source))
    for name, m, k in (("K", 1, 32), ("M", 32, 1), ("32x32", 32, 32)):
        plain, gemm = _block(m, k), _block(m, k, *_MX_GEMM)
        kinds.append(("MXFP8", name, mx, (*pair, m, k, BF16), "quantize_mxfp8", plain))
        kinds.append(("MXFP8", f"{name} gemm", mx, (*pair, m, k, *tail), "quantize_mxfp8", gemm))
    for name, m in (("K", 1), ("16x16", 16)):
        plain, gemm = (X, AMAX, m, 16), (X, AMAX, m, 16, False, "gemm")
        kinds.append(("NVFP4", name, nv, (*nv_tail, m, 16, BF16), nv_of, plain))
        kinds.append(("NVFP4", f"{name} gemm", nv, (*nv_tail, m, 16, *tail), nv_of, gemm))
    for name, group, source in (
        ("tensor", 0, ("quantize_int8_tensor", (X,))),
        ("row", 0, ("quantize_int8_row", (X,))),
        ("1x128", 128, ("quantize_int8_group", (X, 128))),
    ):
        kinds.append(("INT8", name, "dequantize_int8", (*pair, group, BF16), *source))
    int4 = "dequantize_int4"
    kinds.append(("INT4", "symmetric 128", int4, (*pair, None, 128, BF16), sym, (X, 128)))
    kinds.append(("INT4", "asymmetric 128", int4, (*pair, ZERO, 128, BF16), asym, (X, 128)))
    return [
        Case(family, f"dequantize {name}", op, arguments, 93, source=Source(of, of_arguments))
        for family, name, op, arguments, of, of_arguments in kinds
    ]


def _own() -> list[Case]:
    """Return the norms and activations, ``x`` and a second tensor like it among their inputs."""
    statistics, norm_gradient = (X, WEIGHT, RSTD), (OTHER, X, WEIGHT)
    return [
        Case("norm", "RMSNorm", "rms_norm", (X, WEIGHT)),
        Case("norm", "RMSNorm of a sum", "add_rms_norm", (X, OTHER, WEIGHT)),
        Case("norm", "RMSNorm backward", "rms_norm_backward", (OTHER, *statistics)),
        Case("norm", "LayerNorm", "layer_norm", (X, WEIGHT, WEIGHT)),
        Case(
            "norm", "LayerNorm backward", "layer_norm_backward",
            (*norm_gradient, WEIGHT, RSTD, RSTD),
        ),
        *(
            case
            for op, rest in (("silu", ()), ("gelu", ("none",)), ("relu2", ()))
            for case in (
                Case("activation", op, op, (X, *rest)),
                Case("activation", f"{op} backward", f"{op}_backward", (OTHER, X, *rest)),
            )
        ),
        *(
            case
            for op, rest in (("swiglu", ()), ("geglu", ("none",)))
            for case in (
                Case("activation", op, op, (X, OTHER, *rest)),
                Case("activation", f"{op} backward", f"{op}_backward", (OTHER, X, THIRD, *rest)),
            )
        ),
    ]  # fmt: skip


_FAMILIES = ("FP8", "MXFP8", "NVFP4", "INT8", "INT4", "amax", "scale update", "norm", "activation")
_ALL = (*_fp8(), *_mxfp8(), *_nvfp4(), *_integers(), *_dequantize(), *_own())
CASES = tuple(sorted(_ALL, key=lambda case: _FAMILIES.index(case.family)))
"""All cases, by family; in a family, dequantize ops come last."""
