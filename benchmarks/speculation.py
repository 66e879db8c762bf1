"""Speculation on real text: tokens a step and speed against an engine without it, in one process, by turns.

    python benchmarks/speculation.py [--model demo] [--tokens 160] [--rounds 5] [--batch 1]

Each row is a kind of text and a source. Engines take turns, round by round; `speed` is the median over the rounds of the time
without speculation divided by the time with it. All outputs are compared: speculation must not change them. All
rounds ask the same questions. "group" draws eight samples of one, with other seeds in every round, as training by groups does;
"again" draws one sample of a question, with the same seed in every round.
--processor counts the processor's time instead of the clock's: on a busy machine, with one thread (taskset -c 0).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from llmpy import LLM, SamplingParams

FOX = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. "
FOX += "How vexingly quick daft zebras jump! "
CODE = """def add(items):
    total = 0
    for item in items:
        total += item.price * item.count
    if total < 0:
        raise ValueError(total)
    return total
"""
TASKS = {
    "copy": ["Repeat this text exactly:\n\n" + FOX * 2],
    "code": ["Rename the variable `total` to `amount` and print the whole function:\n\n" + CODE],
    "JSON": ["Write a JSON list of ten people, each with the keys name, age and city."],
    "story": ["Tell me a story about a sailor who finds a new island."],
    "group": ["What is 12 times 7? Think step by step."],
    "again": ["Tom buys 4 pens for 3 dollars each and 5 books for 12 dollars each. How much does he pay? Explain every step."],
}
SOURCES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram, k 4": {"method": "ngram", "k": 4},
    "ngram, k auto": {"method": "ngram", "k": "auto"},
    "suffix, k 4": {"method": "suffix", "k": 4},
    "suffix, k auto": {"method": "suffix", "k": "auto"},
}


def ask(
    llm: LLM, task: str, tokens: int, batch: int, number: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, list[list[int]]]:
    """Seconds, tokens of a sample in a step, and the ids of a call."""
    samples = 8 if task == "group" else 1
    chats = [[{"role": "user", "content": text}] for text in TASKS[task] * batch]
    seed, temperature = number if task == "group" else 0, 0.7 if task in ("group", "again") else 0
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed, n=samples)
    before = llm.stats()
    begun = clock()
    outputs = llm.chat(chats, params, use_tqdm=False)
    seconds = clock() - begun
    after = llm.stats()
    drawn = after.generation_tokens - before.generation_tokens
    accepted = after.accepted_rows - before.accepted_rows
    return seconds, drawn / (drawn - accepted), [sample.token_ids for output in outputs for sample in output.outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1, help="how often each question is asked at once")
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--tasks", default=",".join(TASKS))
    chosen = parser.parse_args()
    memory = "256MiB" if chosen.device in (None, "cpu") else "4GiB"
    options: dict[str, Any] = {"device": chosen.device, "max_model_len": 1024, "kv_cache_memory_bytes": memory}
    clock = time.process_time if chosen.processor else time.perf_counter
    engines = {name: LLM(chosen.model, speculative_config=source, **options) for name, source in SOURCES.items()}
    print(f"{'text':8}{'source':18}{'tokens/step':>12}{'speed':>8}{'least':>8}{'most':>8}")
    for task in chosen.tasks.split(","):
        times: dict[str, list[float]] = {name: [] for name in SOURCES}
        per_step: dict[str, list[float]] = {name: [] for name in SOURCES}
        for number in range(chosen.rounds + 1):
            wanted: list[list[int]] = []
            for name, llm in engines.items():
                seconds, tokens, ids = ask(llm, task, chosen.tokens, chosen.batch, number, clock)
                wanted = wanted or ids
                if ids != wanted:
                    raise SystemExit(f"{task}, {name}: the output differs")
                if number:  # the first round fills the caches
                    times[name].append(seconds)
                    per_step[name].append(tokens)
        for name in SOURCES:
            ratios = [a / b for a, b in zip(times["none"], times[name], strict=True)]
            numbers = statistics.median(ratios), min(ratios), max(ratios)
            speeds = "".join(f"{number:8.2f}" for number in numbers)
            print(f"{task:8}{name:18}{statistics.median(per_step[name]):12.2f}{speeds}", flush=True)


if __name__ == "__main__":
    main()
