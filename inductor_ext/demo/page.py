"""The report as one self-contained HTML page: table, picture, and the fused kernel's source."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from html import escape
from pathlib import Path
from string import Template

from .count import Counts, call_lines, kernel_sources
from .diagram import Activation, diagram
from .report import HEADINGS, NOTE, Report, cells

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """Where the activation meets quantize: the lines of the wrapper, and the kernel's source."""

    name: str
    calls: str
    source: str


def excerpt(counts: Counts) -> Excerpt:
    """Find the kernel that computes gelu, and what the wrapper calls from it to the next GEMM.

    Raises:
        ValueError: no generated kernel computes an erf.
    """
    for source in counts.sources:
        for name, body in kernel_sources(source).items():
            if "erf" not in body:
                continue
            calls = call_lines(source)
            start = next(i for i, line in enumerate(calls) if line.startswith(name))
            end = next(i for i in range(start, len(calls)) if "inductor_ext.scaled_mm." in calls[i])
            # Half the indentation: two columns of generated C++ are to fit on a page.
            body = re.sub(r"^( +)\1", r"\1", textwrap.dedent(body), flags=re.M)
            return Excerpt(name, "\n".join(calls[start : end + 1]), body.strip())
    raise ValueError("no generated kernel computes the gelu")


def html(report: Report) -> str:
    """Return the page. It loads nothing: styles and the picture are inside."""
    opaque, plugin = report.counts("fp8_opaque"), report.counts("fp8_plugin")
    before, after = excerpt(opaque), excerpt(plugin)
    activation = Activation(report.sentences * report.tokens, report.up_features)
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        about=escape(report.about),
        headline=f"{opaque.kernels} kernels a layer become {plugin.kernels}",
        summary=escape(_summary(opaque, plugin)),
        table=_table(report),
        note=escape(NOTE),
        agreement=escape(report.agreement_line),
        diagram=diagram(activation),
        rows=f"{activation.rows:,}",
        columns=f"{activation.columns:,}",
        before_mb=f"{activation.bytes_before / 1e6:.1f}",
        after_mb=f"{activation.bytes_after / 1e6:.1f}",
        saved=f"{1 - activation.bytes_after / activation.bytes_before:.0%}",
        before_name=escape(before.name),
        before_calls=_code(before.calls, "python"),
        before_source=_code(before.source, _language(before)),
        after_name=escape(after.name),
        after_calls=_code(after.calls, "python"),
        after_source=_code(after.source, _language(after)),
    )


def _summary(opaque: Counts, plugin: Counts) -> str:
    opened = opaque.calls.total() - plugin.calls.total()
    fused = opaque.kernels - plugin.kernels
    return (
        f"With the plugin, {opened} opaque calls of an encoder layer become code that Inductor "
        f"generates, and {fused} of them join the kernel that makes their input."
    )


def _table(report: Report) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in ("encoder", *HEADINGS))
    rows = []
    for result in report.results:
        first = f'<th scope="row">{escape(result.variant.label)}</th>'
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells(result))
        mark = ' class="ours"' if result.variant.plugin else ""
        rows.append(f"<tr{mark}>{first}{rest}</tr>")
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _language(part: Excerpt) -> str:
    return "python" if part.name.startswith("triton") else "cpp"


def _code(text: str, language: str) -> str:
    from pygments import highlight  # comes with rich
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    lexer = get_lexer_by_name(language, stripnl=False)
    return str(highlight(text, lexer, HtmlFormatter(nowrap=True)))
