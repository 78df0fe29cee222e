"""The benchmark runs end to end (small, on the CPU), keeps what it measured and draws it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from inductor_ext import bench
from inductor_ext.bench.chart import chart


def test_chains_are_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, drawn = tmp_path / "numbers.json", tmp_path / "chart.svg"
    arguments = ["chains", "--device", "cpu", "--rows", "32", "--columns", "64", "--only", "row"]
    assert bench.main([*arguments, "--json", str(kept), "--svg", str(drawn)]) == 0
    report = json.loads(kept.read_text())
    assert [row["chain"] for row in report["chains"]] == [
        "row", "dequantize row", "RMSNorm -> row", "SiLU*mul -> row",
    ]  # fmt: skip
    for row in report["chains"]:
        assert min(row["plain_us"], row["compiled_us"], row["eager_us"]) > 0
    assert report["copy_bytes_per_second"] > 0
    assert set(report["environment"]) >= {"device", "torch", "triton", "date"}
    ElementTree.fromstring(drawn.read_text())
    assert "RMSNorm -> row" in capsys.readouterr().out


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


def test_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["nothing"])
    assert "chains" in capsys.readouterr().err
