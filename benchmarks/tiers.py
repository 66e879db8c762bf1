"""The host cache on a GPU: the first token behind a prompt that host memory holds, and steps beside its copies.

    python benchmarks/tiers.py [--model 8b] [--length 8192] [--rounds 5] [--device cuda:0]

Random weights in the shape of `--model` (benchmarks/cuda.py), bfloat16. The pool holds three prompts of `length` tokens, host
memory eight.

- recomputed: wall time of generate() for one new token behind a prompt that no cache has.
- device, host: the same behind a prompt that the pool, or host memory alone, holds. Ids and logprobs must be those of the first
  time.
- copies: bytes over the time of the copies themselves, each way (`stats()`).
- decode: time between the starts of steps that decode 32 sequences and nothing else: alone, and while requests come whose
  prompts are in host memory. Medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import cuda
import numpy as np

from llmpy import LLM, SamplingParams

SEQUENCES, NEW = 32, 160
ONE = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)


def open_engine(model: str, length: int, device: str) -> LLM:
    shape = cuda.MODELS[model]
    path = Path(tempfile.mkdtemp(prefix="llmpy-tiers-"))
    (path / "config.json").write_text(json.dumps(shape.config()))
    prompt_bytes = length * shape.kv_bytes
    return LLM(
        path, load_format="dummy", skip_tokenizer_init=True, device=device, max_model_len=length + 128, max_num_seqs=64,
        kv_cache_memory_bytes=int(prompt_bytes * 3.3), host_cache_bytes=8 * prompt_bytes, quantization=shape.quantization,
    )  # fmt: skip


def prompts(length: int, vocab: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(1)
    while True:
        yield rng.integers(3, vocab, length).tolist()


def first(llm: LLM, prompt: list[int]) -> tuple[float, int, tuple[bytes, bytes]]:
    """Milliseconds, cached tokens, and the bits of the result."""
    begun = time.perf_counter()
    output = llm.generate([prompt], ONE, use_tqdm=False)[0]
    ms = 1000 * (time.perf_counter() - begun)
    sample = output.outputs[0]
    return ms, output.num_cached_tokens, (sample.token_ids_array.tobytes(), sample.sampled.raw.tobytes())


def decode(llm: LLM, waiting: list[list[int]], shorts: list[list[int]]) -> tuple[float, float, int]:
    """Median and 90th percentile of the ms between steps that only decode, and their number, while `waiting` comes in turn."""
    settings = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    before = llm.stats().num_steps
    names = {llm.add_request(prompt, settings) for prompt in shorts}
    queue, loading = list(waiting), ""
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                names.discard(output.request_id)
                loading = "" if output.request_id == loading else loading
        if queue and not loading and llm.stats().num_steps > before + 20:
            loading = str(llm.add_request(queue.pop(), ONE))
    steps = [step for step in llm.step_log(4096) if step.number > before]
    times = [
        1000 * (b.start - a.start)
        for a, b in itertools.pairwise(steps)
        if not a.prompt_rows and not b.prompt_rows and a.decode_rows == b.decode_rows == SEQUENCES
    ]
    return statistics.median(times), statistics.quantiles(times, n=10)[-1], len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=cuda.MODELS)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    chosen = parser.parse_args()
    llm = open_engine(chosen.model, chosen.length, chosen.device)
    source = prompts(chosen.length, cuda.MODELS[chosen.model].vocab)
    texts = [next(source) for _ in range(6)]
    for _ in range(2):
        first(llm, next(source))
    bits, times = {}, {"recomputed": [], "device": [], "host": []}
    for i, text in enumerate(texts):
        ms, _, bits[i] = first(llm, text)
        times["recomputed"].append(ms)
        ms, cached, again = first(llm, text)
        times["device"].append(ms)
        if again != bits[i] or cached < chosen.length - 16:
            raise SystemExit(f"device: {cached} cached tokens, bits {'equal' if again == bits[i] else 'differ'}")
    for number in range(chosen.rounds):
        i = number % 6
        hits = llm.stats().host_cache_hits
        ms, cached, again = first(llm, texts[i])
        loaded = llm.stats().host_cache_hits - hits
        if again != bits[i] or cached < chosen.length - 16:
            raise SystemExit(f"host: {cached} cached tokens, bits {'equal' if again == bits[i] else 'differ'}")
        if loaded > chosen.length // 2:
            times["host"].append(ms)
    for name, found in times.items():
        print(f"{name:12}{statistics.median(found):9.1f} ms, least {min(found):.1f}, most {max(found):.1f}, {len(found)} times")
    stats = llm.stats()
    for name, size, seconds in (
        ("copies out", stats.host_stored_bytes, stats.host_store_s),
        ("copies in", stats.host_loaded_bytes, stats.host_load_s),
    ):
        print(f"{name:12}{size / seconds / 1e9:9.1f} GB/s, {size / 1e9:.2f} GB")
    shorts = [[next(source)[:128] for _ in range(SEQUENCES)] for _ in range(4)]
    for round_ in range(2):
        hits = llm.stats().host_cache_hits
        quiet = decode(llm, [], shorts[2 * round_])
        busy = decode(llm, texts, shorts[2 * round_ + 1])
        alone = f"{quiet[0]:9.3f} ms (p90 {quiet[1]:.3f}, {quiet[2]} steps)"
        beside = f"{busy[0]:.3f} (p90 {busy[1]:.3f}, {busy[2]} steps): {busy[0] / quiet[0]:.3f}x"
        print(f"decode      {alone}, with copies {beside}; {llm.stats().host_cache_hits - hits} tokens loaded")
    llm.check()
    llm.close()


if __name__ == "__main__":
    main()
