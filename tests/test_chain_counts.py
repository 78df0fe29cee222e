"""How many kernels the chains of ``bench chains`` become on a GPU, and those of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from torch import Tensor

import inductor_ext as ixt
from inductor_ext import fake_gpu, kernels
from inductor_ext.bench.chain_cases import Chain, chains
from inductor_ext.bench.chains import tensors

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ROWS, COLUMNS = 4096, 1024
CHAINS = {chain.name: chain for chain in chains()}

# Kernels where all sizes are known; where the number of rows is not; where no size is.  In the
# last case rows have no template: their width has to be a number.
COUNTS: dict[str, tuple[int, int, int]] = {
    "static": (1, 1, 1),
    "row": (1, 1, 1),
    "tensor": (3, 3, 3),
    "1x128": (1, 1, 2),
    "128x128": (1, 2, 2),
    "MXFP8 K": (1, 1, 2),
    "MXFP8 M": (1, 2, 3),
    "static both": (1, 1, 2),
    "1x128 both": (2, 3, 5),
    "128x128 both": (2, 2, 4),
    "MXFP8 both": (2, 3, 5),
    "RMSNorm -> static": (1, 1, 1),
    "RMSNorm -> row": (1, 1, 1),
    "RMSNorm -> tensor": (2, 2, 3),
    "RMSNorm -> 1x128": (1, 1, 3),
    "RMSNorm -> 128x128": (2, 2, 3),
    "RMSNorm -> MXFP8 K": (1, 1, 3),
    "RMSNorm -> static both": (2, 2, 2),
    "RMSNorm -> 1x128 both": (2, 2, 6),
    "RMSNorm -> MXFP8 both": (2, 2, 6),
    "residual, RMSNorm -> row": (1, 1, 1),
    "residual, RMSNorm -> 1x128": (1, 1, 3),
    "residual, RMSNorm -> MXFP8 both": (2, 2, 5),
    "SiLU*mul -> static": (1, 1, 1),
    "SiLU*mul -> row": (1, 1, 1),
    "SiLU*mul -> tensor": (2, 2, 3),
    "SiLU*mul -> MXFP8 K": (1, 1, 2),
    "SiLU*mul -> static both": (1, 1, 1),
    "SiLU*mul -> 1x128 both": (1, 1, 4),
    "SiLU*mul -> MXFP8 both": (1, 1, 4),
    "static, with amax": (2, 2, 2),
    "residual, RMSNorm -> 1x128, sum kept": (1, 1, 3),
    "dSiLU*mul -> static both": (1, 1, 2),
    "dequantize row": (1, 1, 1),
}

# More kernels than wanted (one; two for a tensor's current scale, and for norms in both
# orientations), sizes known.
TOO_MANY = {
    # The maximum of the rows' maxima, whose kernel makes the reciprocal of the given scale too.
    "static, with amax",
    # Templates are for producers: what an input becomes is the op's own kernel (below).
    "tensor", "1x128 both", "128x128 both", "MXFP8 both",
    # A square's amax needs the statistics of 128 rows.
    "RMSNorm -> 128x128",
}  # fmt: skip

# What is called where nothing stands before and behind the op, and the tensor is large.
ALONE = {
    "row": "quantize_fp8_row",
    "tensor": "quantize_fp8_tensor",
    "1x128": "quantize_fp8_block",
    "128x128": "quantize_fp8_block",
    "MXFP8 K": "quantize_mxfp8",
    "MXFP8 M": "quantize_mxfp8",
    "static both": "quantize_fp8_static_both",
    "1x128 both": "quantize_fp8_block_both",
    "128x128 both": "quantize_fp8_block_both",
    "MXFP8 both": "quantize_mxfp8_both",
    "static, with amax": "quantize_fp8_static",
    "dequantize row": "dequantize_fp8",
}


@pytest.fixture(autouse=True)
def templates() -> Iterator[None]:
    with ixt.config.patch(enabled=True, templates=True, strict=True, always_lower=True):
        yield


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's default, with a CUDA library: an op that stands alone calls its kernel."""
    monkeypatch.setattr(kernels, "load", lambda: SimpleNamespace(cpu=None, cuda=object()))
    with ixt.config.patch(always_lower=False):
        yield


@cache
def inputs(rows: int = ROWS) -> dict[str, Tensor]:
    return tensors(rows, COLUMNS, torch.device("cpu"))


def generate(chain: Chain, fn: Callable[..., Any], dynamic: bool) -> fake_gpu.GeneratedGraph:
    torch.compiler.reset()
    arguments = tuple(inputs()[name] for name in chain.inputs)
    with torch.no_grad():
        (graph,) = fake_gpu.capture(fn, arguments, "sm_90", dynamic=dynamic)
    return graph


def with_columns(chain: Chain) -> Callable[..., Any]:
    """Return the chain with a number of columns that the compiler is told."""

    def known(*given: Tensor) -> Any:
        for name, tensor in zip(chain.inputs, given, strict=True):
            if "scale" not in name:
                assert tensor.shape[-1] == COLUMNS
        return chain.ours(*given)

    return known


def test_the_table_is_that_of_the_benchmark() -> None:
    assert list(COUNTS) == list(CHAINS)


def test_what_is_asked() -> None:
    def asked(name: str) -> int:
        return 2 if name.endswith("tensor") or ("RMSNorm" in name and "both" in name) else 1

    assert {name for name, counts in COUNTS.items() if counts[0] > asked(name)} == TOO_MANY


@pytest.mark.parametrize("sizes", ["known", "any rows", "any"])
@pytest.mark.parametrize("name", COUNTS)
def test_kernels(name: str, sizes: str) -> None:
    chain = CHAINS[name]
    fn = with_columns(chain) if sizes == "any rows" else chain.ours
    graph = generate(chain, fn, dynamic=sizes != "known")
    expected = COUNTS[name][["known", "any rows", "any"].index(sizes)]
    assert len(graph.kernels) == expected, list(graph.kernels)
    assert not graph.externs


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str, dynamic: bool) -> None:
    graph = generate(CHAINS[name], CHAINS[name].ours, dynamic)
    assert graph.externs == (f"torch.ops.inductor_ext.{ALONE[name]}.default",)
    assert not graph.kernels


# With a batch of unknown size, of sequences that blocks divide: as if all sizes were known.
WHOLE = {name: known for name, (known, any_rows, _) in COUNTS.items() if any_rows > known}


@pytest.mark.parametrize("name", WHOLE)
def test_any_number_of_whole_sequences(name: str) -> None:
    chain = CHAINS[name]

    def sequences(*given: Tensor) -> Any:
        for tensor in given:
            if tensor.dim() == 3:
                assert tensor.shape[1:] == (1024, COLUMNS)
        return chain.ours(*given)

    torch.compiler.reset()
    made = [inputs()[name] for name in chain.inputs]
    arguments = tuple(t.view(-1, 1024, COLUMNS) if t.dim() == 2 else t for t in made)
    with torch.no_grad():
        (graph,) = fake_gpu.capture(sequences, arguments, "sm_90", dynamic=True)
    assert len(graph.kernels) == WHOLE[name], list(graph.kernels)


@pytest.mark.parametrize("way", ["quantize", "dequantize"])
def test_squares_of_more_than_a_matrix(way: str) -> None:
    """Codes, or elements, are stored where they belong, not copied there."""
    fmt, x = ixt.FP8(granularity="square"), inputs()["x"].view(-1, 1024, COLUMNS)
    quantize = way == "quantize"
    arguments = (x,) if quantize else ixt.quantize(x, fmt)[:2]

    def chain(*given: Tensor) -> Any:
        return ixt.quantize(*given, fmt)[:2] if quantize else ixt.dequantize(given, fmt)

    torch.compiler.reset()
    (graph,) = fake_gpu.capture(chain, arguments, "sm_90")
    assert len(graph.kernels) == 1


# (kernels, opaque calls) of the forward graph, then of the backward's.  Opaque are the two and four
# GEMMs, and the quantization of x and of the gradient, which stand alone.
# A scale a tensor: 1 / scale is a kernel of one element for each of the scales.  Transposed codes
# of the value between are made in the backward, from the first layer's result, not saved.  Codes in
# both orientations behind a norm are a fill and the tiles; the weight's gradient takes two.
# A scale a row: no template takes columns, whose scales and codes are three kernels, twice.
# LayerNorm's mean, kept for the backward, is computed again by a kernel of its own.
Counts = tuple[tuple[int, int], tuple[int, int]]
TRAINING: dict[tuple[str, str], Counts] = {
    ("tensor", "SiLU*mul"): ((2, 3), (4, 5)),
    ("tensor", "RMSNorm"): ((3, 3), (6, 5)),
    ("tensor", "residual, RMSNorm"): ((3, 3), (7, 5)),
    ("tensor", "LayerNorm"): ((4, 3), (6, 5)),
    ("row", "SiLU*mul"): ((1, 4), (7, 6)),
    ("row", "RMSNorm"): ((1, 4), (7, 6)),
    ("row", "residual, RMSNorm"): ((1, 4), (7, 6)),
    ("row", "LayerNorm"): ((2, 4), (7, 6)),
}


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("granularity", "between"), TRAINING)
def test_training(granularity: str, between: str, dynamic: bool) -> None:
    model = training.Training(between, ixt.FP8(granularity=granularity))
    x = torch.randn(2048, 512).bfloat16().requires_grad_()
    torch.compiler.reset()
    graphs = fake_gpu.capture(model, (x,), "sm_90", dynamic=dynamic)
    assert [graph.kind for graph in graphs] == ["forward", "backward"]
    found = tuple((len(graph.kernels), len(graph.externs)) for graph in graphs)
    assert found == TRAINING[granularity, between], [list(graph.kernels) for graph in graphs]
