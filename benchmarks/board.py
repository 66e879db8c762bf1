"""Writes docs/results/board.html: every measured row over the commits, from the committed results.

    python benchmarks/board.py

A row is one measurement on one kind of device. Its line shows the newest value, the must, the aim and vLLM's value of
benchmarks/cuda.py, a plot of all values from the oldest commit to the newest one, and by how much the newest value is better
or worse than the best earlier one. A row that is worse by more than 3 % is marked. CPU results stand beside those of llama.cpp.
The page is one file without scripts; it changes only if a result changes.
"""

from __future__ import annotations

import csv
import html
import runpy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results/board.html"
REGRESSION = 0.03
WIDTH, HEIGHT, EDGE = 160, 28, 4  # of a plot, in pixels
NOT_COMPARED = {"passed", "errors", "processes with an error"}  # counts, not speeds

STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2em auto;max-width:78em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:0 0 2em}th,td{padding:.15em .7em;text-align:right;border-bottom:1px solid #e4e4e4}
th:first-child,td:first-child{text-align:left;font-family:ui-monospace,monospace}th{font-weight:600;color:#555}
.worse{color:#b00020;font-weight:600}.better{color:#0a7a2f}.met{background:#e7f6ec}.short{background:#fdf3e1}
svg{vertical-align:middle}polyline{fill:none;stroke:#3566b8;stroke-width:1.5}circle{fill:#3566b8}
.must{stroke:#d08700;stroke-dasharray:3 3}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}th,td{border-color:#333}th{color:#aaa}
.met{background:#12301c}.short{background:#3a2a08}.worse{color:#ff6b7f}.better{color:#5fcf84}}
""".strip()


@dataclass(frozen=True)
class Point:
    """One result: a value with its commit, date and command."""

    value: float
    unit: str
    commit: str
    date: str
    command: str


@dataclass(frozen=True)
class Series:
    """All results of a row on one kind of device, the oldest first.

    Args:
        row: The row's name.
        points: The results, at least one.
        must, aim: Goals, or None.
        others: The same measurement of another engine, as text.
    """

    row: str
    points: list[Point]
    must: float | None = None
    aim: float | None = None
    others: str = ""

    @property
    def newest(self) -> Point:
        return self.points[-1]

    @property
    def rises(self) -> bool:
        """Whether more is better."""
        unit = self.newest.unit
        return unit.endswith("/s") or unit.startswith("passed")

    @property
    def gain(self) -> float | None:
        """How much better the newest value is than the best earlier one, as a share of that; None without an earlier one."""
        earlier = [point.value for point in self.points[:-1]]
        if not earlier or self.newest.unit.split(",")[0] in NOT_COMPARED:
            return None
        best = max(earlier) if self.rises else min(earlier)
        if best <= 0:
            return None
        return self.newest.value / best - 1 if self.rises else 1 - self.newest.value / best

    @property
    def has_regressed(self) -> bool:
        return self.gain is not None and self.gain < -REGRESSION

    def reaches(self, goal: float | None) -> bool | None:
        """Whether the newest value reaches a goal; None without a goal."""
        if goal is None:
            return None
        return self.newest.value >= goal if self.rises else self.newest.value <= goal


def read(paths: Iterable[Path]) -> dict[str, list[Series]]:
    """The rows of each device, from files with the columns of results_h200.csv, in the order of the files."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    goals: dict[tuple[str, str], tuple[float | None, float | None]] = {}
    for path in paths:
        for line in csv.DictReader(path.read_text().splitlines()):
            key = line["device"], line["row"]
            value = number(line["value"])
            if value is None:
                continue
            found[key].append(Point(value, line["unit"], line["commit"], line["date"], line["command"]))
            goals[key] = number(line["must"]), number(line["aim"])
    result: dict[str, list[Series]] = defaultdict(list)
    for (device, row), points in found.items():
        must, aim = goals[device, row]
        result[device].append(Series(row, sorted(points, key=lambda point: point.date), must, aim, vllm(row)))
    return result


def number(text: str | None) -> float | None:
    """A number, or None for what is none."""
    try:
        return float(text or "")
    except ValueError:
        return None


def vllm(row: str) -> str:
    """vLLM's value of a row, as benchmarks/cuda.py knows it."""
    rows = measured_rows()
    return rows[row].vllm if row in rows else ""


@cache
def measured_rows() -> dict[str, Any]:
    """The rows of benchmarks/cuda.py, by name; packages named cuda exist, so its path finds it."""
    return runpy.run_path(str(Path(__file__).with_name("cuda.py")))["ROWS"]


def plot(series: Series) -> str:
    """All values from left to right, best at the top; the must is a dashed line if it lies in the picture."""
    values = [point.value for point in series.points]
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0

    def y(value: float) -> float:
        share = (value - low) / span if series.rises else (high - value) / span
        return round(HEIGHT - EDGE - share * (HEIGHT - 2 * EDGE), 1)

    step = (WIDTH - 2 * EDGE) / max(len(values) - 1, 1)
    places = [(round(EDGE + i * step, 1), y(value)) for i, value in enumerate(values)]
    line = " ".join(f"{x},{height}" for x, height in places)
    titles = [f"{point.value:g} {point.unit}, {point.commit}, {point.date}" for point in series.points]
    dots = "".join(
        f'<circle cx="{x}" cy="{height}" r="2.5"><title>{html.escape(title)}</title></circle>'
        for (x, height), title in zip(places, titles, strict=True)
    )
    must = ""
    if series.must is not None and low <= series.must <= high:
        must = f'<line class="must" x1="0" x2="{WIDTH}" y1="{y(series.must)}" y2="{y(series.must)}"/>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{must}<polyline points="{line}"/>{dots}</svg>'


def cells(series: Series) -> Iterator[str]:
    """The cells of a row, as HTML."""
    newest = series.newest
    yield f'<td title="{html.escape(newest.command)}">{html.escape(series.row)}</td>'
    yield f"<td>{newest.value:g} {html.escape(newest.unit)}</td>"
    for goal in (series.must, series.aim):
        mark = {True: ' class="met"', False: ' class="short"', None: ""}[series.reaches(goal)]
        yield f"<td{mark}>{'' if goal is None else f'{goal:g}'}</td>"
    yield f"<td>{html.escape(series.others)}</td><td>{plot(series)}</td>"
    gain = series.gain
    mark = "" if gain is None else ' class="worse"' if series.has_regressed else ' class="better"' if gain > REGRESSION else ""
    yield f"<td{mark}>{'' if gain is None else f'{100 * gain:+.1f} %'}</td>"
    yield f"<td>{html.escape(newest.commit)}, {newest.date}</td>"


def table(rows: Iterable[Series]) -> str:
    """The table of a device; its rows keep the order in which they were measured first."""
    head = ["row", "newest", "must", "aim", "vLLM", "all commits", "newest against best earlier", "commit"]
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(cells(series)) + "</tr>" for series in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def cpu_table(path: Path) -> str:
    """A table of benchmarks/cpu.py as it is: a comment with device and command, then llmpy beside llama.cpp."""
    comment, *lines = path.read_text().splitlines()
    head, *rows = csv.reader(lines)
    text = "<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>\n"
    for row in rows:
        text += "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n"
    return f"<h2>{html.escape(comment.lstrip('# '))}</h2>\n<table>\n{text}</table>"


def regressions(devices: dict[str, list[Series]]) -> str:
    """The list of rows that are worse than before."""
    found = [(device, series) for device, rows in devices.items() for series in rows if series.has_regressed]
    if not found:
        return "<p>No row is worse than its best earlier value by more than 3 %.</p>"
    items = "".join(
        f"<li><code>{html.escape(series.row)}</code> on {html.escape(device)}: "
        f"{series.newest.value:g} {html.escape(series.newest.unit)}, "
        f"<span class=worse>{100 * (series.gain or 0):+.1f} %</span></li>"
        for device, series in found
    )
    return f"<p>{len(found)} rows are worse than their best earlier value by more than 3 %:</p><ul>{items}</ul>"


def page(folder: Path) -> str:
    """The whole page from the results in a folder."""
    devices = read(sorted(folder.glob("results_h*.csv")))
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>llmpy: results</title>',
        f"<style>{STYLE}</style>",
        "<h1>llmpy: results</h1>",
        "<p>Every measured row by commit. Hover over a row's name for its command, over a point for its commit. Plots have the "
        "best value at the top; a dashed line is the must. <code>python benchmarks/board.py</code> writes this page.</p>",
        regressions(devices),
    ]
    parts += [f"<h2>{html.escape(device)}</h2>\n{table(rows)}" for device, rows in devices.items()]
    parts += [cpu_table(path) for path in sorted(folder.glob("results_cpu*.csv"))]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(ROOT / "benchmarks"))
