"""Attention of FP8 codes: schema, fake, routes and contract; opaque, without a gradient.

Definition: ``decompositions/attention.py``; kernel: ``kernels/triton/attention_fp8.py``; which of
the ways runs: ``_routes_attention.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inductor_ext.decompositions import attention as reference

from ..registry import register
from ..validation import INPUT_DTYPES, check_dtype, check_same_device, check_tensor
from ._library import LIBRARY, define
from ._routes_attention import Call, choose_attention, choose_attention_fp8
from .attention import Pair, as_rows, attention_by, call_of, check_attention, empty_result, samples

E4M3 = torch.float8_e4m3fn


def _check_scale(name: str, scale: Tensor, codes: Tensor, packed: bool) -> None:
    check_tensor(name, scale)
    check_dtype(name, scale.dtype, (torch.float32,))
    check_same_device(name, scale, "q", codes)
    if scale.numel() == 1:
        return
    heads = tuple(codes.shape[:2])
    blocks = (*heads, -(-codes.shape[2] // reference.BLOCK))
    if tuple(scale.shape) == heads or (tuple(scale.shape) == blocks and not packed):
        return
    with_blocks = "" if packed else f", or {blocks}, one a block of {reference.BLOCK} tokens"
    raise ValueError(
        f"`{name}` must have one element or the shape {heads}, one a head{with_blocks}, got "
        f"{tuple(scale.shape)}"
    )


def _all(rest: tuple[Any, ...]) -> Any:
    """Return offsets, offsets_k, scale, left, right, max_length, dtype and out_scale, all given."""
    return (*rest, *(-1, -1, -1, torch.bfloat16, None)[len(rest) - 3 :])


def check_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, *rest: Any
) -> None:
    """Raise TypeError or ValueError for arguments that attention of codes does not take."""
    *given, dtype, out_scale = _all(rest)
    check_attention(q, k, v, *given, dtypes=(E4M3,))
    check_dtype("dtype", dtype, INPUT_DTYPES if out_scale is None else (E4M3,))
    if out_scale is not None:
        check_tensor("out_scale", out_scale)
        check_dtype("out_scale", out_scale.dtype, (torch.float32,))
        check_same_device("out_scale", out_scale, "q", q)
        if out_scale.numel() != 1:
            raise ValueError(f"`out_scale` must have one element, got {tuple(out_scale.shape)}")
    packed = given[0] is not None
    _check_scale("q_scale", q_scale, q, packed)
    _check_scale("k_scale", k_scale, k, packed)
    _check_scale("v_scale", v_scale, v, packed)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, *rest: Any
) -> Pair:
    check_attention_fp8(q, k, v, q_scale, k_scale, v_scale, *rest)
    return empty_result(q, _all(rest)[-2])


def _run(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, *rest: Any
) -> Pair:
    *given, dtype, out_scale = _all(rest)
    scales = q_scale, k_scale, v_scale
    call = _call_of(q, k, scales, given)
    route, _ = choose_attention_fp8(call)
    if route == "cudnn_frontend":
        from ._cudnn_frontend import attention_fp8 as kernel

        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        unit = v_scale.reciprocal() if out_scale is None else out_scale
        codes, lse = kernel(q, k, v, scales, call.right == 0, given[2], unit)
        if out_scale is not None:
            return codes, lse
        return as_rows(dequantize_heads(codes, v_scale, dtype), dtype), lse
    if route == "math":
        exact: Pair = reference.attention_fp8(q, k, v, *scales, *given, dtype, out_scale)
        return exact
    if route == "triton":
        wide = dtype if out_scale is None else torch.bfloat16
        out, lse = _triton(call, q, k, v, scales, given, wide)
    else:
        wide = _wide(dtype)
        pairs = zip((q, k, v), scales, strict=True)
        q, k, v = (dequantize_heads(codes, s, wide) for codes, s in pairs)
        out, lse = attention_by(q, k, v, given)
    if out_scale is None:
        return as_rows(out, dtype), lse
    rows, scale = as_rows(out, wide).transpose(1, 2), out_scale.reshape(())
    quantize = torch.ops.inductor_ext.quantize_fp8_static.default
    return quantize(rows, scale, dtype)[0].transpose(1, 2), lse


def dequantize_heads(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``codes * scale``, laid out as the codes, in one kernel where it reads rows.

    Args:
        codes: (B, H, S, D). scale: as the op takes it.
    """
    batch, heads, tokens, dim = codes.shape
    blocks = scale.dim() == 3 and scale.shape[2] != 1
    for first, second, rows in ((1, 1, tokens), (1, 2, tokens), (2, 3, dim)):
        view = codes.transpose(first, second)
        if not view.is_contiguous() or (blocks and second == 3):
            continue
        if scale.numel() == 1:
            each = scale.reshape(())
        else:
            each = reference.each_row(scale, tokens).expand(batch, heads, rows, 1)
            each = (each.transpose(1, 2) if second == 2 else each).contiguous()
        wide: Tensor = torch.ops.inductor_ext.dequantize_fp8.default(view, each, dtype)
        return wide.transpose(first, second)
    return reference.dequantize(codes, scale, dtype)


def _call_of(q: Tensor, k: Tensor, scales: tuple[Tensor, ...], given: Any) -> Call:
    return call_of(q, k, given)._replace(whole=all(s.numel() == 1 for s in scales))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return what codes are dequantized to: 16 bits, which the fast back ends take."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _triton(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    given: Any,
    dtype: torch.dtype,
) -> Pair:
    from inductor_ext.kernels.triton import attention_fp8 as kernel

    offsets, offsets_k, scale, left, right, max_length = given
    out, lse = empty_result(q, dtype)
    packed = None
    if call.packed:
        packed = (offsets.contiguous(), (offsets if offsets_k is None else offsets_k).contiguous())
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    v = kernel.tokens_inside(v)
    longest = max_length if max_length > 0 else q.shape[2]
    kernel.launch(q, k, v, scales, packed, scale, left, right, longest, out, lse)
    return out, lse


attention_fp8 = define(
    "attention_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, "
    "Tensor? offsets, Tensor? offsets_k, float scale, int left=-1, int right=-1, "
    "int max_length=-1, ScalarType dtype=bfloat16, Tensor? out_scale=None) -> (Tensor, Tensor)",
    fake=_fake,
    reference=_run,
    compiled=False,
)


@torch.no_grad()  # as a compiled kernel: the op has no gradient rule
def _cuda(*args: Any) -> Pair:
    check_attention_fp8(*args)
    return _run(*args)


LIBRARY.impl("attention_fp8", _cuda, "CUDA")


def _inputs(device: torch.device) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator(device=device).manual_seed(1)
    rand = functools.partial(torch.rand, generator=generator, device=device)
    for number, sample in enumerate(samples(device, torch.float32)):
        offsets, offsets_k, scale, *window = sample[3:]
        codes = [(100 * t).to(E4M3) for t in sample[:3]]
        shapes = [t.shape[:2] if number % 2 else (1,) for t in codes]
        codes[2] = codes[2].mT.contiguous().mT  # as the kernel takes it fastest
        scales = [rand(shape) / 100 for shape in shapes]
        numbers = (*window, *(-1,) * (3 - len(window)))
        dtype = INPUT_DTYPES[number % 3]
        yield (*codes, *scales, offsets, offsets_k, scale, *numbers, dtype)
        yield (*codes, *scales, offsets, offsets_k, scale, *numbers, E4M3, 40 * rand(()))


def _why(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str:
    *given, dtype, _ = _all(rest[3:])
    call = _call_of(q, k, rest[:3], given)
    route, reason = choose_attention_fp8(call)
    if route != "dequantize":
        return f"{route}: {reason}"
    return f"dequantize: {reason}; then " + ": ".join(
        choose_attention(call._replace(dtype=_wide(dtype)))
    )


register(
    attention_fp8,
    reference=reference.attention_fp8,
    opaque=True,
    autograd=None,
    why=_why,
    inputs=_inputs,
    recomputable=False,
)
