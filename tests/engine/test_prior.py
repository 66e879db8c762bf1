"""Rules that count tokens, at their bounds: given output, the cache's count, greedy temperatures."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmpy import LLM

PROMPT = list(range(3, 23))


@pytest.fixture
def llm(device: str, tiny_model: Callable[[str, str], Path]) -> Iterator[LLM]:
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 128, "device": device}
    with LLM(tiny_model("llama", "float32"), **options) as llm:
        yield llm


def test_cached_tokens_are_counted_of_the_prompt_alone(llm: LLM) -> None:
    """Blocks of 16: of 20 prompt tokens and 40 given ones 48 are found again, of which 20 are the prompt's."""
    given = {"prompt_token_ids": PROMPT, "output_token_ids": list(range(30, 70))}
    params = {"temperature": 0, "max_tokens": 42, "ignore_eos": True, "use_tqdm": False}
    first, again = (llm.generate([given], **params)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 20)
    assert again.token_ids == first.token_ids
    assert llm.stats().prefix_cache_hits == 48
    assert llm.generate([PROMPT], **params)[0].num_cached_tokens == 16


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 9.9e-6])
def test_below_the_threshold_logprobs_are_those_of_greedy(temperature: float, llm: LLM) -> None:
    """A greedy draw leaves the logits as they are; a temperature of almost nothing would make every full logprob 0."""
    params = {"max_tokens": 6, "logprobs": 1, "ignore_eos": True, "use_tqdm": False}
    greedy = llm.generate([PROMPT], temperature=0, **params)[0].outputs[0]
    sample = llm.generate([PROMPT], temperature=temperature, **params)[0].outputs[0]
    assert sample.token_ids == greedy.token_ids
    assert sample.sampled.full.tobytes() == greedy.sampled.full.tobytes()
    assert (greedy.sampled.full < -1e-3).all()
    cold = llm.generate([PROMPT], temperature=1.1e-5, **params)[0].outputs[0]
    assert (cold.sampled.full > -1e-3).all()


@pytest.mark.parametrize("eos", [False, True])
def test_given_output_counts_for_min_tokens(eos: bool, llm: LLM) -> None:
    """The given output has three tokens: with min_tokens=5 two more come before one may end it."""
    end = 2 if eos else 50
    given = {"prompt_token_ids": PROMPT, "output_token_ids": [60, 61, 62]}
    params = {"temperature": 0, "max_tokens": 12, "logit_bias": {end: 1e4}, "use_tqdm": False}
    params |= {} if eos else {"stop_token_ids": [end], "ignore_eos": True}
    llm_ends = llm.generate([given], min_tokens=0, **params)[0]
    assert llm_ends.finish_reason == ("stop" if not eos else "length") or llm_ends.token_ids[-1] == end
    for least in range(4, 9):
        output = llm.generate([given], min_tokens=least, **params)[0]
        assert len(output.token_ids) == least - 3 + 1
        assert output.token_ids[-1] == end
        assert end not in output.token_ids[:-1]
