"""The benchmark runs end to end (small, on the CPU), keeps what it measured and draws it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.utils import _pytree as pytree

import inductor_ext as ixt
from inductor_ext import _compat, bench, fake_gpu, support
from inductor_ext.bench import (
    attention,
    decode,
    gemm,
    gemm_cases,
    gemm_grouped,
    kernels,
    layer,
    llama,
    llama_block,
    shapes,
)
from inductor_ext.bench.chain_cases import Chain, chains
from inductor_ext.bench.chains import tensors
from inductor_ext.bench.chart import chart
from inductor_ext.bench.kernel_cases import CASES, Case, inputs


def test_chains_are_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, drawn = tmp_path / "numbers.json", tmp_path / "chart.svg"
    size = ["--rows", "128", "--columns", "256"]
    arguments = ["chains", "--device", "cpu", *size, "--only", "row"]
    assert bench.main([*arguments, "--json", str(kept), "--svg", str(drawn)]) == 0
    report = json.loads(kept.read_text())
    assert [row["chain"] for row in report["chains"]] == [
        "row", "RMSNorm -> row", "residual, RMSNorm -> row", "SiLU*mul -> row", "dequantize row",
    ]  # fmt: skip
    for row in report["chains"]:
        assert min(row["plain_us"], row["compiled_us"], row["eager_us"]) > 0
    assert report["copy_bytes_per_second"] > 0
    assert set(report["environment"]) >= {"device", "torch", "triton", "date"}
    ElementTree.fromstring(drawn.read_text())
    assert "RMSNorm -> row" in capsys.readouterr().out


@pytest.mark.parametrize("chain", list(chains()), ids=lambda chain: chain.name)
def test_both_forms_of_a_chain_agree(chain: Chain) -> None:
    """Ours and the plain formula give nearly the same results, tensor by tensor, and no NaN."""
    values = tensors(128, 256, torch.device("cpu"))
    arguments = [values[name] for name in chain.inputs]
    ours, plain = (
        [t for t in pytree.tree_leaves(form(*arguments)) if isinstance(t, torch.Tensor)]
        for form in (chain.ours, chain.plain)
    )
    for a, b in zip(ours, plain, strict=True):
        assert a.numel() == b.numel()
        x, y = a.float().flatten(), b.float().flatten()
        assert not x.isnan().any()
        assert float(((x - y).abs() > 0.13 * y.abs() + 1e-6).float().mean()) < 0.01


def test_cpu_kernels_are_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "numbers.json"
    arguments = ["cpu", "--rows", "40", "--columns", "64", "--only", "dequantize 1 x 128"]
    assert bench.main([*arguments, "--rounds", "2", "--json", str(kept)]) == 0
    (row,) = json.loads(kept.read_text())["ops"]
    assert row["case"] == "dequantize 1 x 128"
    assert min(row["ours"], row["eager"], row["inductor"], row["lowered"]) > 0
    assert "Inductor, of the formula" in capsys.readouterr().out


def test_kernels_are_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "numbers.json"
    arguments = ["kernels", "--device", "cpu", "--shape", "64x256", "--compiled"]
    only = ["--only", "INT8 dequantize row"]
    assert bench.main([*arguments, *only, "--json", str(kept)]) == 0
    report = json.loads(kept.read_text())
    assert set(report["environment"]) >= {"device", "torch", "triton", "date"}
    (row,) = report["kernels"]
    assert row["bytes"] == 64 * 256 * 3 + 64 * 4  # codes, bf16 results, a scale a row
    share = 100 * row["bytes"] / row["us"] * 1e6 / report["copies"][0]["large"]
    assert row["percent"] == pytest.approx(share, rel=0.02, abs=0.1)
    assert row["goal_percent"] is None  # goals are a GPU's
    assert (row["default"]["outcome"], row["lowered"]["outcome"]) == ("kernel", "lowered")
    assert min(row["us"], row["default"]["us"], row["lowered"]["us"]) > 0
    assert "64 x 256 bf16; copy" in capsys.readouterr().out


def test_kernels_at_two_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "numbers.json"
    shapes = ["--shape", "64x256", "--shape", "32x256"]
    arguments = ["kernels", "--device", "cpu", "--only", "amax row", *shapes]
    assert bench.main([*arguments, "--json", str(kept)]) == 0
    rows = json.loads(kept.read_text())["kernels"]
    assert [(row["shape"], row["case"]) for row in rows] == [([64, 256], "row"), ([32, 256], "row")]
    assert rows[0]["default"] is None
    assert bench.main(["kernels", "--device", "cpu", "--only", "nothing like it"]) == 2
    assert "names are like 'FP8 static'" in capsys.readouterr().out


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
    assert decode.routes(16, cuda) == ("kernel", "triton", "dequantize")
    assert decode.routes(17, cuda) == ("triton", "dequantize")
    for kind in decode.KINDS:
        assert ixt.quantize(torch.randn(128, 256), kind.format).codes.shape[0] == 128


def test_every_cuda_kernel_is_measured() -> None:
    """Products, attention and the cache apart, which have benchmarks of their own."""
    with_kernel = {row.op for row in support.table() if row.cuda != "PyTorch"}
    others = ("scaled_", "weight_only_mm_", "attention", "decode_attention", "append_kv_", "rope")
    assert {name for name in with_kernel if not name.startswith(others)} == {c.op for c in CASES}
    assert len({str(case) for case in CASES}) == len(CASES)


def test_floors_count_what_must_move() -> None:
    tensors, n = inputs((256, 512), torch.device("cpu")), 256 * 512
    floors = {}
    for case in CASES:
        arguments = kernels.fill(case, tensors)
        results = kernels.overload(case.op)(*arguments)
        floors[str(case)] = kernels.floor(case, arguments, results, tensors["x"])
    expected = {
        "FP8 static": 3 * n + 4 + 8,  # the scale; its inverse and the amax
        "FP8 tensor": 5 * n + 4,
        "FP8 1x128 both gemm": 4 * n + 2 * n // 32,
        "FP8 128x128 gemm": 3 * n + 2 * 4 * 4,
        "FP8 dequantize 128x1": 3 * n + n // 32,
        "MXFP8 K gemm": 3 * n + n // 32,
        "NVFP4 K gemm, stochastic": 5 * n // 2 + n // 16 + 4 + 16,
        "NVFP4 dequantize 16x16": 5 * n // 2 + n // 256 + 4,
        "INT4 dequantize asymmetric 128": 5 * n // 2 + 5 * n // 128,
        "amax row": 2 * n + 4 * 256,
        "scale update 300 of 1024, in place": 2 * 4 * 300 * 1025,
    }
    assert {name: floors[name] for name in expected} == expected


def test_marks_what_falls_short() -> None:
    case = Case("FP8", "row", "quantize_fp8_row", (), 93)
    assert kernels.goal(case, (16384, 8192)) == 93
    assert kernels.goal(case, (8192, 4096)) == 88
    assert kernels.goal(Case("a", "b", "c", ()), (8192, 4096)) is None

    def row(percent: float, default: kernels.Compiled | None = None) -> kernels.Row:
        lowered = kernels.Compiled(90.0, "lowered")
        return kernels.Row(
            (16384, 8192), "FP8", "row", "op", 3, 100.0, percent, percent, 93, default, lowered
        )

    assert [row(percent).missed for percent in (92.9, 93.0)] == [True, False]
    times = (91.0, 92.0, 100.0, None)
    choices = [row(95, kernels.Compiled(us, "kernel")).choice_is_slow for us in times]
    assert choices == [False, True, True, True]
    short, copies = row(92.9, kernels.Compiled(100.0, "kernel")), kernels.Copies(4e12, 4e12)
    drawn = kernels.table([short], copies, alone=True)
    cells = [str(cell) for column in drawn.columns for cell in column.cells]
    assert cells[5:7] == ["93  missed", "100.0 us, kernel  slow"]
    of_large = dataclasses.replace(short, percent_of_equal_copy=93.0)
    drawn = kernels.table([of_large], copies, alone=False)
    assert [str(cell) for cell in drawn.columns[5].cells] == ["93  missed (large)"]


@pytest.mark.parametrize("shape", ["64", "64x", "64xa", "0x64"])
def test_odd_shape_is_refused(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["kernels", "--shape", shape])
    assert f"must be like 16384x8192, got '{shape}'" in capsys.readouterr().err


def test_chart_has_a_bar_for_each_number_and_a_line_for_each_goal() -> None:
    row = {
        "chain": "a -> b", "plain_percent": 50.0, "compiled_percent": 97.5, "eager_percent": 5.0,
    }  # fmt: skip
    svg = ElementTree.fromstring(
        chart([{**row, "goal_percent": 96}, {**row, "goal_percent": None}], "t")
    )
    tags = [element.tag.rpartition("}")[2] for element in svg.iter()]
    assert tags.count("rect") == 3 + 2 * 3  # legend, bars
    goals = [e for e in svg.iter() if e.get("stroke") == "#dc2626"]
    assert len(goals) == 1
    labels = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert labels.count("a -> b") == 2
    assert "98" in labels


def test_sampled_shapes() -> None:
    """Sixty of them, the same every time, every chain at one of them, and none that is huge."""
    cases = list(shapes.sample())
    assert cases == list(shapes.sample())
    assert len(cases) == 60
    assert {case.chain for case in cases} == {chain.name for chain in chains()}
    assert {case.columns % 128 for case in cases} == {0, 64}
    assert min(case.rows for case in cases) < 8
    assert max(case.rows for case in cases) > 8192
    assert all(case.rows * case.columns <= shapes.MOST_ELEMENTS for case in cases)
    assert all(case.columns % 128 == 0 for case in cases if "128" in case.chain)


def test_a_layer_is_compiled_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """What ``bench layer`` starts for each rival; that of plain PyTorch needs a GPU."""
    layer.child("ours", "cpu", "16")
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(measured) == {"compile_s", "us"}
    assert min(measured.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without one")
@pytest.mark.parametrize("suite", ["shapes", "layer"])
def test_suites_that_need_a_gpu_say_so(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([suite]) == 2
    assert f"bench {suite} needs a GPU" in capsys.readouterr().out


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


def test_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["nothing"])
    assert "chains" in capsys.readouterr().err


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
