"""Requests that do not fit the pool together: tokens per second by the way in which preempted samples come back.

    python benchmarks/preemption.py [--model demo] [--requests 8] [--length 192] [--new 96] [--share 0.4] [--rounds 3]

The pool holds `share` of all keys and values, host memory twice all of them. Random prompts, greedy, no EOS. The ways take
turns; medians. Ids must be those of the first way. `redone`: rows that were computed again.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from llmpy import LLM, SamplingParams

WAYS = [(way, caches) for caches in (True, False) for way in ("recompute", "swap", "auto")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    longest = chosen.length + chosen.new + 16
    options = {"device": chosen.device, "max_model_len": longest, "max_num_seqs": chosen.requests}
    with LLM(chosen.model, kv_cache_memory_bytes="1GiB", **options) as llm:
        token_bytes = llm.memory()["kv"] // llm.stats().kv_blocks_total // 16
    all_bytes = token_bytes * longest * chosen.requests
    rng = np.random.default_rng(3)
    prompts = rng.integers(1000, 20000, (chosen.rounds, chosen.requests, chosen.length)).tolist()
    params = SamplingParams(temperature=0, max_tokens=chosen.new, ignore_eos=True)
    llms = [
        LLM(chosen.model, kv_cache_memory_bytes=int(all_bytes * chosen.share), host_cache_bytes=2 * all_bytes, preemption=way,
            enable_prefix_caching=caches, **options) for way, caches in WAYS
    ]  # fmt: skip
    rates: list[list[float]] = [[] for _ in WAYS]
    for batch in prompts:
        expected = None
        for llm, found in zip(llms, rates, strict=True):
            begun = time.perf_counter()
            ids = [list(output.outputs[0].token_ids) for output in llm.generate(batch, params, use_tqdm=False)]
            found.append(chosen.requests * chosen.new / (time.perf_counter() - begun))
            expected = expected or ids
            if ids != expected:
                raise SystemExit("the ids differ")
    for (way, caches), llm, found in zip(WAYS, llms, rates, strict=True):
        stats, spread = llm.stats(), f"({min(found):.0f} to {max(found):.0f})"
        print(
            f"{'cache' if caches else 'no cache':9}{way:10}{statistics.median(found):8.0f} tok/s {spread}"
            f"  preempted {stats.num_preemptions}, swapped {stats.num_swaps}, redone {stats.redone_rows}"
        )
        llm.close()


if __name__ == "__main__":
    main()
