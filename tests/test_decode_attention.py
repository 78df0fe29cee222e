"""Attention over a KV cache: against float64, the Triton kernels, routes, refused."""

from __future__ import annotations

import itertools
from typing import Any

import decode_interpreter
import kv
import pytest
import torch
from test_rope import refuse
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu
from inductor_ext.ops._routes_decode import choose_decode_attention, splits_for

triton = pytest.importorskip("triton")

SHAPE = (3, 2, 40, 32)
LENGTHS = (40, 1, 23)
CASES = [
    (kind, page, kv.DTYPES[n % 3], (1, 3)[n % 2], (1, 4)[n // 2 % 2], (0, 5)[n // 3 % 2])
    for n, (kind, page) in enumerate(itertools.product(kv.FORMATS, (0, 8)))
]
"""(format, page, dtype, queries, heads that share one, window)"""


def queries(shape: Any, dtype: torch.dtype, count: int, group: int) -> Tensor:
    b, h, _, d = shape
    return kv.randn(b, count, h * group, d, seed=2).to(dtype).transpose(1, 2)


def require_close(got: Any, true: Any, dtype: torch.dtype) -> None:
    """``kv.attended``'s bounds, and a rounding of the output: an ulp, which is 2^-7 of bf16."""
    out, lse, bound, lse_bound = true
    out_got, lse_got = (t.cpu() for t in got)
    assert (out_got.dtype, lse_got.dtype) == (dtype, torch.float32)
    rounding = torch.finfo(dtype).eps * out.abs() + torch.finfo(dtype).tiny
    error = (out_got.double() - out).abs()
    assert (error <= bound + rounding).all(), float((error / (bound + rounding)).max())
    seen = lse != float("-inf")
    assert torch.equal(lse_got == float("-inf"), ~seen)
    assert ((lse_got.double() - lse).abs()[seen] <= lse_bound[seen]).all()
    assert not out_got[~seen].any()


@pytest.mark.parametrize(("kind", "page", "dtype", "count", "group", "window"), CASES, ids=str)
def test_within_the_bound_of_float64(
    kind: str, page: int, dtype: torch.dtype, count: int, group: int, window: int
) -> None:
    """NaN lies behind the lengths; the second sequence has fewer tokens than there are queries."""
    cache = kv.filled(kind, dtype, page, SHAPE, LENGTHS)
    q = queries(SHAPE, dtype, count, group)
    got = ixt.decode_attention(q, cache, scale=0.3, window=window or None, return_lse=True)
    require_close(got, kv.attended(q, cache, 0.3, window), dtype)


def test_nothing_there() -> None:
    for shape in ((2, 2, 0, 8), (0, 2, 4, 8), (2, 2, 4, 8)):
        cache = ixt.KVCache.contiguous(*shape)
        q = torch.ones(shape[0], 4, 2, 8).bfloat16()
        out, lse = ixt.decode_attention(q, cache, return_lse=True)
        assert out.shape == q.shape
        assert not out.any()
        assert (lse == float("-inf")).all()
    cache.lengths.fill_(5)
    with pytest.raises(ValueError, match="`lengths` must be at most 4, what the cache holds of a"):
        ixt.decode_attention(q, cache)


# What a GPU runs, in small: every format, page size, group and head size, splits of all lengths.
KERNEL = [
    ("plain", torch.float32, 0, (2, 2, 90, 64), (90, 17), 1, 2, 0, 1),
    ("plain", torch.float32, 16, (2, 1, 200, 96), (200, 3), 3, 4, 0, 3),
    ("plain", torch.bfloat16, 0, (1, 1, 150, 128), (150,), 1, 8, 70, 2),
    ("plain", torch.float16, 8, (1, 2, 70, 192), (66,), 2, 1, 0, 4),
    ("e4m3 row", torch.bfloat16, 16, (2, 1, 130, 64), (130, 64), 2, 4, 0, 2),
    ("e4m3 given", torch.bfloat16, 0, (1, 1, 100, 96), (100,), 1, 2, 0, 1),
    ("e5m2 row", torch.float16, 0, (1, 1, 70, 32), (70,), 1, 2, 30, 2),
    ("int8 row", torch.bfloat16, 16, (1, 1, 70, 256), (70,), 1, 2, 0, 2),
    ("int8 row", torch.float32, 0, (1, 1, 70, 7), (60,), 1, 70, 0, 2),
    ("plain", torch.float32, 0, (1, 1, 8, 16), (0,), 1, 1, 0, 2),
    ("plain", torch.float32, 16, (1, 1, 96, 16), (96,), 3, 1, 20, 2),
    ("plain", torch.float32, 8, (2, 1, 40, 16), (43, 40), 2, 1, 0, 2),  # more than it holds
]


def kernel_case(case: Any) -> tuple[ixt.KVCache, Tensor]:
    kind, dtype, page, shape, lengths, count, group, _, _ = case
    return kv.filled(kind, dtype, page, shape, lengths), queries(shape, dtype, count, group)


def weights_error(case: Any) -> float:
    """The relative error of the weights' cast; the interpreter cuts off, a whole ulp."""
    kind, dtype = case[:2]
    if dtype == torch.float16 and kind != "plain":
        dtype = torch.bfloat16
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps


def test_the_kernels_in_the_interpreter() -> None:
    calls, true = [], []
    for case in KERNEL:
        cache, q = kernel_case(case)
        window, splits = case[-2:]
        tensors = (q, *cache[:3], cache.block_table, cache.k_scale, cache.v_scale)
        calls.append((*tensors, 0.3, window, splits))
        true.append((*kv.attended(q, cache, 0.3, window, weights_error(case)), q.dtype))
    for case, got, (*want, dtype) in zip(KERNEL, decode_interpreter.run(calls), true, strict=True):
        print(case)
        require_close(got, want, dtype)


def _compiled(function: Any, types: dict[str, str], constants: dict[str, Any], target: int) -> Any:
    """Compile a kernel for a GPU that is not there; what is not said is an int32."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()})
    options = {"num_warps": 4, "num_stages": 2}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
         kv.E4M3: "*fp8e4nv", kv.E5M2: "*fp8e5", torch.int8: "*i8"}  # fmt: skip
PTX = [
    (90, torch.bfloat16, torch.bfloat16, 128, 1, 0), (90, torch.bfloat16, kv.E4M3, 64, 16, 0),
    (90, torch.bfloat16, kv.E4M3, 96, 0, 1), (90, torch.bfloat16, torch.int8, 192, 16, 0),
    (90, torch.float16, kv.E5M2, 256, 0, 0), (90, torch.float32, torch.float32, 64, 16, 1),
    (80, torch.bfloat16, torch.int8, 128, 16, 0),
]  # fmt: skip


@pytest.mark.parametrize(("target", "q", "cache", "head", "page", "window"), PTX, ids=str)
def test_ptxas_takes_it(
    target: int, q: torch.dtype, cache: torch.dtype, head: int, page: int, window: int
) -> None:
    from inductor_ext.kernels.triton import decode_attention as kernels

    rows = cache.itemsize == 1
    blocks = kernels.sizes(head, 8)
    types = {"q": TYPES[q], "k": TYPES[cache], "v": TYPES[cache], "out": "*fp32", "lse": "*fp32",
             "lengths": "*i32", "scale": "fp32", "k_scale": "*fp32", "v_scale": "*fp32",
             "table": "*i32"}  # fmt: skip
    constants = {
        **blocks, "D": head, "PAGED": page > 0, "WINDOW": window > 0,
        "K_SCALE": kernels.ROWS if rows else 0, "V_SCALE": kernels.ROWS if rows else 0,
        "WEIGHTS": kernels._TYPES[kernels.weights_dtype(q, cache)], "PRECISION": "ieee",
        "WHOLE": False, **({} if rows else {"k_scale": None, "v_scale": None}),
        **({} if page else {"table": None}),
    }  # fmt: skip
    made = _compiled(kernels.attend, types, constants, target)
    assert "mma" in made.asm["ptx"] or q == torch.float32
    assert made.metadata.shared <= {80: 163, 90: 227}[target] * 1024
    if target == 90:
        types = {"parts": "*fp32", "part_lse": "*fp32", "out": TYPES[q], "lse": "*fp32"}
        constants = {"D": head, "BLOCK_D": blocks["BLOCK_D"], "BLOCK_S": 64}
        assert _compiled(kernels.combine, types, constants, target).asm["cubin"]


def test_routes() -> None:
    bf16, f16 = torch.bfloat16, torch.float16
    with ixt.config.patch(decode_attention="triton"):
        assert choose_decode_attention("cuda", (9, 0), bf16, kv.E4M3, 128)[0] == "triton"
        for device, card, q, cache, head, why in (
            ("cpu", (0, 0), bf16, bf16, 128, "written for CUDA, not for cpu"),
            ("cuda", (8, 0), bf16, kv.E4M3, 128, "reads float8 from sm_89 on, this is sm_80"),
            ("cuda", (9, 0), bf16, bf16, 320, "heads of at most 256, got 320"),
            ("cuda", (9, 0), f16, bf16, 128, "queries of the cache's dtype"),
        ):
            route, reason = choose_decode_attention(device, card, q, cache, head)
            assert route == "reference"
            assert why in reason
    for pin, route in (("auto", "triton"), ("reference", "reference")):
        with ixt.config.patch(decode_attention=pin):
            assert choose_decode_attention("cuda", (9, 0), bf16, bf16, 128)[0] == route
    with pytest.raises(ValueError, match='must be one of "auto", "triton", "reference"'):
        ixt.config.decode_attention = "flash"
    assert splits_for(64 * 8, 32768, 132) == 1
    assert splits_for(8, 32768, 132) == 33
    assert splits_for(1, 1 << 20, 132) == 64
    assert splits_for(8, 300, 132) == 2
    assert splits_for(0, 0, 132) == 1


def test_a_record_says_which_kernel_and_why() -> None:
    cache, q = ixt.KVCache.contiguous(2, 3, 8, 16), torch.ones(2, 6, 1, 16).bfloat16()
    for pin, said in (("auto", "triton: 4 to 40 times"), ("triton", "triton: config")):
        ixt.clear_records()
        with ixt.config.patch(enabled=True, decode_attention=pin), torch.no_grad():
            fake_gpu.capture(ixt.decode_attention, (q, cache), "sm_90")
        (record,) = ixt.records()
        assert record.reason.startswith(said)


CACHE = ixt.KVCache.contiguous(2, 3, 8, 16)
ROWS = ixt.KVCache.contiguous(2, 3, 8, 16, ixt.FP8())
Q = torch.ones(2, 6, 1, 16).bfloat16()
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "q's dtype": ((Q.double(), CACHE), {}, "`q` must be bfloat16, float16 or float32, got float64"),
    "q's shape": ((Q[..., :8], CACHE), {}, r"`q` must have the shape \(B, Hq, n, 16\), got"),
    "heads": ((Q[:, :4], CACHE), {}, "`q` must have a multiple of the cache's heads, 3, got 4"),
    "batch": ((Q[:1], CACHE), {}, r"`lengths` must have the shape \(1,\), got \(2,\)"),
    "scales": (
        (Q, CACHE._replace(k_scale=torch.ones(()))), {}, "`k_scale` must be None for a cache"
    ),
    "scales' shape": (
        (Q, ROWS._replace(v_scale=ROWS.v_scale[:1])), {},  # type: ignore[index]
        r"`v_scale` must have the shape \(2, 3, 8, 1\)",
    ),
    "window": ((Q, CACHE), {"window": 0}, "`window` must be above 0, got 0"),
    "scale": ((Q, CACHE), {"scale": float("nan")}, "`scale` must be finite, got nan"),
    "gradient": ((Q.clone().requires_grad_(), CACHE), {}, "`q` must not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    args, options, words = BAD[case]
    call = lambda *a: ixt.decode_attention(*a, **options)  # noqa: E731
    refuse(call, args, words, compiled=case == "heads")
