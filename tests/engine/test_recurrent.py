"""Models with recurrent state: what a request gets is the same alone and beside others, cut, cached, preempted, forked."""

from pathlib import Path

import numpy as np

from llmpy import LLM, RequestOutput, SamplingParams


def open_llm(path: Path, device: str, **options: object) -> LLM:
    defaults = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024, "device": device}
    return LLM(path, **(defaults | options))


def params(i: int, max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=i % 2, max_tokens=max_tokens, ignore_eos=True, logprobs=1, seed=i)


def bits(output: RequestOutput) -> list[tuple[list[int], bytes]]:
    return [(o.token_ids, o.sampled.raw.tobytes()) for o in output.outputs]


def run(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[list[int], bytes]]]:
    return [bits(o) for o in llm.generate(prompts, [params(i) for i in range(len(prompts))], use_tqdm=False)]


def prompts(n: int, longest: int = 150) -> list[list[int]]:
    rng = np.random.default_rng(n)
    return [rng.integers(3, 131, int(length)).tolist() for length in rng.integers(1, longest, n)]


def test_batches_chunks_and_hits(recurrent_model: Path, device: str) -> None:
    batch = prompts(12)
    with open_llm(recurrent_model, device, enable_prefix_caching=False) as llm:
        alone = [bits(llm.generate([p], [params(i)], use_tqdm=False)[0]) for i, p in enumerate(batch)]
    small = {"max_num_batched_tokens": 20, "max_num_seqs": 5}
    for options in ({}, small, {"block_size": 32}, {"enable_prefix_caching": False} | small):
        with open_llm(recurrent_model, device, **options) as llm:
            assert run(llm, batch) == alone
            assert run(llm, batch) == alone
            stats = llm.stats()
            assert (stats.prefix_cache_hits > 0) == ("enable_prefix_caching" not in options)
            assert stats.allocations_since_warmup == 0
            llm._driver.engine.check()
