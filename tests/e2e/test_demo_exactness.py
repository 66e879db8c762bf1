"""Law 2 on the real, quantised model: int8 and float arithmetic, alone, in a batch, chunked, cached."""

from pathlib import Path

import pytest

from llmpy import LLM, RequestOutput, UnsupportedError

PROMPTS = [
    "Hi",
    "The quick brown fox jumps over the lazy dog, and then",
    "Explain, in simple words, why the sky is blue during the day and red in the evening. " * 6,
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "Zürich, 東京 and Αθήνα are",
]


def bits(output: RequestOutput) -> tuple[list[int], bytes]:
    sample = output.outputs[0]
    return sample.token_ids, sample.sampled.raw.tobytes()


@pytest.mark.parametrize("activation_dtype", ["int8", "float"])
def test_batch_chunk_and_cache(demo_model: Path, device: str, activation_dtype: str) -> None:
    options = {"temperature": 0.8, "max_tokens": 12, "logprobs": 0, "seed": 4, "ignore_eos": True, "use_tqdm": False}
    common = {"device": device, "activation_dtype": activation_dtype, "kv_cache_memory_bytes": "512MiB", "max_model_len": 1024}
    if device.startswith("cuda") and activation_dtype == "int8":
        with pytest.raises(UnsupportedError, match="int8"):
            LLM(demo_model, **common)
        return
    with LLM(demo_model, enable_prefix_caching=False, **common) as llm:
        alone = [bits(llm.generate(p, **options)[0]) for p in PROMPTS]
    for batched_tokens in (512, 64):
        with LLM(demo_model, max_num_batched_tokens=batched_tokens, **common) as llm:
            assert [bits(o) for o in llm.generate(PROMPTS, **options)] == alone
            again = llm.generate(PROMPTS, **options)
            assert [bits(o) for o in again] == alone
            assert again[2].num_cached_tokens > 64
