"""Small charts as SVG: stacked bars and line charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2f8f87", "#c9793d", "#6c7fb8", "#b35d82", "#8a9a4b", "#7d7d7d")
GLYPH = 7.0  # approximate width of a character in pixels
MARK = 18  # pixels of a legend's mark and the gap after it
FONT = 'font-family="system-ui,sans-serif" font-size="12" fill="currentColor"'


def shares_svg(title: str, parts: Mapping[str, tuple[float, str]], width: int = 520) -> str:
    """One bar cut into shares, with a legend.

    Args:
        title: Title above the bar.
        parts: Name -> size (in any unit) and its text; parts of size 0 are left out of the bar.
        width: Width in pixels.

        Returns:
            SVG that uses the colour of the surrounding text.
    """
    total = sum(size for size, _ in parts.values()) or 1.0
    rows = math.ceil(len(parts) / 3)
    bars, legend, left = [], [], 0.0
    for number, (name, (size, told)) in enumerate(parts.items()):
        colour = COLOURS[number % len(COLOURS)] if name != "free" else "rgba(128,128,128,.22)"
        part = width * size / total
        bars.append(f'<rect x="{left:.1f}" y="22" width="{part:.1f}" height="18" fill="{colour}"><title>')
        bars.append(f"{escape(f'{name}: {told}')}</title></rect>")
        left += part
        x, y = (number % 3) * width / 3, 56 + 18 * (number // 3)
        legend.append(f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" rx="2" fill="{colour}"/>')
        legend.append(f'<text x="{x + 16:.0f}" y="{y}" {FONT}>{escape(name)} {escape(told)}</text>')
    head = f'<text x="0" y="14" {FONT} font-weight="600">{escape(title)}</text>'
    return _svg(width, 50 + 18 * rows, head + "".join(bars) + "".join(legend), title)


class LineChart:
    """A line chart of values over their index, shown by a notebook as SVG.

    Args:
        lines: Name -> values in order; values that are not finite are left out.
        title: Title above the chart.
        x: Name of the horizontal axis, such as "step".
        unit: Unit after values.
        height: Height of the plot area in pixels.
    """

    def __init__(
        self, lines: Mapping[str, Sequence[float]], title: str = "", x: str = "", unit: str = "", height: int = 120
    ) -> None:
        self.lines = {name: [float(value) for value in values] for name, values in lines.items()}
        self.title, self.x, self.unit, self.height = title, x, unit, height

    def __repr__(self) -> str:
        ends = ", ".join(f"{name} {values[0]:.4g} -> {values[-1]:.4g}" for name, values in self.lines.items() if values)
        return f"LineChart({self.title or 'lines'}: {ends or 'no values'})"

    def _repr_html_(self) -> str:
        return self.svg()

    def svg(self, width: int = 520) -> str:
        """The chart as SVG.

        Args:
            width: Width in pixels.

        Returns:
            SVG that uses the colour of the surrounding text.
        """
        found = [value for values in self.lines.values() for value in values if math.isfinite(value)]
        low, high = _range(found)
        longest = max(map(len, self.lines.values()), default=0)
        left, right = 52, 8
        legend, rows = self._legend(left, width)
        top = 26 + 18 * rows

        def at(number: int, value: float) -> str:
            x = left + (width - left - right) * number / max(longest - 1, 1)
            return f"{x:.1f},{top + self.height * (high - value) / (high - low):.1f}"

        parts = [f'<text x="0" y="14" {FONT} font-weight="600">{escape(self.title)}</text>']
        for value in (low, (low + high) / 2, high):
            begin, y = at(0, value).split(",")
            parts.append(f'<path d="M{begin} {y}H{width - right}" stroke="currentColor" stroke-opacity=".15"/>')
            parts.append(f'<text x="{left - 6}" y="{float(y) + 4:.1f}" text-anchor="end" {FONT}>{_told(value)}</text>')
        for number, values in enumerate(self.lines.values()):
            colour = COLOURS[number % len(COLOURS)]
            points = [at(i, value) for i, value in enumerate(values) if math.isfinite(value)]
            path = " ".join(points if len(points) > 1 else 2 * points)  # a single point is a dot
            style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linecap="round"'
            parts.append(f'<polyline points="{path}" {style}/>')
        parts += legend
        if self.x:
            end = self.height + top + 16
            parts.append(f'<text x="{left}" y="{end}" {FONT}>{escape(self.x)} 1</text>')
            parts.append(f'<text x="{width - right}" y="{end}" text-anchor="end" {FONT}>{longest}</text>')
        return _svg(width, self.height + top + (22 if self.x else 8), "".join(parts), self.title)

    def _legend(self, left: int, width: int) -> tuple[list[str], int]:
        """The legend (mark, name and last value of each line, in as many columns as fit), and its rows below the title.

        A single label that fits beside the title needs no row.
        """
        last = [f"{_told(values[-1])} {self.unit}".strip() if values else "" for values in self.lines.values()]
        labels = [f"{name} {value}".strip() for name, value in zip(self.lines, last, strict=True)]
        room = MARK + GLYPH * max(map(len, labels), default=0)
        if len(labels) == 1 and GLYPH * len(self.title) + room < width:
            return _labels(labels, width - max(room, 180), width, 14, 1), 0
        columns = max(1, min(len(labels), int((width - left) // room)))
        return _labels(labels, left, width, 32, columns), math.ceil(len(labels) / columns)


def _labels(labels: Sequence[str], left: float, width: int, top: int, columns: int) -> list[str]:
    """A legend's marks and texts. A text that is too long is cut; the whole text is its tooltip."""
    parts = []
    most = int((width - left - MARK) // GLYPH)
    for number, label in enumerate(labels):
        colour = COLOURS[number % len(COLOURS)]
        x, y = left + (width - left) * (number % columns) // columns, top + 18 * (number // columns)
        shown = label if len(label) <= most else label[: most - 1] + "…"
        whole = f"<title>{escape(label)}</title>" if shown != label else ""
        parts.append(f'<rect x="{x:.0f}" y="{y - 5}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{x + MARK:.0f}" y="{y}" {FONT}>{whole}{escape(shown)}</text>')
    return parts


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the vertical axis. It includes 0 unless all values are far from 0."""
    high = max(values, default=1.0)
    low = min(values, default=0.0)
    low = low if high > low > high / 2 else min(low, 0.0)
    return low, high if high > low else low + 1.0


def _told(value: float) -> str:
    """A value as a short label."""
    for least, unit, mark in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.3g}{mark}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _svg(width: int, height: int, content: str, title: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" style="max-width:100%;height:auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" {size}>{content}</svg>'
