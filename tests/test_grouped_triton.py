"""The Triton kernels of grouped products without a GPU: indices and masks in Triton's interpreter,
in a process of its own (this file, started as a program), and PTX for sm_90."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

WIDTH = 128


E4M3 = torch.float8_e4m3fn


def integers(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randint(-2, 3, shape).float().to(dtype)


def powers(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-2, 3, shape).float())


def spread(scale: Tensor, height: int, width: int, rows: int, columns: int) -> Tensor:
    tall = scale.repeat_interleave(height, -2)[..., :rows, :]
    return tall.repeat_interleave(width, -1)[..., :columns]


def groups(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, count in enumerate(counts):
        yield e, slice(start, start + count)
        start += count


def rows(kernel: Any, counts: list[int], k: int, height: int, tiles: Any) -> None:
    """``height`` 0: a scale a row of K; else of ``height`` x 128."""
    total, experts, n = 45, len(counts), 70
    across = -(-k // WIDTH) if height else 1
    a, b = integers(total, k), integers(experts, n, k)
    scale_a = powers(total, across)
    scale_b = powers(experts, -(-n // max(height, 1)), across)
    width = WIDTH if height else k
    out, offsets = torch.full((total, n), torch.nan), torch.tensor(counts).cumsum(0).int()
    given = (a, b, scale_a, scale_b, offsets, out, max(height, 1), bool(height), False, tiles)
    kernel.rows_product(*given)
    wide_a = a.float() * spread(scale_a, 1, width, total, k)
    wide_b = b.float() * spread(scale_b, max(height, 1), width, n, k)
    want = torch.zeros(total, n)
    for e, mine in groups(counts):
        want[mine] = wide_a[mine] @ wide_b[e].t()
    assert torch.equal(out, want), (counts, k, height)


def columns(kernel: Any, counts: list[int], total: int, height: int, tiles: Any) -> None:
    m, n, experts = 20, 70, len(counts)
    across = -(-total // WIDTH) if height else 1
    a, b = integers(m, total), integers(n, total)
    shape = (experts, m, 1) if not height else (m, across)
    scale_a = powers(*shape).expand(experts, m, across)
    scale_b = powers(-(-n // max(height, 1)), across).expand(experts, -1, -1)
    width = WIDTH if height else total
    out, offsets = torch.full((experts, m, n), torch.nan), torch.tensor(counts).cumsum(0).int()
    given = (a, b, scale_a, scale_b, offsets, out, max(height, 1), bool(height), False, tiles)
    kernel.columns_product(*given)
    wide_a = a.float() * spread(scale_a, 1, width, m, total)  # (E, M, T)
    wide_b = b.float() * spread(scale_b, max(height, 1), width, n, total)
    want = torch.zeros(experts, m, n)
    for e, mine in groups(counts):
        want[e] = wide_a[e][:, mine] @ wide_b[e][:, mine].t()
    assert torch.equal(out, want), (counts, total, height)


def rest(kernel: Any) -> None:
    """Rows of no expert, and offsets that no one should give."""
    out = kernel.zero_tail(torch.ones(77, 300), torch.tensor([3, 20, 50]).int())
    assert (out[:50] == 1).all()
    assert (out[50:] == 0).all()
    rising = kernel.rising(torch.tensor([-5, 50, 20, 500]).int(), 77)
    assert rising.tolist() == [0, 50, 50, 77]


def librarys(
    a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, *rest: Any
) -> Tensor:
    """Stand in for torch's kernel: what it takes, and rows of no expert left as they were."""
    assert rest == (None, None, torch.bfloat16, True)
    assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (b_t.shape[0], b_t.shape[2]))
    out = torch.full((a.shape[0], b_t.shape[2]), torch.nan)
    start = 0
    for e, end in enumerate(offsets.tolist()):
        product = a[start:end].float() @ b_t[e].float()
        out[start:end] = product * scale_a[start:end, None] * scale_b[e]
        start = end
    return out.bfloat16()


def whole(kernel: Any) -> None:
    """The ops' CUDA implementations, from their arguments on, against the definition.

    Results of ours are not bfloat16: the interpreter does not round to it as a GPU does.
    """
    from inductor_ext.ops import scaled_grouped_mm as family

    family.capability_of = lambda _: (9, 0)
    torch._scaled_grouped_mm = librarys
    kernel.tiles_for = kernel.tiles_of_columns = lambda _: kernel.Tiles(16, 64, 4, 1)
    offsets = torch.tensor([0, 7, 5, 30]).int()
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    x, w = integers(33, 64), integers(4, 48, 64)
    columns = integers(20, 33), integers(18, 33, dtype=torch.float8_e5m2)
    one, rows_of, stacked = powers(), powers(33, 1), powers(4, 48, 1)
    for args in (
        (x, w, rows_of, stacked, offsets, bf16, True),  # torch's
        (x, w, one, one, offsets, bf16, True),
        (x, w, rows_of, powers(4, 1, 1), offsets, fp16),  # ours
        (x, w[:, :45], one, powers(4, 45, 1), offsets, fp32),
        (*columns, powers(20, 1), powers(4, 18, 1), offsets, fp16),
        (*columns, powers(4, 20, 1), one, offsets, fp32),
    ):
        assert torch.equal(family._cuda(*args), family.reference.scaled_grouped_mm(*args))
    x, w = integers(33, 200), integers(4, 140, 200)
    definition = family.reference.scaled_grouped_mm_fp8_block
    for args in (
        (x, w, powers(33, 2), powers(4, 2, 2), offsets, fp16),
        (x, w, powers(2, 33).t(), powers(4, 140, 2), offsets, fp32),
        (*columns, powers(20, 1), powers(18, 1), offsets, fp32),
    ):
        assert torch.equal(family._cuda_block(*args), definition(*args))


def interpret() -> None:
    import triton.runtime.interpreter as interpreter

    from inductor_ext.kernels.triton import scaled_grouped_mm as kernel

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # numpy 2.4 makes no int of an array of one
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    kernel._on = lambda _: contextlib.nullcontext()
    kernel._capability = lambda _: (9, 0)
    made = kernel.TensorDescriptor.from_tensor
    described: list[Tensor] = []
    kernel.TensorDescriptor.from_tensor = lambda t, block: described.append(t) or made(t, block)
    torch.manual_seed(0)
    tiles = kernel.Tiles(16, 64, 4, 1)
    for counts, k in (([0, 5, 30, 3], 256), ([45, 0], 200), ([0, 0, 0], 7), ([10, 35], 128)):
        for height in (0, 128):
            rows(kernel, counts, k, height, tiles)
    for counts, total in (
        ([0, 5, 40, 20], 77), ([128, 128, 0, 44], 300), ([100, 170, 257], 530), ([130, 0, 9], 150),
    ):  # fmt: skip
        for height in (0, 1):
            columns(kernel, counts, total, height, tiles)
    tma = tiles._replace(tma=True)
    for counts, k in (([0, 5, 30, 3], 256), ([45, 0], 144), ([1, 2, 3], 7)):  # 7: by pointers
        for height in (0, 128):
            rows(kernel, counts, k, height, tma)
    assert len(described) == 8  # two operands of four products
    rest(kernel)
    whole(kernel)


def test_indices_and_masks() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def compiled(fn: Any, constants: dict[str, Any], tiles: Any) -> Any:
    """Compile a kernel for sm_90: e4m3 operands, K contiguous, strides that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    ones = ("a_k", "b_k", "scale_a_k")
    pointers = {"a": "*fp8e4nv", "b": "*fp8e4nv", "scale_a": "*fp32", "scale_b": "*fp32",
                "offsets": "*i32", "out": "*bf16"}  # fmt: skip
    constants = constants | dict.fromkeys(ones, 1)
    if constants.get("TMA"):
        sides = {"a": tiles.block_m, "b": tiles.block_n}
        pointers |= {name: f"tensordesc<fp8e4nv[{rows},{WIDTH}]>" for name, rows in sides.items()}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in fn.arg_names
    }
    sixteen = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names)
               if pointers.get(name, "")[:1] == "*" or name in ("a_m", "b_e", "b_n")}  # fmt: skip
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=sixteen)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("form", "blocks"), [("rows", False), ("rows", True), ("columns", True)])
def test_ptx(form: str, blocks: bool) -> None:
    """The tensor cores multiply FP8, and operands come 16 bytes at a time, without masks."""
    pytest.importorskip("triton")
    from inductor_ext.kernels.triton import scaled_grouped_mm as kernel

    tiles = (kernel.tiles_of_columns if form == "columns" else kernel.tiles_for)(1024)
    constants = {"EXPERTS": 16, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
                 "WIDTH": WIDTH, "SCALE_N": 128 if blocks else 1, "SCALED": blocks,
                 "FAST": False}  # fmt: skip
    tma = form.endswith("TMA")
    if form.startswith("rows"):
        constants |= {"ORDER": 8, "TMA": tma}
    fn = kernel._columns_kernel if form == "columns" else kernel._rows_kernel
    made = compiled(fn, constants, tiles)
    ptx = made.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert set(copies) == (set() if tma else {"0x10"})
    assert ("cp.async.bulk.tensor" in ptx) == tma
    assert made.metadata.shared <= 99 * 1024  # what sm_89 and sm_120 have


if __name__ == "__main__":
    interpret()
