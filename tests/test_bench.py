"""The benchmark runs end to end (small, on the CPU), keeps what it measured and draws it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.utils import _pytree as pytree

from inductor_ext import bench, support
from inductor_ext.bench import kernels, layer, shapes
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


def test_every_cuda_kernel_is_measured() -> None:
    """Products, attention with its operands, and the cache have benchmarks of their own."""
    with_kernel = {row.op for row in support.table() if row.cuda != "PyTorch"}
    products, cache = ("scaled_", "weight_only_mm_"), ("decode_attention", "append_kv_", "rope")
    others = (*products, *cache, "attention", "quantize_fp8_heads")
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


def test_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["nothing"])
    assert "chains" in capsys.readouterr().err


def test_calls_in_rotation_need_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["kernels", "--device", "cpu", "--rotate"]) == 2
    assert "--device is cpu" in capsys.readouterr().out


@pytest.mark.gpu
def test_calls_in_rotation_are_measured_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "numbers.json"
    only = ["--only", "INT8 dequantize row"]
    assert bench.main(["kernels", "--shape", "64x256", "--rotate", *only, "--json", str(kept)]) == 0
    report = json.loads(kept.read_text())
    (row,), (copies,) = report["kernels"], report["copies"]
    share = 100 * row["bytes"] / row["rotating_us"] * 1e6 / copies["rotating"]
    assert row["percent_rotating"] == pytest.approx(share, rel=0.05)
