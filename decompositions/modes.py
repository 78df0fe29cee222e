"""Other libraries' conventions, in ATen: torchao 0.19's and vLLM's where they differ from ours.

Written from their published definitions (docs/formats.md, "Where others differ").  Divisions of
fp32 go through ``inductor_ext::div_rn``, which keeps its rounding when Inductor compiles it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .amax import amax_ignoring_nan
from .fp8 import saturate_cast
from .int8 import for_elements

_TRAINING_EPS = 1e-12
_LEAST_SCALE = 1.0 / (448.0 * 512.0)
_INT8_EPS = 2.0**-23
_E4M3_TINY = 2.0**-6


def div_rn(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a / b``, fp32, correctly rounded, where ``b`` broadcasts to the shape of ``a``."""
    return (a / b).contiguous()


def _divide(a: Tensor, b: Tensor | float) -> Tensor:
    other = b if isinstance(b, Tensor) else torch.full_like(a, b)
    a = a.expand(torch.broadcast_shapes(a.shape, other.shape))
    quotient: Tensor = torch.ops.inductor_ext.div_rn(a, other)
    return quotient


def quantize_fp8_mode(
    x: Tensor, dtype: torch.dtype, block: int, mode: str
) -> tuple[Tensor, Tensor]:
    """Quantize to FP8 by another library's rule.

    Args:
        x: (*, K) bfloat16, float16 or float32.
        dtype: float8_e4m3fn or float8_e5m2.
        block: 0 for one scale, -1 for one a row, or how many elements of a row share one.
        mode: "torchao_training", "torchao_inference" or "vllm".

    Returns:
        codes like ``x``; scale float32, 0-d, (*, 1) or (*, K / block).  It is the multiplier of
        dequantization, except in "torchao_training" with one scale or one a row: there it is that
        of quantization.  In torchao's modes a NaN makes its whole block NaN.
    """
    v, largest = x.float(), torch.finfo(dtype).max
    amax = _block_amax(v, block, ignore_nan=mode == "vllm")
    if mode == "torchao_training":
        scale = (largest / amax.double().clamp(min=_TRAINING_EPS)).float()
        codes = saturate_cast(v * _spread(scale, v, block), dtype)
        return codes, _divide(torch.ones_like(scale), scale) if block > 0 else scale
    scale = _divide(amax, largest)
    if mode == "vllm":
        scale = scale.clamp(min=_LEAST_SCALE)
    else:
        scale = _rounded(scale, x.dtype)
    return saturate_cast(_divide(v, _spread(scale, v, block)), dtype), scale


def quantize_mxfp8_mode(x: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    """Quantize to MXFP8 along rows as torchao's ``to_mx`` does: NaN and infinity poison a block.

    Args:
        x: (*, K) bfloat16, float16 or float32, K a multiple of 32.
        dtype: float8_e4m3fn or float8_e5m2.
        mode: "torchao_floor" or "torchao_rceil".

    Returns:
        codes like ``x``; scales uint8 (*, K / 32), e8m0: 255 where an element is not finite, and
        all codes of such a block are NaN.
    """
    v = x.float()
    amax = _block_amax(v, 32, ignore_nan=False)
    if mode == "torchao_floor":
        top = 8 if dtype == torch.float8_e4m3fn else 15
        exponent = (_exponent(amax) - top).clamp(min=0)
        finite = amax.isfinite()
    else:
        scaled = amax * (1.0 / torch.finfo(dtype).max)
        field, mantissa = _exponent(scaled), scaled.view(torch.int32) & 0x7FFFFF
        up = torch.where(field == 0, mantissa > 0x400000, mantissa != 0)
        exponent, finite = field + up.int(), scaled.isfinite()
    exponent = torch.where(finite, exponent, 255)
    bits = torch.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    inverse = torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)
    codes = saturate_cast(v * for_elements(inverse, 32, v.shape[-1]), dtype)
    return codes, exponent.to(torch.uint8)


def quantize_int8_mode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantize to INT8 as torchao's ``Int8Tensor`` does: amax / 127.5, codes -128..127.

    Args:
        x: (*, K) bfloat16, float16 or float32.
        block: 0 for one scale, -1 for one a row, or how many elements of a row share one.

    Returns:
        codes int8 like ``x``; scale float32, 0-d, (*, 1) or (*, K / block), rounded to the dtype
        of ``x``, at least 2**-23.  A NaN element makes the scale NaN and the block's codes 0.
    """
    v = x.float()
    scale = _rounded(_divide(_block_amax(v, block, ignore_nan=False), 127.5), x.dtype)
    scale = scale.clamp(min=_INT8_EPS)
    codes = (v * _spread(_divide(torch.ones_like(scale), scale), v, block)).round().clamp(-128, 127)
    return torch.where(codes.isnan(), 0.0, codes).to(torch.int8).contiguous(), scale


def quantize_nvfp4_mode(x: Tensor, global_scale: Tensor | None, mode: str) -> tuple[Tensor, Tensor]:
    """Quantize to NVFP4 along rows by another library's rule for the block scales.

    Args:
        x: (*, K) bfloat16, float16 or float32, K a multiple of 16.
        global_scale: float32, one element.  "torchao": amax / 2688, or None for block scales
            alone; "vllm": its reciprocal, 2688 / amax.
        mode: "torchao" (block scales are clamped to [2**-6, 448]) or "vllm".

    Returns:
        codes uint8 (*, K / 2), even index in the low nibble; scales float8_e4m3fn (*, K / 16).
        Codes of a block whose scale is NaN mean nothing.
    """
    v = x.float()
    amax = _block_amax(v, 16, ignore_nan=mode == "vllm")
    one = amax.new_ones(())
    outer = one if global_scale is None else global_scale.reshape(())
    if mode == "torchao":
        target = _divide(_divide(amax, 6.0), outer).clamp(_E4M3_TINY, 448.0)
        scale = saturate_cast(target, torch.float8_e4m3fn)
        inverse = _divide(_divide(one, outer), scale.float())
    else:
        scale = saturate_cast(outer * (amax * (1.0 / 6.0)), torch.float8_e4m3fn)
        stored = scale.float()
        inverse = _divide(torch.ones_like(stored), stored * _divide(one, outer))
        inverse = torch.where(stored == 0, 0.0, inverse)
    return _packed_e2m1(v * for_elements(inverse, 16, v.shape[-1])), scale


def _block_amax(v: Tensor, block: int, *, ignore_nan: bool) -> Tensor:
    """Return max |v| over everything (block 0), rows (-1) or ``block`` elements; 0 of nothing."""
    if block == 0:
        v = v.reshape(1, -1)
    elif block > 0:
        v = v.unflatten(-1, (v.shape[-1] // block, block))
    if ignore_nan:
        amax = amax_ignoring_nan(v, True)
    elif v.shape[-1] == 0 or v.numel() == 0:
        amax = v.new_zeros((*v.shape[:-1], 1))
    else:
        amax = v.abs().amax(-1, keepdim=True)
    return amax.reshape(()) if block == 0 else amax.squeeze(-1) if block > 0 else amax


def _spread(scale: Tensor, v: Tensor, block: int) -> Tensor:
    return for_elements(scale, block, v.shape[-1]) if block > 0 else scale


def _exponent(v: Tensor) -> Tensor:
    return (v.view(torch.int32) >> 23) & 0xFF


def _rounded(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 numbers of at least 0 to bf16 or fp16, in arithmetic that no compiler elides."""
    if dtype == torch.float32:
        return v
    bits = v.view(torch.int32)
    drop = 16 if dtype == torch.bfloat16 else 13
    half = (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)
    value = ((bits + half) & -(1 << drop)).view(torch.float32)
    if dtype == torch.float16:
        value = torch.where(value > 65504.0, float("inf"), value)
        # Below 2^-14 the grid is 2^-24 wide, which is that of fp32 in [0.5, 1).
        value = torch.where(v < 2.0**-14, (v + 0.5) - 0.5, value)
    return torch.where(v.isnan(), v, value)


def _packed_e2m1(v: Tensor) -> Tensor:
    """Round to 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code; pack two codes a byte."""
    mag = v.abs()
    code = (mag > 0.25).int() + (mag >= 0.75).int() + (mag > 1.25).int() + (mag >= 1.75).int()
    code = code + (mag > 2.5).int() + (mag >= 3.5).int() + (mag > 5.0).int()
    code = code | ((v.view(torch.int32) >> 28) & 8)
    pairs = code.unflatten(-1, (code.shape[-1] // 2, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8).contiguous()
