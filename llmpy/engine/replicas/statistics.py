"""Puts the statistics of several engines together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..._core import Engine

Histograms = dict[str, tuple[tuple[float, ...], tuple[int, ...], float]]

GREATEST = ("weight_epoch", "sleep_level", "max_steps_in_flight", "last_step_ms", "last_host_us", "uptime_s")
"""Numbers that a sum would say nothing about: of these the greatest counts. All other numbers are summed."""
EVENTS_AT_ONCE = 64


def total(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """The counters and gauges of all replicas together."""
    return {name: (max if name in GREATEST else sum)(one[name] for one in stats) for name in stats[0]}


def summed_histograms(histograms: Sequence[Histograms]) -> Histograms:
    """Histograms with equal bounds, added up."""
    found: Histograms = {}
    for name, (bounds, _, _) in histograms[0].items():
        counts = zip(*(one[name][1] for one in histograms), strict=True)
        found[name] = bounds, tuple(map(sum, counts)), sum(one[name][2] for one in histograms)
    return found


def merged_steps(logs: Sequence[list[tuple[Any, ...]]], most: int) -> list[tuple[Any, ...]]:
    """The last steps of all logs, the earliest start first, each with the number of its log at the end."""
    steps = [(*step, replica) for replica, log in enumerate(logs) for step in log]
    steps.sort(key=lambda step: (step[1], step[-1]))
    return steps[max(len(steps) - most, 0) :]


class Events:
    """One ring of the events of all prefix caches, with numbers of its own. An event that a cache has lost leaves a gap.

    Args:
        engines: The engines.
        capacity: Events that each of them keeps.
    """

    def __init__(self, engines: Sequence[Engine], capacity: int) -> None:
        self._engines = engines
        self._next = [0] * len(engines)
        """Number of the next event of each engine."""
        self._count = 0
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=capacity * len(engines))
        self._lock = threading.Lock()

    def read(self, start: int) -> tuple[int, list[tuple[Any, ...]]]:
        """As the core's `kv_events`; an event has its replica's number at the end."""
        with self._lock:
            for replica, engine in enumerate(self._engines):
                self._collect(replica, engine)
            oldest = self._ring[0][0] if self._ring else self._count
            found = [event for event in self._ring if event[0] >= start][:EVENTS_AT_ONCE]
        return (found[-1][0] + 1 if found else max(start, oldest)), found

    def _collect(self, replica: int, engine: Engine) -> None:
        """Moves an engine's new events into the ring."""
        while True:
            behind, events = engine.kv_events(self._next[replica])
            for event in events:
                self._count += event[0] - self._next[replica]
                self._ring.append((self._count, *event[1:], replica))
                self._count += 1
                self._next[replica] = event[0] + 1
            self._count += behind - self._next[replica]
            self._next[replica] = behind
            if not events:
                return
