"""The rows of the table: the same encoder, six ways, compiled and timed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import inductor_ext as ixt

from . import model as M
from .count import Counts, compile_counted, counting
from .quality import Quality, compare


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row: how the linears compute, whether the layer is compiled, whether the plugin is on."""

    key: str
    label: str
    arithmetic: M.Arithmetic
    compiled: bool
    plugin: bool = False


@dataclasses.dataclass
class Result:
    """What was measured of one variant. ``counts`` (None in eager mode) are of one layer."""

    variant: Variant
    counts: Counts | None = None
    compile_s: float = 0.0
    compiles: int = 0
    times_ms: list[float] = dataclasses.field(default_factory=list)
    quality: Quality | None = None
    embeddings: Tensor | None = None

    @property
    def ms(self) -> float:
        """Median time of one batch, in milliseconds."""
        return statistics.median(self.times_ms)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Plugin against eager mode: each layer gets the same input in both; its output is compared.

    ``codes_differ`` of ``codes`` FP8 codes and ``scales_differ`` of ``scales`` differ in a bit;
    ``embedding_diff`` is the largest difference of the two final embeddings.
    """

    codes: int
    codes_differ: int
    scales: int
    scales_differ: int
    embedding_diff: float


class EagerCalls:
    """FP8 arithmetic behind graph breaks; counts the calls that run outside of the graphs."""

    def __init__(self) -> None:
        self.calls = 0

    def arithmetic(self) -> M.Arithmetic:
        """Return ``FP8`` with both functions kept away from Dynamo."""
        fp8 = M.FP8
        return dataclasses.replace(
            fp8, prepare=self._outside(fp8.prepare), linear=self._outside(fp8.linear)
        )

    def _outside(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.calls += 1
            return fn(*args)

        disabled: Callable[..., Any] = torch.compiler.disable(
            counted, reason="the demo keeps this op out of the graph"
        )
        return disabled


class Bench:
    """Runs the variants on one batch of sentences.

    ``layers``: how many of the encoder layers to run (None: all).
    """

    def __init__(self, model: M.MiniLM, sentences: Sequence[str], layers: int | None) -> None:
        self.model = model
        self.layer_count = model.layer_count if layers is None else layers
        if self.layer_count > model.layer_count:
            raise ValueError(f"MiniLM has {model.layer_count} layers, got --layers {layers}")
        self.batch = model.batch(sentences)
        self.eager = EagerCalls()
        self.variants = (
            Variant("fp32", "fp32 eager", M.FP32, compiled=False),
            Variant("bf16", "bf16 eager", M.BF16, compiled=False),
            Variant("bf16_compiled", "bf16 compiled", M.BF16, compiled=True),
            Variant(
                "fp8_break",
                "FP8 compiled, graph breaks",
                self.eager.arithmetic(),
                compiled=True,
            ),
            Variant("fp8_opaque", "FP8 compiled, opaque ops", M.FP8, compiled=True),
            Variant("fp8_plugin", "FP8 compiled, plugin on", M.FP8, compiled=True, plugin=True),
        )
        self.results = {v.key: Result(v) for v in self.variants}
        self._layer: dict[str, Callable[..., tuple[Tensor, Any]]] = {}
        self._weights: dict[str, list[M.Layer]] = {}

    def prepare(self, variant: Variant) -> None:
        """Compile one layer of ``variant``, counting, then embed the sentences with it."""
        result, arithmetic = self.results[variant.key], variant.arithmetic
        layer = M.make_layer(arithmetic, f"encoder_layer_{variant.key}")
        self._weights[variant.key] = weights = self._shared_weights(variant)
        with torch.no_grad(), ixt.config.patch(enabled=variant.plugin):
            if variant.compiled:
                layer, guards = compile_counted(layer)
                hidden = self.model.embed_tokens(self.batch, arithmetic.dtype)
                ready, bias = arithmetic.prepare(hidden), self.batch.bias(arithmetic.dtype)
                calls, start = self.eager.calls, time.perf_counter()
                with counting(guards) as counts:
                    layer(hidden, ready, bias, weights[0])
                result.counts, result.compile_s = counts, time.perf_counter() - start
                counts.eager_calls = self.eager.calls - calls
                with counting(guards) as rest:  # the other layers find the same code
                    self._layer[variant.key] = layer
                    result.embeddings = self._embed(variant)
                result.compiles = counts.graphs + rest.graphs
            else:
                self._layer[variant.key] = layer
                result.embeddings = self._embed(variant)
        result.quality = compare(self._embeddings(variant.key), self._embeddings("fp32"))

    def time_once(self, variant: Variant) -> None:
        """Time one batch of ``variant`` and keep the milliseconds."""
        with torch.no_grad(), ixt.config.patch(enabled=variant.plugin):
            self._synchronize()
            start = time.perf_counter()
            self._embed(variant)
            self._synchronize()
            elapsed = time.perf_counter() - start
        self.results[variant.key].times_ms.append(elapsed * 1e3)

    def agreement(self) -> Agreement:
        """Compare the plugin's code with eager FP8, layer by layer and at the end."""
        on, eager = "fp8_plugin", M.make_layer(M.FP8, "encoder_layer_fp8_eager")
        bias = self.batch.bias(torch.bfloat16)
        steps: list[tuple[Tensor, Any]] = []
        with torch.no_grad(), ixt.config.patch(enabled=False):
            hidden = self.model.embed_tokens(self.batch, torch.bfloat16)
            steps.append((hidden, M.FP8.prepare(hidden)))
            for weights in self._weights[on]:
                steps.append(eager(*steps[-1], bias, weights))
            embeddings = M.encode(hidden, self.batch, self._weights[on], eager, M.FP8)
        codes = codes_differ = scales = scales_differ = 0
        with torch.no_grad(), ixt.config.patch(enabled=True):
            for weights, before, after in zip(
                self._weights[on], steps[:-1], steps[1:], strict=True
            ):
                _, ready = self._layer[on](*before, bias, weights)
                codes += ready.codes.numel()
                scales += ready.scale_inv.numel()
                codes_differ += _differ(ready.codes, after[1].codes, torch.uint8)
                scales_differ += _differ(ready.scale_inv, after[1].scale_inv, torch.int32)
        diff = float((embeddings - self._embeddings(on)).abs().max())
        return Agreement(codes, codes_differ, scales, scales_differ, diff)

    def _embeddings(self, key: str) -> Tensor:
        embeddings = self.results[key].embeddings
        assert embeddings is not None, f"prepare the variant {key} first"
        return embeddings

    @property
    def up_features(self) -> int:
        """Width of the feed-forward part (1536)."""
        return int(self._weights["fp32"][0].up.weight.shape[0])

    def _embed(self, variant: Variant) -> Tensor:
        hidden = self.model.embed_tokens(self.batch, variant.arithmetic.dtype)
        weights, layer = self._weights[variant.key], self._layer[variant.key]
        return M.encode(hidden, self.batch, weights, layer, variant.arithmetic)

    def _shared_weights(self, variant: Variant) -> list[M.Layer]:
        for other in self.variants:
            same = (other.arithmetic.dtype, other.arithmetic.fp8) == (
                variant.arithmetic.dtype,
                variant.arithmetic.fp8,
            )
            if same and other.key in self._weights:
                return self._weights[other.key]
        return self.model.layers(variant.arithmetic, self.layer_count)

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _differ(a: Tensor, b: Tensor, bits: torch.dtype) -> int:
    return int((a.view(bits) != b.view(bits)).sum())
