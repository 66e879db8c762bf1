"""Models on several ranks beside one rank: steps, prompts, the host's share of a step, and the start.

    python benchmarks/parallel.py [ROW ...] [--ranks 1,2] [--rounds 3] [--tokens 256] [--out DIR] [--commit ID]
    python benchmarks/parallel.py "8b.host.*" --device-ids 0,0    # all ranks on one device

ROW is a name of ROWS below or a pattern; none means all. The kinds of rows are those of benchmarks/cuda.py. Numbers of ranks
take turns, an engine at a time, so a model must fit for each of them; "70b" needs two H200, "qwen235b" four. "must" and
"aim" are for 2 H200; rows without them have none. Every model has a row "start", the constructor; 8b.start has goals if one
rank is measured, too.

--device-ids gives a device for each rank, and a number twice where ranks share a device. Then only the rows "host" mean
anything, because ranks wait for each other's kernels there; each rank has a cache of 16 GiB.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cuda
from cuda import Engine


@dataclass(frozen=True)
class Row:
    """What is measured, and goals for two ranks."""

    unit: str
    must: float
    aim: float
    job: Callable[[Engine], float]


NO_GOAL = (0.0, 0.0)


def steps(name: str, goals: dict[int, tuple[float, float]]) -> dict[str, Row]:
    """Rows of decode steps by batch."""
    return {f"{name}.step.{n}": Row("ms", *goal, lambda e, n=n: e.step(n)) for n, goal in goals.items()}  # type: ignore[misc]


ROWS: dict[str, Row] = {
    **steps("8b", {1: (2.35, 2.1), 32: (3.1, 2.7), 128: (4.2, 3.7), 256: (6.4, 5.6)}),
    "8b.first.8192": Row("ms", 135, 120, lambda e: e.first(8192)),
    "8b.prefill": Row("tok/s", 70_000, 78_000, lambda e: e.prefill(32, 2048)),
    "8b.host.1": Row("us", 30, 20, lambda e: e.host(1)),
    "8b.host.256": Row("us", 60, 50, lambda e: e.host(256)),
    **steps("70b", {1: (17.3, 16.3), 32: (19.5, 18), 128: (27, 24), 256: NO_GOAL}),
    "70b.prefill": Row("tok/s", *NO_GOAL, lambda e: e.prefill(32, 2048)),
    **steps("qwen30b", {1: (1.8, 1.55), 32: (8.0, 7.2), 256: (11.5, 10.3)}),
    **steps("qwen235b", dict.fromkeys((1, 32, 128, 256), NO_GOAL)),
    "qwen235b.prefill": Row("tok/s", *NO_GOAL, lambda e: e.prefill(32, 2048)),
}
SHARED_CACHE = 16 << 30
START = Row("s", *NO_GOAL, lambda e: 0.0)  # the constructor
START_BEYOND = (1.0, 0.3)
"""Seconds that two ranks of the 8B model may take longer to start than one, must and aim."""


def goal_of(row: str, samples: dict[tuple[str, int], list[float]]) -> Row:
    """A row with its goals; those of a start lie beyond that of one rank in the same run."""
    alone = samples.get((row, 1))
    if row == "8b.start" and alone:
        must, aim = (statistics.median(alone) + more for more in START_BEYOND)
        return replace(START, must=must, aim=aim)
    return ROWS.get(row, START)


def measure_model(name: str, rows: list[str], args: argparse.Namespace) -> None:
    """Prints the medians of a model's rows by number of ranks."""
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for n_ranks in args.ranks:
            options: dict[str, Any] = {}
            if n_ranks > 1 and args.device_ids:
                options = {"device_ids": args.device_ids[:n_ranks], "kv_cache_memory_bytes": SHARED_CACHE}
            begin = time.perf_counter()
            engine = Engine(name, args.layers, tensor_parallel_size=n_ranks, **options)
            samples[f"{name}.start", n_ranks].append(time.perf_counter() - begin)
            engine.new_tokens = args.tokens
            for row in rows:
                ROWS[row].job(engine)  # warms up
                samples[row, n_ranks].append(ROWS[row].job(engine))
            engine.close()
    command = " ".join(["benchmarks/parallel.py", *cuda.words_of(sys.argv)])
    lines: list[dict[str, object]] = []
    for (row, n_ranks), values in samples.items():
        goal, spread = goal_of(row, samples), f"{min(values):.4g}..{max(values):.4g} of {len(values)}"
        goals = f"must {goal.must:.4g}, aim {goal.aim:.4g}" if n_ranks == 2 and goal.must else ""
        print(f"{row:18} {n_ranks} ranks {statistics.median(values):10.4g} {goal.unit:6} {spread:28} {goals}", flush=True)
        line = {"row": f"{n_ranks} ranks.{row}", "value": f"{statistics.median(values):.4g}", "unit": goal.unit}
        lines.append(line | ({"must": f"{goal.must:.5g}", "aim": f"{goal.aim:.5g}"} if goals else {}))
    cuda.add_lines(args.out, args.commit, command, lines)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["*"])
    parser.add_argument("--ranks", type=numbers, default=(1, 2))
    parser.add_argument("--device-ids", type=numbers)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a quick try")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each sequence of a row of steps")
    parser.add_argument("--out", type=Path, help="directory for results.csv")
    parser.add_argument("--commit", default="", help="what is measured; default: git's HEAD, if there is one")
    args = parser.parse_args()
    wanted = [row for row in ROWS if any(fnmatch.fnmatch(row, one) for one in args.rows)]
    for name in cuda.MODELS:
        if rows := [row for row in wanted if row.startswith(name + ".")]:
            measure_model(name, rows, args)


if __name__ == "__main__":
    main()
