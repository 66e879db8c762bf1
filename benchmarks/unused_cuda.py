"""What adapters and speculation cost on one GPU where no request uses them: 8B shape, random weights.

    python benchmarks/unused_cuda.py [--rounds 5] [--rows step.1,step.32,step.256,first.8192]

Engines: "off" has neither option, "adapters" has enable_lora and an adapter that no request names, "speculation" has the suffix
source and requests with speculative=False. All live at the same time and take turns in each round. A cell is the median over
rounds of the time divided by that of "off" in the same round, with the smallest and the largest. "off again" is a second engine
without options: its ratio is what the measurement itself gives.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

from adapters_cuda import load
from cuda import Engine
from unused import ENGINES, in_turns, ratios


def milliseconds(row: str, engine: Engine, _: int) -> float:
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
        found = in_turns(engines, args.rounds, functools.partial(milliseconds, row))
        line = f"{row:12}{statistics.median(found['off']):10.3f}"
        for name in list(engines)[1:]:
            each = ratios(found, name)
            line += f"{statistics.median(each):12.4f} ({min(each):.4f} {max(each):.4f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
