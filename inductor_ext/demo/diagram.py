"""A picture of kernels and of what they move through memory, as inline SVG."""

from __future__ import annotations

import dataclasses
from html import escape


@dataclasses.dataclass(frozen=True)
class Activation:
    """The activation between the two GEMMs of the feed-forward part: bf16 (rows, columns).

    The byte counts take every kernel to read its input once and to write its output once.
    """

    rows: int
    columns: int

    @property
    def bf16(self) -> int:
        """Bytes of the activation in bf16."""
        return 2 * self.rows * self.columns

    @property
    def fp8(self) -> int:
        """Bytes of its codes and of one fp32 scale a row."""
        return self.rows * self.columns + 4 * self.rows

    @property
    def bytes_before(self) -> int:
        """Gelu reads and writes bf16, then quantize reads bf16 and writes codes."""
        return 3 * self.bf16 + self.fp8

    @property
    def bytes_after(self) -> int:
        """One kernel reads bf16 and writes codes."""
        return self.bf16 + self.fp8


_WIDTH, _BOX, _GAP, _TOP = 300, 44, 62, 46
_BAR = 190  # width of the widest buffer


def diagram(a: Activation) -> str:
    """Draw both ways side by side. Colours come from the classes ``box``, ``buffer``, ..."""
    mm, gelu, quantize = "scaled_mm", "gelu", "quantize"
    before = _column(
        "plugin off",
        [(mm, "lib"), (gelu, "made"), (quantize, "lib"), (mm, "lib")],
        [("bf16", a.bf16), ("bf16", a.bf16), ("FP8", a.fp8)],
        a.bf16,
        0,
    )
    after = _column(
        "plugin on",
        [(mm, "lib"), (f"{gelu} + {quantize}", "fused"), (mm, "lib")],
        [("bf16", a.bf16), ("FP8", a.fp8)],
        a.bf16,
        _WIDTH + 40,
    )
    height = _TOP + 4 * _BOX + 3 * _GAP + 8
    label = (
        f"Plugin off: {gelu} and {quantize} are two kernels with a bf16 buffer between them. "
        f"Plugin on: they are one kernel."
    )
    return (
        f'<svg viewBox="0 0 {2 * _WIDTH + 40} {height}" role="img" aria-label="{escape(label)}">'
        f"{before}{after}</svg>"
    )


def _column(
    title: str,
    boxes: list[tuple[str, str]],
    buffers: list[tuple[str, int]],
    widest: int,
    left: int,
) -> str:
    middle = left + _WIDTH / 2
    parts = [f'<text class="title" x="{middle}" y="24">{escape(title)}</text>']
    # The shorter column spreads out, so that both begin and end at the same heights.
    gap = (3 * _GAP + (4 - len(boxes)) * _BOX) / (len(boxes) - 1)
    y = float(_TOP)
    for i, (name, kind) in enumerate(boxes):
        parts.append(
            f'<rect class="box {kind}" x="{left + 50}" y="{y:.1f}" width="{_WIDTH - 100}" '
            f'height="{_BOX}" rx="9"/>'
            f'<text class="name" x="{middle}" y="{y + _BOX / 2 + 5:.1f}">{escape(name)}</text>'
        )
        y += _BOX
        if i < len(buffers):
            parts.append(_buffer(*buffers[i], widest, middle, y, gap))
            y += gap
    return "".join(parts)


def _buffer(name: str, size: int, widest: int, middle: float, y: float, gap: float) -> str:
    width, center = _BAR * size / widest, y + gap / 2
    return (
        f'<path class="flow" d="M{middle} {y + 3:.1f}V{center - 14:.1f}'
        f'm-4 -5l4 5l4 -5M{middle} {center + 12:.1f}V{y + gap - 3:.1f}m-4 -5l4 5l4 -5"/>'
        f'<rect class="buffer" x="{middle - width / 2:.1f}" y="{center - 11:.1f}" '
        f'width="{width:.1f}" height="20" rx="3"/>'
        f'<text class="size" x="{middle}" y="{center + 3.5:.1f}">'
        f"{escape(name)}, {size / 1e6:.1f} MB</text>"
    )
