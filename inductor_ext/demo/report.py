"""The table on the terminal and the same numbers as JSON."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

import inductor_ext

from .count import Counts
from .variants import Agreement, Result

HEADINGS = (
    "graphs", "breaks", "guards", "kernels\n(made + ours)", "ms /\nbatch", "cosine\nmin",
    "cosine\nmean", "same nearest\nneighbour", "same\ntop 3",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything one run measured. ``tokens`` is the padded length of a sentence,
    ``up_features`` the width between the two linears of the feed-forward part.
    """

    device: str
    layers: int
    sentences: int
    tokens: int
    up_features: int
    repeat: int
    results: list[Result]
    agreement: Agreement

    def result(self, key: str) -> Result:
        """Return the row with this key ("fp8_plugin", ...)."""
        return next(r for r in self.results if r.variant.key == key)

    def counts(self, key: str) -> Counts:
        """Return the counts of the row with this key, which is a compiled one."""
        counts = self.result(key).counts
        assert counts is not None, f"{key} is not compiled"
        return counts

    @property
    def about(self) -> str:
        """One line: what ran where."""
        return (
            f"MiniLM, {self.layers} layers, {self.sentences} sentences of {self.tokens} tokens, "
            f"{self.device}, torch {torch.__version__}, median of {self.repeat}"
        )

    @property
    def agreement_line(self) -> str:
        """One sentence: the plugin against eager mode."""
        a = self.agreement
        return (
            f"Plugin against eager FP8, layer by layer on the same input: {a.codes_differ:,} of "
            f"{a.codes:,} FP8 codes and {a.scales_differ:,} of {a.scales:,} scales differ; "
            f"largest difference of the final embeddings: {a.embedding_diff:.2g}."
        )


def cells(result: Result) -> list[str]:
    """Return one row of the table as text, without its label."""
    counts, quality = result.counts, result.quality
    assert quality is not None
    if counts is None:
        compiled = ["-"] * 4
    else:
        ours = f"{counts.generated} + {counts.ours} = {counts.kernels}"
        compiled = [str(counts.graphs), str(counts.breaks), str(counts.guards), ours]
    same = "yes" if quality.ranking_same else "no"
    return [
        *compiled,
        f"{result.ms:.1f}",
        f"{quality.cosine_min:.4f}",
        f"{quality.cosine_mean:.4f}",
        f"{same}, {quality.top1} of {quality.sentences}",
        f"{quality.top3} of {quality.sentences}",
    ]


NOTE = (
    "Graphs to kernels are of one encoder layer, compiled once and called for all. Kernels: those "
    "that Inductor generates + opaque calls of our ops (behind a graph break: eager calls). Cosine "
    "and neighbours are against fp32."
)


def table(report: Report) -> Table:
    """Lay the report out as one rich table."""
    out = Table(title=report.about, caption=f"{NOTE}\n{report.agreement_line}", pad_edge=False)
    out.title_justify, out.caption_justify = "left", "left"
    out.add_column("encoder", overflow="fold", min_width=16)
    for heading in HEADINGS:
        out.add_column(heading, justify="right", overflow="fold")
    for result in report.results:
        style = "bold" if result.variant.plugin else ""
        texts = [Text(cell) for cell in (result.variant.label, *cells(result))]
        out.add_row(*texts, style=style)
    return out


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as plain data, for ``--json``."""
    return {
        "inductor_ext": inductor_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": report.device,
        "layers": report.layers,
        "sentences": report.sentences,
        "tokens": report.tokens,
        "repeat": report.repeat,
        "rows": [_row(result) for result in report.results],
        "plugin_against_eager": dataclasses.asdict(report.agreement),
    }


def _row(result: Result) -> dict[str, Any]:
    counts, quality = result.counts, result.quality
    assert quality is not None
    row: dict[str, Any] = {"key": result.variant.key, "label": result.variant.label}
    if counts is not None:
        row.update(
            graphs=counts.graphs,
            graph_breaks=counts.breaks,
            guards=counts.guards,
            generated_kernels=counts.generated,
            opaque_calls=dict(counts.calls),
            eager_calls=counts.eager_calls,
            kernels=counts.kernels,
            compile_s=round(result.compile_s, 3),
            graphs_for_all_layers=result.compiles,
        )
    row.update(ms=result.ms, times_ms=result.times_ms, ranking_same=quality.ranking_same)
    return row | dataclasses.asdict(quality)
