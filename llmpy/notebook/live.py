"""The progress of a running call: the number of finished prompts, and a chart of throughput."""

from __future__ import annotations

import time
from html import escape
from importlib import import_module
from typing import Any

from .charts import COLOURS, LineChart
from .lines import size

SAMPLES = 120
"""Most points of the chart; beyond that, pairs of points are merged."""


class LiveBar:
    """A progress bar like tqdm's with a chart of throughput, which a notebook updates live; pass it as `use_tqdm`.

    Args:
        total: Number of prompts of the call, or of bytes.
        desc: Name of the counted things.
        unit: "B" for bytes.
        unused: tqdm's other options.
    """

    def __init__(self, total: int, desc: str = "", unit: str = "it", **unused: Any) -> None:
        display: Any = import_module("IPython.display").display
        self._total, self._desc, self._done = total, desc, 0
        self._told = size if unit == "B" else str
        self.start_t = self.last_print_t = time.perf_counter()
        self._first_counts: tuple[int, int] | None = None
        self._counts = self._drawn_counts = (0, 0)
        self._speeds: list[float] = []
        self._seconds_a_sample = 0.0
        self._handle = display(self, display_id=True)

    def update(self, n: int) -> None:
        """Adds `n` finished prompts."""
        self._done += n
        self._draw()

    def set_counts(self, prompt_tokens: int, output_tokens: int) -> None:
        """Sets the engine's current counters."""
        now, counts = time.perf_counter(), (prompt_tokens, output_tokens)
        if self._first_counts is None:
            self._first_counts, self.last_print_t, self._drawn_counts = counts, now, counts
        elif now - self.last_print_t >= max(self._seconds_a_sample, 0.1):
            self._speeds.append((output_tokens - self._drawn_counts[1]) / (now - self.last_print_t))
            self.last_print_t, self._drawn_counts = now, counts
            if len(self._speeds) > SAMPLES:
                pairs = zip(self._speeds[::2], self._speeds[1::2], strict=False)
                self._speeds = [(a + b) / 2 for a, b in pairs]
                self._seconds_a_sample = 2 * max(self._seconds_a_sample, 0.1)
        self._counts = counts
        self._draw()

    def close(self) -> None:
        """Draws the final state, which stays visible."""
        self._draw()

    def _draw(self) -> None:
        self._handle.update(self)

    def _line(self) -> str:
        elapsed = max(time.perf_counter() - self.start_t, 1e-9)
        line = f"{self._desc}: {self._told(self._done)}/{self._told(self._total)}, {elapsed:.1f} s"
        if self._first_counts is None:
            return line
        read, made = (now - first for now, first in zip(self._counts, self._first_counts, strict=True))
        return f"{line}, read {read / elapsed:,.0f} tokens/s, wrote {made / elapsed:,.0f} tokens/s"

    def __repr__(self) -> str:
        return self._line()

    def _repr_html_(self) -> str:
        share = 100 * self._done / max(self._total, 1)
        bar = f'<div style="width:{share:.1f}%;height:6px;border-radius:3px;background:{COLOURS[0]}"></div>'
        track = f'<div style="max-width:520px;border-radius:3px;background:rgba(128,128,128,.2);margin:4px 0">{bar}</div>'
        chart = LineChart({"written": self._speeds}, "Throughput", unit="tokens/s", height=60)
        picture = chart.svg() if len(self._speeds) > 1 else ""
        return f"<div><small>{escape(self._line())}</small>{track}{picture}</div>"
