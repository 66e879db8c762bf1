"""Beam search against as many samples: time of a call.

    python benchmarks/beams.py [--device cuda:0] [--model 8b] [--width 4] [--prompts 1,8] [--tokens 128] [--rounds 5]

On a GPU the default is the shape of Llama-3-8B with random weights, on the CPU the demo model. Both calls give `width` texts of
`tokens` tokens for each prompt; samples are drawn at temperature 1. The calls take turns; `ratio` is the median of a round's
time of the search divided by that of the samples. `us a step` is the median time on the host in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda
import numpy as np

from llmpy import LLM, BeamSearchParams, SamplingParams

LENGTH = 128


def open_engine(model: str | None, device: str) -> LLM:
    if model is None and not device.startswith("cuda"):
        return LLM("demo", device=device, max_model_len=2048)
    path = Path(tempfile.mkdtemp(prefix="llmpy-beams-"))
    (path / "config.json").write_text(json.dumps(cuda.MODELS[model or "8b"].config()))
    return LLM(path, load_format="dummy", skip_tokenizer_init=True, device=device, max_model_len=2048)


def timed(llm: LLM, call: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of a call, and of its decode steps the median duration and time on the host in us."""
    before = llm.stats().num_steps
    begun = time.perf_counter()
    call()
    seconds = time.perf_counter() - begun
    steps = [step for step in llm.step_log(4096) if step.number > before and not step.prompt_rows]
    return seconds, statistics.median(step.device_us for step in steps), statistics.median(step.host_us for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default=None, choices=cuda.MODELS)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompts", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    llm = open_engine(chosen.model, chosen.device)
    beams = BeamSearchParams(chosen.width, chosen.tokens, ignore_eos=True)
    samples = SamplingParams(n=chosen.width, max_tokens=chosen.tokens, ignore_eos=True)
    print(f"{'prompts':9}{'samples s':>10}{'beams s':>9}{'ratio':>8}{'least':>8}{'most':>8}{'us a step: samples':>20}"
          f"{'beams':>8}{'on the host':>13}")  # fmt: skip
    for n in map(int, chosen.prompts.split(",")):
        found: list[tuple[Any, Any]] = []
        for number in range(chosen.rounds + 1):
            prompts = np.random.default_rng(number).integers(10, 40_000, (n, LENGTH)).tolist()
            drawn = timed(llm, lambda given=prompts: llm.generate(given, samples, use_tqdm=False))  # type: ignore[misc]
            searched = timed(llm, lambda given=prompts: llm.beam_search(given, beams, use_tqdm=False))  # type: ignore[misc]
            if number:  # the first round warms up
                found.append((drawn, searched))
        ratios = [searched[0] / drawn[0] for drawn, searched in found]
        seconds, device, host = ([statistics.median(pair[i][j] for pair in found) for i in (0, 1)] for j in range(3))
        print(f"{n:<9}{seconds[0]:10.3f}{seconds[1]:9.3f}{statistics.median(ratios):8.3f}{min(ratios):8.3f}{max(ratios):8.3f}"
              f"{device[0]:20.0f}{device[1]:8.0f}{host[0]:13.0f}{host[1]:8.0f}", flush=True)  # fmt: skip
    stats = llm.stats()
    print(f"replayed {stats.num_replayed_steps} of {stats.num_steps} steps, allocations {stats.allocations_since_warmup}")


if __name__ == "__main__":
    main()
