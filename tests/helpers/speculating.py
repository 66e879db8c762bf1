"""Requests of every kind for tests of speculation, and all of their output that must not change."""

from pathlib import Path
from typing import Any

import numpy as np

from llmpy import LLM, RequestOutput, SamplingParams

LENGTHS = [1, 2, 15, 16, 17, 33, 70]
PAGE = 16 * 3 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head size, float32


def prompts() -> list[list[int]]:
    """Prompts with repeated parts, so that there are drafts."""
    rng = np.random.default_rng(3)
    return [(rng.integers(3, 131, 9).tolist() * n)[:n] for n in LENGTHS]


def params(i: int) -> SamplingParams:
    """Every kind of request by turns; the narrow choices repeat themselves, so drafts are accepted."""
    common: dict[str, Any] = {"max_tokens": 30, "logprobs": 3, "seed": 11 + i, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
        {"temperature": 1.0, "allowed_token_ids": [5, 6], "n": 4},
        {"temperature": 1.0, "allowed_token_ids": [5, 6, 7], "presence_penalty": 0.5, "frequency_penalty": -0.3},
        {"temperature": 1.0, "logit_bias": {9: 8.0, 10: 7.0}, "bad_token_ids": [[9, 10, 9], [10, 10]]},
        {"temperature": 1.0, "allowed_token_ids": [5, 6], "stop_token_ids": [6], "min_tokens": 7},
        {"temperature": 0.5, "allowed_token_ids": [5, 6, 7], "prompt_logprobs": 2, "logprobs_mode": "processed_logprobs"},
    ]
    return SamplingParams(**{**common, **kinds[i % len(kinds)]})


def open_llm(path: Path, n_ranks: int = 1, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256}
    defaults["device"] = "cpu"
    if n_ranks > 1:
        defaults |= {"tensor_parallel_size": n_ranks, "device_ids": [0] * n_ranks}
    return LLM(path, **(defaults | options))


def bits(output: RequestOutput) -> list[tuple[bytes, ...]]:
    """All values of a request that must not change."""
    found = []
    for sample in output.outputs:
        s, tops = sample.sampled, sample.logprobs
        arrays = [sample.token_ids_array, s.raw, s.full, s.processed, s.kept_mass, s.rank, tops.ids, tops.values, tops.ranks]
        found.append((str(sample.finish_reason).encode(), *(array.tobytes() for array in arrays)))
    if output.prompt_token_logprobs is not None:
        found.append((output.prompt_token_logprobs.tobytes(),))
    return found


def run(llm: LLM, **changes: Any) -> list[list[tuple[bytes, ...]]]:
    settings = [params(i).replace(**changes) for i in range(len(LENGTHS))]
    return [bits(output) for output in llm.generate(prompts(), settings, use_tqdm=False)]


def check_run(llm: LLM, wanted: list[Any]) -> None:
    """Runs all requests twice, the second time with a full cache: some drafts are right, and nothing is left behind."""
    assert run(llm) == wanted
    assert run(llm) == wanted
    llm.check()
    stats = llm.stats()
    assert 0 < stats.accepted_rows < stats.draft_rows
    assert stats.allocations_since_warmup == 0
    assert stats.num_unfinished == 0 and stats.kv_blocks_free == stats.kv_blocks_total


TEXTS = [
    {"regex": "(ab|cd){10,20}z"},
    {"json": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 4, "maxItems": 9}},
    {"choice": ["red red red red red", "green", "yellow and blue"]},
    {"grammar": 'start: word (" " word){3,9}\nword: /[ab]{2,4}/'},
]


def texts(llm: LLM) -> list[list[tuple[bytes, ...]]]:
    """Requests with grammars and stop strings, by turns greedy, sampled, with penalties and with several samples."""
    settings = []
    for i in range(16):
        common: dict[str, Any] = {"max_tokens": 40, "logprobs": 2, "seed": i, "temperature": float(i % 5 > 0)}
        common["n"] = 3 if i == 6 else 1
        if i < 12:
            common["structured_outputs"] = TEXTS[i % 4]
        else:
            common |= {"stop": ["aba", "b a", "e"], "min_tokens": i - 12, "allowed_token_ids": list(range(60, 70))}
        if i % 4 == 2:
            common |= {"repetition_penalty": 1.1, "stop_token_ids": [65]}
        settings.append(SamplingParams(**common))
    outputs = llm.generate([("hello hello hello", "a b a b")[i % 2] for i in range(16)], settings, use_tqdm=False)
    return [bits(output) for output in outputs]
