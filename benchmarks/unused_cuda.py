"""What adapters and speculation cost on one GPU where no request uses them: 8B shape, random weights.

    python benchmarks/unused_cuda.py [--rounds 5] [--rows step.1,step.32,step.256,first.8192]

Engines: "off" has neither option, "adapters" has enable_lora and an adapter that no request names, "speculation" has the suffix
source and requests with speculative=False. All live at the same time and take turns in each round. A cell is the median over
rounds of the time divided by that of "off" in the same round, with the smallest and the largest. "off again" is a second engine
without options: its ratio is what the measurement itself gives.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from adapters_cuda import RANK, load
from cuda import Engine

ENGINES: dict[str, dict[str, Any]] = {
    "off": {},
    "off again": {},
    "adapters": {"enable_lora": True, "max_loras": 8, "max_lora_rank": RANK},
    "speculation": {"speculative_config": {"method": "suffix", "k": "auto"}},
}


def milliseconds(engine: Engine, row: str) -> float:
    """Of a step of so many sequences, or of the first token behind a prompt."""
    kind, size = row.split(".")
    batch, length, new_tokens = (int(size), 128, 192) if kind == "step" else (1, int(size), 1)
    before = engine.llm.stats().num_steps
    begun = time.perf_counter()
    engine.run(engine.prompts(batch, length), new_tokens, speculative=False)
    seconds = time.perf_counter() - begun
    if kind == "first":
        return 1e3 * seconds
    full = [s for s in engine.llm.step_log(4096) if s.number > before and s.decode_rows == s.rows == batch]
    return 1e3 * (full[-1].start - full[0].start) / (full[-1].number - full[0].number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="step.1,step.32,step.256,first.8192")
    args = parser.parse_args()
    engines = {name: Engine("8b", kv_cache_memory_bytes="10GiB", **options) for name, options in ENGINES.items()}
    load(engines["adapters"], 1)
    print(f"{'row':12}{'off, ms':>10}" + "".join(f"{name:>28}" for name in list(engines)[1:]))
    for row in args.rows.split(","):
        found: dict[str, list[float]] = {name: [] for name in engines}
        for i in range(args.rounds + 1):
            order = list(engines) if i % 2 else list(engines)[::-1]
            for name in order:
                ms = milliseconds(engines[name], row)
                if i:  # the first round warms up
                    found[name].append(ms)
        line = f"{row:12}{statistics.median(found['off']):10.3f}"
        for name in list(engines)[1:]:
            ratios = [a / b for a, b in zip(found[name], found["off"], strict=True)]
            line += f"{statistics.median(ratios):12.4f} ({min(ratios):.4f} {max(ratios):.4f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
