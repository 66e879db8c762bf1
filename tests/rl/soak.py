"""A soak test of AsyncEngine: eight threads act at random moments; no output may be lost, doubled, wrong or left behind.

    nice -n 10 python tests/rl/soak.py --minutes 30 [--device cuda:0] [--seed 1]

It goes in rounds. In a round threads with event loops, threads with handles, one that pauses and aborts, and one that trains
act at random on a catalogue of requests with known answers from an engine alone. soak_requests.py compares all outputs with
them at once. Between two rounds nothing runs: all gauges are 0, and memory, threads and descriptors are as before.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import soak_actors as actors
import soak_requests as requests

from llmpy import AsyncEngine, _core
from llmpy.engine.jobs import MAX_SHARED_THREADS
from llmpy.outputs import EngineStats

KEPT_BYTES = 8 << 20
"""Allowed growth of the process after its first rounds; Python's heap varies by this much."""


def standing(*names: str) -> list[threading.Thread]:
    """Number of helper threads of the engine and of the process that wait for the next call."""
    found = [thread for thread in threading.enumerate() if thread.name in names]
    assert len(found) <= 2 * MAX_SHARED_THREADS, found
    return found


def footprint(engine: AsyncEngine) -> dict[str, object]:
    """Resources of the process and the engine while nothing runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    memory = engine.memory()
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "threads": len(os.listdir("/proc/self/task")) - len(standing("llmpy-helper")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "blocks": _core.held_count(),
        "memory": {name: value for name, value in memory.items() if not name.startswith("device_")},
    }


def settle(engine: AsyncEngine) -> None:
    """Waits until no resource is held, and checks every gauge."""
    deadline = time.monotonic() + 60
    while (
        (stats := engine.stats()).num_unfinished
        or stats.kv_blocks_free != stats.kv_blocks_total
        or threading.active_count() > 1 + len(standing("llmpy-helper", "llmpy-tokenizer", "llmpy-tokenizer-long"))
    ):
        assert time.monotonic() < deadline, f"still held: {stats}"
        time.sleep(0.01)
    engine.check()
    assert stats.num_running == stats.num_waiting == 0 and not stats.paused, stats
    assert stats.allocations_since_warmup == 0, stats
    driver = engine._driver
    assert not driver.feeds and not driver.named and not driver.jobs, (driver.feeds, driver.named)
    engine.check_health()


def play(engine: AsyncEngine, catalogue: requests.Catalogue, seconds: float, seed: int) -> Counter[str]:
    """Runs one round; returns counts of its events."""
    stage = actors.Stage(engine, catalogue, time.monotonic() + seconds)
    parts = [actors.read_in_loops] * 3 + [actors.use_handles] * 3 + [actors.pause_and_abort, actors.train]
    threads = [
        threading.Thread(target=stage.act, args=(part, random.Random(f"{seed}/{i}")), name=part.__name__)
        for i, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
        if thread.is_alive():
            raise SystemExit(f"{thread.name} hangs; {engine.stats()}; done so far: {stage.done}")
    if stage.failures:
        raise stage.failures[0]
    return stage.done


def has_seen_all(done: Counter[str], stats: EngineStats) -> bool:
    """Whether all kinds of events have happened, also on a slow machine."""
    sleeps = sum(times for name, times in done.items() if name.startswith("sleep"))
    is_disturbed = done["abort"] and done["keep"] + done["wait"] > 1 and stats.num_preemptions
    has_slept = sleeps > 1 and done["sleep 1"]
    return bool(is_disturbed and has_slept and done["whole"] > 100 and stats.weight_epoch > 5 and done["rebuilt and compared"])


def run(folder: str, device: str, minutes: float, round_seconds: float, seed: int) -> dict[str, object]:
    """Runs the soak; returns its counts."""
    catalogue = requests.Catalogue(Path(folder), device, random.Random(seed))
    engine = AsyncEngine(catalogue.path, **catalogue.options, max_queued_requests=60)
    end, marks, done, n_rounds = time.monotonic() + 60 * minutes, [], Counter[str](), 0
    while time.monotonic() < end or len(marks) < 3:
        done += play(engine, catalogue, round_seconds, seed + n_rounds)
        n_rounds += 1
        settle(engine)
        done["rebuilt and compared"] += catalogue.compare_rebuilt()
        if has_seen_all(done, engine.stats()):  # what the first sleep and the first update allocate stays
            marks.append(footprint(engine))
    stats = engine.stats()
    first, last = marks[0], marks[-1]
    grown = int(last.pop("resident")) - int(first.pop("resident"))  # type: ignore[call-overload]
    assert first == last, (first, last)
    assert grown < KEPT_BYTES, marks
    samples = done["samples"]
    assert sum(stats.finished.values()) == samples, (stats.finished, samples)
    assert done["tokens"] <= stats.generation_tokens
    asyncio.run(engine.shutdown())
    found = {"rounds": n_rounds, "epochs": stats.weight_epoch, "grown_bytes": grown, "preemptions": stats.num_preemptions}
    found |= {"generated": stats.generation_tokens, "finished": stats.finished, "done": dict(sorted(done.items()))}
    return found | last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--round", type=float, default=20, help="seconds of a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(run(place, given.device, given.minutes, given.round, given.seed), indent=1))
