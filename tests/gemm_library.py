"""What torch's GEMMs take and compute on a GPU, played on the CPU in float64.

The rules are those of torch 2.11 and cuBLASLt: layouts, multiples, alignments, the shapes, strides
and memory order of scales, dtypes of results and biases, and which card has which kernel.  A call
that a GPU would refuse, or that it would read wrongly, fails.  Scales are read out of memory as
cuBLASLt reads them, not by the tensor's shape.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cases
import numpy as np
import torch
from oracle import gemm as oracle
from torch import Tensor

from inductor_ext import ops

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TENSOR, ROW, B16, B32, VECTOR, SQUARE = range(6)  # torch.nn.functional.ScalingType
NOT_SWIZZLED, TILED = 0, 1


def forget_plans() -> None:
    """Let the ops ask again which device they are on."""
    kinds = (ops.scaled_mm, ops.scaled_mm_fp8_block, ops.scaled_mm_int8, ops.scaled_mm_mxfp8)
    for module in (*kinds, ops.scaled_mm_nvfp4):
        module.GEMM.forget()


class Library:
    """Counts the calls, by the kind of their scales."""

    def __init__(self, capability: tuple[int, int], refused: str = "") -> None:
        self.capability, self.refused = capability, refused
        self.calls: Counter[str] = Counter()
        self._mm, self._addmm = torch.mm, torch.addmm

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Stand in for torch's GEMMs, on what says that it is a GPU."""
        names = {"_scaled_mm": self.scaled_mm, "_scaled_mm_v2": self.scaled_mm_v2}
        names |= {"_int_mm": self.int_mm, "mm": self.mm, "addmm": self.addmm}
        where = "inductor_ext.ops._routes_gemm.capability_of"
        with mock.patch.multiple(torch, **names), mock.patch(where, return_value=self.capability):
            forget_plans()
            yield
        forget_plans()

    def scaled_mm(
        self, a: Tensor, bt: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None,
        scale_result: None, dtype: torch.dtype, fast_accum: bool, *, out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = _result(out, a, bt, dtype)
        assert self.capability >= (8, 9)
        assert scale_result is None
        m, n, k = self._check_codes(a, bt, out, FP8)
        assert dtype == out.dtype
        kinds = scale_a.dtype, scale_b.dtype
        if kinds == (torch.float8_e8m0fnu,) * 2:
            kind = "mx"
            assert self.capability >= (10, 0)
            factor_a, factor_b = (
                _tiles(s, rows, k, 32) for s, rows in ((scale_a, m), (scale_b, n))
            )
        else:
            assert kinds == (torch.float32,) * 2
            if scale_a.numel() == scale_b.numel() == 1:
                kind, factor_a, factor_b = "tensor", _np(scale_a), _np(scale_b)
            else:
                kind = "row"
                assert dtype == torch.bfloat16
                assert self.capability[0] == 9 or bt.dtype == torch.float8_e4m3fn
                assert scale_a.shape == (m, 1)
                assert scale_b.shape == (1, n)
                factor_a, factor_b = _np(_sound(scale_a)), _np(_sound(scale_b)).T
        self._count(kind)
        values = [oracle.fp8(cases.raw(t), cases.NAMES[t.dtype]) for t in (a, bt.t())]
        self._write(out, values[0] * factor_a, values[1] * factor_b, bias)
        return out

    def scaled_mm_v2(
        self, a: Tensor, bt: Tensor, scale_a: list[Tensor], recipe_a: list[int],
        swizzle_a: list[int], scale_b: list[Tensor], recipe_b: list[int], swizzle_b: list[int],
        bias: Tensor | None, dtype: torch.dtype, *, out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = _result(out, a, bt, dtype)
        assert dtype == out.dtype
        if recipe_a[0] == B16:
            assert swizzle_a == swizzle_b
            assert recipe_a == recipe_b
            self._nvfp4(a, bt, scale_a, scale_b, recipe_a, swizzle_a, bias, out)
            return out
        m, n, k = self._check_codes(a, bt, out, (torch.float8_e4m3fn,))
        assert self.capability[0] == 9
        assert bias is None, "not known whether cuBLASLt adds one"
        assert dtype in (torch.bfloat16, torch.float32)
        assert k % 128 == 0
        assert m % 4 == 0, "columns of scales begin on 16 bytes"
        assert swizzle_a == swizzle_b == []
        ((kind_a,), (kind_b,)) = recipe_a, recipe_b
        assert (kind_a, kind_b) in ((VECTOR, SQUARE), (VECTOR, VECTOR), (SQUARE, VECTOR))
        self._count(f"{kind_a}x{kind_b}")
        values = [oracle.fp8(cases.raw(t), cases.NAMES[t.dtype]) for t in (a, bt.t())]
        factors = [
            _blocks(scale[0], kind, rows, k)
            for scale, kind, rows in ((scale_a, kind_a, m), (scale_b, kind_b, n))
        ]
        self._write(out, values[0] * factors[0], values[1] * factors[1], None)
        return out

    def _nvfp4(
        self, a: Tensor, bt: Tensor, scale_a: list[Tensor], scale_b: list[Tensor],
        recipe: list[int], swizzle: list[int], bias: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        assert self.capability >= (10, 0)
        m, n, packed = self._check_codes(a, bt, out, (torch.float4_e2m1fn_x2,))
        two_levels = len(recipe) == 2
        assert recipe == ([B16, TENSOR] if two_levels else [B16])
        assert swizzle == ([TILED, NOT_SWIZZLED] if two_levels else [TILED])
        self._count("nvfp4" if two_levels else "nvfp4 without amax")
        sides = []
        for codes, scales, rows in ((a, scale_a, m), (bt.t(), scale_b, n)):
            value = oracle.e2m1(codes.view(torch.uint8).numpy())
            assert scales[0].dtype == torch.float8_e4m3fn
            factor = _tiles(scales[0], rows, 2 * packed, 16)
            if two_levels:
                assert scales[1].numel() == 1
                factor = factor * _np(scales[1]).reshape(())
            sides.append(value * factor)
        self._write(out, sides[0], sides[1], bias)

    def int_mm(self, a: Tensor, bt: Tensor) -> Tensor:
        assert a.dtype == bt.dtype == torch.int8
        (m, k), n = a.shape, bt.shape[1]
        assert m > 16
        assert k % 8 == n % 8 == 0 < k
        assert a.stride() == (k, 1)
        assert bt.stride() == (1, k)
        self._count("int8")
        value = a.double().numpy() @ bt.double().numpy()
        assert np.abs(value).max(initial=0) < 2**31
        return torch.from_numpy(value).to(torch.int32)

    def mm(self, a: Tensor, b: Tensor, **more: Any) -> Any:
        """bf16 to bf16 or (``out_dtype``) fp32, fp32 to fp32; float64 is the reference's."""
        out, out_dtype = more.pop("out", None), more.pop("out_dtype", a.dtype)
        assert not more
        assert a.dtype == b.dtype
        if a.dtype == torch.float64:
            return self._mm(a, b)
        assert (a.dtype, out_dtype) in (
            (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
        )  # fmt: skip
        self.calls[f"mm {a.dtype}"] += 1
        value = self._mm(a.double(), b.double()).float().to(out_dtype)
        if out is None:
            return value
        assert out.dtype == out_dtype
        return out.copy_(value)

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        assert a.dtype == b.dtype == bias.dtype == out.dtype
        self.calls[f"mm {a.dtype}"] += 1
        value = self._mm(a.double(), b.double()).float() + bias.float()
        return out.copy_(value)

    def _count(self, kind: str) -> None:
        """Note a call, and refuse it as cuBLASLt refuses sizes for which it has no kernel."""
        self.calls[kind] += 1
        if kind == self.refused:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul...`\n..."
            )

    def _check_codes(
        self, a: Tensor, bt: Tensor, out: Tensor, dtypes: tuple[torch.dtype, ...]
    ) -> tuple[int, int, int]:
        (m, k), n = a.shape, bt.shape[1]
        assert a.dtype in dtypes
        assert bt.dtype in dtypes
        assert not a.dtype == bt.dtype == torch.float8_e5m2
        assert 0 not in (m, n, k)
        assert k % 16 == n % 16 == 0
        assert a.stride() == (k, 1)
        assert bt.shape[0] == k
        assert bt.stride() == (1, k)
        assert out.shape == (m, n)
        assert out.is_contiguous()
        for tensor in (a, bt, out):
            _sound(tensor)
        return m, n, k

    @staticmethod
    def _write(out: Tensor, a: np.ndarray, b: np.ndarray, bias: Tensor | None) -> None:
        value = (a @ b.T).astype(np.float32)
        if bias is not None:
            assert out.dtype != torch.float32
            assert bias.dtype == out.dtype
            assert bias.shape == (b.shape[0],)
            value = value + cases.floats(_sound(bias))
        out.copy_(torch.from_numpy(value))


def _result(out: Tensor | None, a: Tensor, bt: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch's call without ``out`` makes."""
    return a.new_empty((a.shape[0], bt.shape[1]), dtype=dtype) if out is None else out


def _sound(tensor: Tensor) -> Tensor:
    """Require a 16-byte boundary, from which the kernels load, of what is no single number."""
    assert tensor.numel() == 1 or tensor.data_ptr() % 16 == 0
    assert tensor.is_contiguous() or tensor.t().is_contiguous()
    return tensor


def _np(scale: Tensor) -> np.ndarray:
    return cases.floats(scale).astype(np.float64)


def _memory(tensor: Tensor, count: int) -> np.ndarray:
    """The elements as they lie in memory from the tensor's first one on."""
    flat = tensor.as_strided((count,), (1,))
    if tensor.dtype == torch.float8_e8m0fnu:
        return oracle.e8m0(flat.view(torch.uint8).numpy())
    return cases.floats(flat).astype(np.float64)


def _tiles(scale: Tensor, rows: int, k: int, width: int) -> np.ndarray:
    blocks = -(-k // width)
    count = -(-rows // 128) * 128 * -(-blocks // 4) * 4
    assert scale.numel() == count
    assert scale.is_contiguous()
    tiles = oracle.of_tiles(_memory(_sound(scale), count), rows, k, width)
    return oracle.of_blocks(tiles, rows, k, 1, width)


def _blocks(scale: Tensor, kind: int, rows: int, k: int) -> np.ndarray:
    """1 x 128 scales lie M-major; 128 x 128 ones K-major in lines of round_up(K / 128, 4)."""
    assert scale.dtype == torch.float32
    blocks = -(-k // 128)
    _sound(scale)
    if kind == VECTOR:
        assert scale.shape == (rows, blocks)
        assert scale.stride() == (1, rows)
        memory = _memory(scale, rows * blocks).reshape(blocks, rows).T
        return oracle.of_blocks(memory, rows, k, 1, 128)
    line, high = -(-blocks // 4) * 4, -(-rows // 128)
    assert scale.shape == (line, high)
    assert scale.stride() == (1, line)
    return oracle.of_blocks(_memory(scale, line * high).reshape(high, line), rows, k, 128, 128)
