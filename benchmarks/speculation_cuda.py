"""Speculation on a GPU with drafts of a chosen quality: the shape of Llama-3-8B with random weights.

    python benchmarks/speculation_cuda.py [--model 8b] [--wrong 0.2] [--tokens 192] [--rounds 3] [--sequences 1,8,32,256]
        [--sources ngram,ngram-auto] [--profile N]

Each sample is a series of coin tosses: two token ids are allowed, biases give the second the probability `wrong`, and the
temperature is so high that the model's own logits do not matter. The n-gram source drafts the first id again and again, and so
does the head of eagle3, whose draft vocabulary lacks the second id. So a draft is wrong with about this probability, however
good the model is. The other drafters with random weights (draft, eagle, medusa, mtp) toss the model's own coin: all their
drafts are right, so their rows show the best that they can give. Engines take turns in each round; `speed` is the median of the
time without speculation divided by the time with it. Outputs are compared. `us a step` is the time on the host. mtp wants
`--model mimo-7b`, whose shape has the layer that drafts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import cuda
import numpy as np

from llmpy import LLM, SamplingParams

HEADS, TAILS, FLATTEN = 1000, 40000, 1000.0
SMALL = cuda.Shape("Llama", 16, 2048, 32, 8, 8192, 128256, True, 64)
"""Llama-3.2-1B, the model that drafts."""
MODELS = {**cuda.MODELS, "mimo-7b": cuda.Shape("MiMo", 36, 4096, 32, 8, 11008, 151680, False)}
"""For `mtp` a model with a layer that predicts further tokens."""
SOURCES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "k": 4, "min": 1, "max": 2},
    "ngram-auto": {"method": "ngram", "k": "auto", "min": 1, "max": 2},
    "suffix": {"method": "suffix", "k": 4},
    "suffix-auto": {"method": "suffix", "k": "auto"},
    "draft": {"method": "draft", "k": 4},
    "eagle": {"method": "eagle", "k": 4},
    "eagle3": {"method": "eagle3", "k": 4},
    "medusa": {"method": "medusa", "k": 4},
    "mtp": {"method": "mtp", "k": 1},
    "mtp-2": {"method": "mtp", "k": 2},
}


def write_config(values: dict[str, Any]) -> Path:
    path = Path(tempfile.mkdtemp(prefix="llmpy-speculation-"))
    (path / "config.json").write_text(json.dumps(values))
    return path


def drafter(method: str, model: dict[str, Any]) -> dict[str, Any]:
    """config.json of a drafter for a model, with the sizes of its releases."""
    if method == "draft":
        return SMALL.config()
    own = {"eagle": {"num_hidden_layers": 1}, "eagle3": {"num_hidden_layers": 1, "draft_vocab_size": 32000}}
    return {**model, "architectures": [method], "medusa_num_heads": 4, **own.get(method, {})}


def open_engines(model: str, sources: list[str]) -> dict[str, LLM]:
    config = MODELS[model].config() | ({"num_nextn_predict_layers": 1} if model == "mimo-7b" else {})
    path = write_config(config)
    options: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda:0", "max_model_len": 1024,
        "kv_cache_memory_bytes": "6GiB", "quantization": MODELS[model].quantization,
    }  # fmt: skip
    engines = {"none": LLM(path, **options)}
    for name in sources:
        source = dict(SOURCES[name])
        if source["method"] not in ("ngram", "suffix", "mtp"):
            source["model"] = str(write_config(drafter(source["method"], config)))
        engines[name] = LLM(path, speculative_config=source, **options)
    return engines


def requests(n: int, tokens: int, wrong: float, number: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of n samples."""
    bias = {HEADS: FLATTEN * math.log(1 - wrong), TAILS: FLATTEN * math.log(wrong)}
    common: dict[str, Any] = {"temperature": FLATTEN, "logit_bias": bias, "allowed_token_ids": [HEADS, TAILS]}
    params = [SamplingParams(seed=1000 * number + i, max_tokens=tokens, ignore_eos=True, **common) for i in range(n)]
    return [[*np.random.default_rng(i).integers(3000, 100_000, 8).tolist(), HEADS, HEADS] for i in range(n)], params


def profile(llm: LLM, n: int, wrong: float, num_steps: int = 12) -> None:
    """Prints the time of every kernel of some steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for prompt, params in zip(*requests(n, 400, wrong, 0), strict=True):
        llm.add_request(prompt, params)
    for _ in range(20):
        llm.step()
    first = llm.step_log(1)[-1].number
    with record(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(num_steps):
            llm.step()
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    found.export_chrome_trace(str(trace))
    cuda.print_kernels(json.loads(trace.read_text())["traceEvents"], num_steps)
    print("rows of the steps", [one.rows for one in llm.step_log(100) if one.number > first])


def toss(llm: LLM, n: int, tokens: int, wrong: float, number: int) -> tuple[float, float, float, list[list[int]]]:
    """Seconds, tokens of a sample in a step, median host time of a step in us, and the ids."""
    prompts, params = requests(n, tokens, wrong, number)
    before = llm.stats()
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    after = llm.stats()
    drawn = after.generation_tokens - before.generation_tokens
    accepted = after.accepted_rows - before.accepted_rows
    host = statistics.median(s.host_us for s in llm.step_log(4096) if s.number > before.num_steps and not s.prompt_rows)
    return seconds, drawn / (drawn - accepted), host, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--wrong", type=float, default=0.2, help="probability that a draft is wrong")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", default="1,8,32,256")
    parser.add_argument("--sources", default="ngram,ngram-auto", help=", ".join(SOURCES) + "; each has weights of its own")
    parser.add_argument("--profile", type=int, help="print the kernels' times of steps with so many sequences instead")
    chosen = parser.parse_args()
    engines = open_engines(chosen.model, chosen.sources.split(","))
    if chosen.profile:
        for name, llm in engines.items():
            print(name)
            profile(llm, chosen.profile, chosen.wrong)
        return
    print(f"{'sequences':10}{'source':12}{'tokens/step':>12}{'speed':>8}{'least':>8}{'most':>8}{'us a step':>11}{'tok/s':>9}")
    for n in map(int, chosen.sequences.split(",")):
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
        for number in range(chosen.rounds + 1):
            wanted: list[list[int]] = []
            for name, llm in engines.items():
                seconds, per_step, host, ids = toss(llm, n, chosen.tokens, chosen.wrong, number)
                wanted = wanted or ids
                if ids != wanted:
                    raise SystemExit(f"{n} sequences, {name}: the output differs")
                if number:  # the first round warms up
                    found[name].append((seconds, per_step, host))
        for name, rounds in found.items():
            ratios = [a[0] / b[0] for a, b in zip(found["none"], rounds, strict=True)]
            numbers = statistics.median(ratios), min(ratios), max(ratios)
            speeds = "".join(f"{number:8.2f}" for number in numbers)
            per_step, host = (statistics.median(one[i] for one in rounds) for i in (1, 2))
            rate = n * chosen.tokens / statistics.median(one[0] for one in rounds)
            print(f"{n:<10}{name:12}{per_step:12.2f}{speeds}{host:11.0f}{rate:9.0f}", flush=True)
    for name, llm in engines.items():
        print(name, "graphs", llm._driver.model.describe()["num_graphs"], "replayed", llm.stats().num_replayed_steps, "of",
              llm.stats().num_steps)  # fmt: skip


if __name__ == "__main__":
    main()
