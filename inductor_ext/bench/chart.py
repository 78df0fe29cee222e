"""The bandwidth chart of a measured table, as a self-contained SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

_SERIES = (
    ("plain_percent", "plain Inductor", "#9aa4b2"),
    ("compiled_percent", "ours compiled", "#2f7de1"),
    ("eager_percent", "ours eager, op by op", "#8b5cf6"),
)
_LEFT, _WIDTH, _BAR, _GAP = 190, 560, 11, 14


def chart(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Return an SVG with a group of bars a chain: percent of the copy's speed at the floor.

    Args:
        rows: dicts with the fields of ``chains.Row``.
        title: the line above, e.g. card, versions and shape.
    """
    group = len(_SERIES) * _BAR + _GAP
    height = 70 + len(rows) * group
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 60} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<style>text{fill:#1f2937}.grid{stroke:#d1d5db}@media(prefers-color-scheme:dark)"
        "{text{fill:#e5e7eb}.grid{stroke:#4b5563}}</style>",
        f'<text x="8" y="18" font-weight="600">{escape(title)}</text>',
    ]
    for index, (_, label, color) in enumerate(_SERIES):
        x = _LEFT + index * 170
        parts.append(f'<rect x="{x}" y="28" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="38">{label}</text>')
    for percent in (0, 25, 50, 75, 100):
        x = _LEFT + percent * _WIDTH // 100
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="52" y2="{height - 10}"/>')
        parts.append(f'<text x="{x}" y="50" text-anchor="middle" font-size="10">{percent} %</text>')
    for row_index, row in enumerate(rows):
        top = 58 + row_index * group
        middle = top + len(_SERIES) * _BAR / 2 + 4
        name = escape(str(row["chain"]))
        parts.append(f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{name}</text>')
        for index, (key, _, color) in enumerate(_SERIES):
            share = float(row[key])
            width = min(share, 104) * _WIDTH / 100
            y = top + index * _BAR
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" rx="2" '
                f'fill="{color}"/><text x="{_LEFT + width + 4:.1f}" y="{y + 8}" font-size="9">'
                f"{share:.0f}</text>"
            )
        goal = row.get("goal_percent")
        if goal is not None:
            x = _LEFT + goal * _WIDTH / 100
            parts.append(
                f'<line x1="{x}" x2="{x}" y1="{top - 2}" y2="{top + len(_SERIES) * _BAR}" '
                'stroke="#dc2626" stroke-width="1.5"/>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
