"""Beam search has the same bits alone, in batches, in chunks, with a cache, in tight pools and with few slots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpy import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams

Make = Callable[[str, str], Path]

WIDTHS = [1, 2, 4, 8]
LENGTHS = [1, 15, 16, 17, 40, 70]
PAGE = 16 * 3 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head size, float32
ENGINES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 21, "max_num_seqs": 3},
    {"kv_cache_memory_bytes": 16 * PAGE, "max_model_len": 160},
    {"enable_prefix_caching": False, "block_size": 32, "max_num_seqs": 1},
]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    head = rng.integers(3, 131, 70).tolist()
    return [head[:n] if i % 2 else rng.integers(3, 131, n).tolist() for i, n in enumerate(LENGTHS)]


def params() -> list[BeamSearchParams]:
    return [
        BeamSearchParams(WIDTHS[i % 4], 12 + 5 * i, length_penalty=(1.0, 0.3)[i % 2], temperature=(0.0, 0.6, 0.0)[i % 3])
        for i in range(len(LENGTHS))
    ]


def open_llm(path: Path, device: str, **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256, "device": device}
    return LLM(path, **(defaults | options))


def bits(output: BeamSearchOutput) -> list[tuple[object, ...]]:
    return [
        (one.tokens, one.score, one.finish_reason, one.logprobs.ids.tobytes(), one.logprobs.values.tobytes())
        for one in output.sequences
        if one.logprobs is not None
    ]


def alone(path: Path, device: str) -> list[list[tuple[object, ...]]]:
    with open_llm(path, device, enable_prefix_caching=False) as llm:
        found = [bits(llm.beam_search([p], [s])[0]) for p, s in zip(prompts(), params(), strict=True)]
    assert [len(one) for one in found] == [s.beam_width for s in params()]
    return found


def check(path: Path, device: str, wanted: list[list[tuple[object, ...]]], options: dict[str, Any], is_tight: bool) -> None:
    with open_llm(path, device, **options) as llm:
        others = SamplingParams(max_tokens=30, ignore_eos=True)
        ids = llm.enqueue(prompts(), others)  # other requests run beside the searches
        for _ in range(2):  # the second time with a full cache
            assert list(map(bits, llm.beam_search(prompts(), params()))) == wanted
        assert len(llm.wait_for_completion()) == len(ids)
        llm.check()
        stats = llm.stats()
        assert stats.allocations_since_warmup == 0
        assert stats.num_unfinished == 0 and stats.kv_blocks_free == stats.kv_blocks_total
        assert not is_tight or stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "float32"), pytest.param("mistral-window", "bfloat16", marks=pytest.mark.slow)]
)
def test_alone_equals_batched(family: str, dtype: str, each_device: str, tiny_model: Make) -> None:
    path = tiny_model(family, dtype)
    wanted = alone(path, each_device)
    for options in ENGINES:
        check(path, each_device, wanted, options, "max_model_len" in options and dtype == "float32")


@pytest.mark.slow
def test_recurrent_models(recurrent_model: Path) -> None:
    """Forks share the recurrent state until one of them writes it."""
    wanted = alone(recurrent_model, "cpu")
    with open_llm(recurrent_model, "cpu") as llm:
        page, n_state = int(llm._driver.model.describe()["page_bytes"]), llm.num_state_blocks
    tight = {"kv_cache_memory_bytes": (14 + 4 * n_state) * page, "max_model_len": 160, "max_num_seqs": 6}
    for options in ({}, {"max_num_batched_tokens": 21, "max_num_seqs": 3}, tight):
        check(recurrent_model, "cpu", wanted, options, options is tight)
