"""What adapters and speculation cost on the CPU where no request uses them: the demo model.

    taskset -c 0 python benchmarks/unused.py [--rounds 15] [--rows step.1,step.8,prompt.1024]

Engines as in benchmarks/unused_cuda.py; they take turns. A cell is the smallest time of all rounds divided by that of "off",
and in brackets the median of the rounds' ratios. `step.N`: N samples of 64 tokens; `prompt.N`: a prompt of N and one token.
Times are the processor's, which other work on the machine changes less than the clock's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmpy import LLM, SamplingParams

RANK = 16
ENGINES: dict[str, dict[str, Any]] = {
    "off": {},
    "off again": {},
    "adapters": {"enable_lora": True, "max_loras": 8, "max_lora_rank": RANK},
    "speculation": {"speculative_config": {"method": "suffix", "k": "auto"}},
}


def load(llm: LLM) -> None:
    """Loads an adapter of a linear, which no request names."""
    linear, rng = "model.layers.0.mlp.down_proj", np.random.default_rng(0)
    rows, columns = llm.weight_info(linear + ".weight")[0]["shape"]
    tensors = {
        f"{linear}.lora_A.weight": rng.standard_normal((RANK, columns), np.float32),
        f"{linear}.lora_B.weight": rng.standard_normal((rows, RANK), np.float32),
    }
    llm.load_adapter("unused", tensors, {"r": RANK, "lora_alpha": RANK})


def seconds(row: str, llm: LLM, number: int) -> float:
    """The processor's time of a row."""
    kind, size = row.split(".")
    n, length, tokens = (int(size), 16, 64) if kind == "step" else (1, int(size), 1)
    prompts = np.random.default_rng(number).integers(1000, 40000, (n, length)).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculative=False)
    begun = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - begun


def in_turns(engines: Mapping[str, Any], n_rounds: int, measure: Callable[[Any, int], float]) -> dict[str, list[float]]:
    """What `measure(engine, round)` gives for each engine and round, but the first, which warms up. The order alternates."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(n_rounds + 1):
        for name in list(engines) if i % 2 else list(engines)[::-1]:
            value = measure(engines[name], i)
            if i:
                found[name].append(value)
    return found


def ratios(found: Mapping[str, list[float]], name: str) -> list[float]:
    """An engine's values divided by those of "off" in the same rounds."""
    return [a / b for a, b in zip(found[name], found["off"], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="step.1,step.8,prompt.1024")
    args = parser.parse_args()
    common: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "96MiB", "max_model_len": 2048}
    engines = {name: LLM("demo", **common, **options) for name, options in ENGINES.items()}
    load(engines["adapters"])
    print(f"{'row':14}{'off, ms':>10}" + "".join(f"{name:>24}" for name in list(engines)[1:]))
    for row in args.rows.split(","):
        found = in_turns(engines, args.rounds, functools.partial(seconds, row))
        line = f"{row:14}{1e3 * min(found['off']):10.1f}"
        for name in list(engines)[1:]:
            line += f"{min(found[name]) / min(found['off']):15.4f} ({statistics.median(ratios(found, name)):.4f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
