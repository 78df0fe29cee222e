"""The benchmarks of products, attention, the cache and the block run, small, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_ext as ixt
from inductor_ext import _compat, bench, fake_gpu
from inductor_ext.bench import (
    attention,
    decode,
    gemm,
    gemm_cases,
    gemm_grouped,
    llama,
    llama_block,
)


def test_products_are_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "numbers.json"
    assert bench.main(["gemm", "--device", "cpu", "--samples", "9", "--json", str(kept)]) == 0
    report = json.loads(kept.read_text())
    names = [product.name for product in gemm_cases.PRODUCTS]
    assert [row["product"] for row in report["products"]] == names
    assert [row["product"] for row in report["sweep"]] == names
    for row in report["products"]:
        assert min(row["us"], row["bf16_us"]) > 0
        assert (row["route"], row["library_us"]) == ("reference", None)
    for row in report["sweep"]:
        assert 0 < row["error"] <= 1
    assert [row["product"] for row in report["host"]] == names
    assert min(row["us"] for row in report["host"]) > 0
    assert report["failures"] == []
    forms = [(row["form"], row["scales"]) for row in report["grouped"]]
    assert forms == [
        (form, scales)
        for scales in ("row", "1x128 x 128x128")
        for form in ("forward", "weights' gradient")
    ]
    assert report["grouped"][0]["loop_us"] > 0
    assert "random sizes" in capsys.readouterr().out
    assert bench.main(["gemm", "--only", "nothing like it"]) == 2


def test_tiles_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate for rows' and for blocks' scales, which need a GPU to run."""
    pytest.importorskip("triton")
    from inductor_ext.kernels.triton import scaled_grouped_mm as kernel

    seen = []
    monkeypatch.setattr(kernel, "rows_product", lambda *given: seen.append(given[-4:]))
    cpu = torch.device("cpu")
    for _, line in gemm_grouped.tiles(gemm_cases.EXPERTS["cpu"][0], cpu):
        assert line().us > 0
    expected = [
        (height, height == 128, False, tile) for height in (1, 128) for tile in kernel.CANDIDATES
    ]
    assert list(dict.fromkeys(seen)) == expected


def test_a_line_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel\nand much else")

    monkeypatch.setattr(gemm, "host", broken)
    kept = tmp_path / "numbers.json"
    arguments = ["gemm", "--device", "cpu", "--only", "host", "--json", str(kept)]
    assert bench.main(arguments) == 1
    failures = json.loads(kept.read_text())["failures"]
    assert len(failures) == len(gemm_cases.PRODUCTS)
    assert failures[0] == {"part": "host", "line": "FP8 tensor, fast", "error": "no such kernel"}
    assert "9 lines failed" in capsys.readouterr().out


def test_a_wrong_product_is_seen() -> None:
    """A code changed after the product was taken is an error beyond the bound; so is NaN."""
    product = gemm_cases.PRODUCTS[2]
    a, b, _, _ = gemm_cases.operands(product, gemm_cases.Sizes(4, 5, 32), torch.device("cpu"))
    got = gemm_cases.ours(product, a, b)()
    assert gemm.error(product, a, b, got, "reference") <= 1
    for spoilt in (got * 1.02, torch.full_like(got, torch.nan)):
        error = gemm.error(product, a, b, spoilt, "reference")
        assert gemm.Sample("", gemm_cases.Sizes(4, 5, 32), "", error, None, None).wrong
    assert gemm.Sample("", gemm_cases.Sizes(1, 1, 1), "", 0.5, 106.0, 100.0).slow


@pytest.mark.parametrize("product", gemm_cases.PRODUCTS, ids=lambda product: product.name)
def test_torch_takes_the_librarys_calls(product: gemm_cases.Product) -> None:
    """Torch's own checks of sizes, strides and scales, on a GPU that is not there."""
    target = "sm_100" if product.op in ("scaled_mm_mxfp8", "scaled_mm_nvfp4") else "sm_90"
    with fake_gpu.pretend(target), _compat.FakeTensorMode():
        sizes = gemm_cases.Sizes(256, 384, 512)
        x, w = (torch.empty(rows, sizes.k, device="cuda") for rows in sizes[:2])
        a, b = ixt.quantize(x, product.a), ixt.quantize(w, product.b)
        assert gemm_cases.library(product, a, b)().shape == (256, 384)


def test_sampled_products() -> None:
    """The same every time, awkward sizes among them."""
    found = list(gemm_cases.sample(200, 8192))
    assert found == list(gemm_cases.sample(200, 8192))
    sizes = [one for _, sizes in found for one in sizes]
    assert all(1 <= size <= 8192 for size in sizes)
    assert sum(size % 16 != 0 for size in sizes) > 60
    assert min(sizes) < 8
    assert sum(one.m >= gemm.FROM_ROWS for _, one in found) > 50
    assert all(one.k % 16 == 0 for product, one in found if product.op == "scaled_mm_nvfp4")


def test_experts_have_all_tokens() -> None:
    for experts in (*gemm_cases.EXPERTS["cuda"], *gemm_cases.EXPERTS["cpu"]):
        counts = experts.counts()
        assert (len(counts), sum(counts)) == (experts.count, experts.tokens)
        assert counts[:3] == [0, 5, 128]
        assert min(counts) >= 0


def test_decode_is_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "numbers.json"
    arguments = ["decode", "--device", "cpu", "--only", "int4 128", "--shape", "64x256"]
    assert bench.main([*arguments, "--json", str(kept)]) == 0
    report = json.loads(kept.read_text())
    rows = report["products"]
    assert [(row["kind"], row["rows"]) for row in rows] == [
        ("INT4 128", 1), ("INT4 128", 32), ("INT4 128 asymmetric", 1), ("INT4 128 asymmetric", 32),
    ]  # fmt: skip
    assert [row["bytes"] for row in rows[::2]] == [64 * 128 + 64 * 8, 64 * 128 + 64 * 10]
    for row in rows:
        assert row["route"] == "auto"
        assert min(row["us"]["auto"], row["bf16_us"]) > 0
        share = 100 * row["bytes"] / row["us"]["auto"] * 1e6 / report["copy_bytes_per_second"]
        assert row["percent"] == pytest.approx(share, rel=0.02, abs=0.1)
    assert "INT4 128 asymmetric" in capsys.readouterr().out
    assert bench.main(["decode", "--device", "cpu", "--only", "nothing like it"]) == 2


def test_decode_takes_the_routes_that_there_are() -> None:
    cuda = torch.device("cuda")
    assert decode.routes(16, cuda) == ("kernel", "dequantize")
    assert decode.routes(17, cuda) == ("dequantize",)
    for kind in decode.KINDS:
        assert ixt.quantize(torch.randn(128, 256), kind.format).codes.shape[0] == 128


def test_the_cache_is_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "numbers.json"
    arguments = ["cache", "--device", "cpu", "--only", "FP8 row", "--json", str(kept)]
    assert bench.main(arguments) == 0
    rows = json.loads(kept.read_text())["cache"]
    assert len(rows) == 8
    assert min(row["us"] for row in rows) > 0
    by_name = {row["case"]: row["bytes"] for row in rows}
    assert by_name["decode 2 x 64, FP8 row, contiguous, reference"] == 2 * 2 * 2 * 64 * (64 + 4)
    assert by_name["append 1 x 64, FP8 row, contiguous"] == 2 * 2 * 64 * (64 * 2 + 64 + 4)
    assert "decode" in capsys.readouterr().out


def test_a_llama_block_is_measured_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "numbers.json"
    arguments = ["llama", "--device", "cpu", "--rows", "16", "--only", "static kept eager"]
    assert bench.main([*arguments, "--json", str(kept)]) == 0
    (row,) = json.loads(kept.read_text())["rows"]
    assert row["name"] == "16 static kept eager"
    assert row["floor_ms"] > 0
    assert row["ms"] > 0


def test_the_rows_of_the_llama_table() -> None:
    """Everything twice (8192 tokens and 8): bf16, and four recipes with weights kept or not."""
    every = list(llama.cases(llama.TOKENS))
    assert len(every) == len({case.name for case in every}) == 2 * (3 + 8 * 11 - 2 * 2)
    assert {case.recipe for case in every} == {"bf16", *llama_block.RECIPES}


@pytest.mark.parametrize("recipe", llama_block.RECIPES)
@pytest.mark.parametrize("kept", [False, True])
def test_a_linear_layer_of_a_recipe(recipe: str, kept: bool) -> None:
    """The product of the dequantized operands in float64, rounded once to bf16 (2^-8)."""
    device, sizes = torch.device("cpu"), llama_block.SMALL
    x = torch.randn(1, 24, sizes.inner, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = llama_block.RECIPES[recipe]
    (p,) = llama_block.parameters(sizes, 1, device, made, kept)
    (unquantized,) = llama_block.parameters(sizes, 1, device, made, False)
    scale = p["down_x_scale"] if made.given else None
    a = ixt.dequantize(ixt.quantize(x[0], made.activations, scale), made.activations, torch.float32)
    weight = made.quantize_weight(unquantized, "down")
    b = ixt.dequantize(weight, made.weights, torch.float32)
    want = a.double() @ b.double().t()
    got = llama_block.our_linear(made, kept)(x, p, "down")
    assert got.shape == (1, 24, sizes.width)
    # of a dequantized operand's rounding to fp32, and fp32 sums of blocks, next to nothing is left
    slack = 2**-20 * (a.double().abs() @ b.double().abs().t())
    assert ((got[0].double() - want).abs() <= 2**-8 * want.abs() + slack).all()


def test_attention_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are those of the formats, and a back end that the CPU has not is left out."""
    monkeypatch.setattr(attention, "TINY", (attention.Case(80, 2, 1, 16),) * 2)
    monkeypatch.setattr(attention, "device_time", lambda call, device: 1.0)
    kept = tmp_path / "attention.json"
    assert bench.main(["attention", "--device", "cpu", "--json", str(kept)]) == 0
    lines = {line["what"]: line["error"] for line in json.loads(kept.read_text())["attention"]}
    assert "bf16 cudnn" not in lines
    assert lines["bf16 auto"] < 2.0**-6
    assert 2.0**-6 < lines["FP8 auto"] < 2.0**-3
    assert 2.0**-6 < lines["outliers, q and k rotated: definition"] < 2.0**-3
    assert bench.main(["attention", "--device", "cpu", "--only", "nothing like it"]) == 2


def test_fp8_attention_gives_the_next_product_its_codes() -> None:
    """With a given scale its result is quantized once, as attention in 16 bits would be."""
    recipe = llama_block.RECIPES["static"]
    sizes, device = llama_block.SMALL, torch.device("cpu")
    p = llama_block.parameters(sizes, 1, device, recipe, True)
    seen: list[Any] = []

    def linear(x: Any, weights: dict[str, Any], name: str) -> torch.Tensor:
        seen.append((name, type(x)))
        return llama_block.our_linear(recipe, True)(x, weights, name)

    x = torch.randn(1, 64, sizes.width, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        want, got = (
            llama_block.Block(p, sizes, linear, llama_block.ATTENTION[how])(x)
            for how in ("sdpa", "fp8")
        )
    assert ("out", ixt.Quantized) in seen
    assert 0 < float((got - want).norm() / want.norm()) < 0.01
