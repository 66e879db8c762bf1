"""Beam search has the same bits alone, in batches, in chunks, with a cache, in tight pools and with few slots."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load
from safetensors import safe_open

from llmpy import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
Make = Callable[[str, str], Path]

WIDTHS = [1, 2, 4, 8]
LENGTHS = [1, 15, 16, 17, 40, 70]
PAGE = 16 * 3 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head size, float32
BESIDE: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2, "device_ids": [0, 0]}, {"data_parallel_size": 2},
    {"speculative_config": {"method": "ngram", "k": 3, "min": 1}}, {"enable_lora": True, "max_loras": 2},
]  # fmt: skip
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


@pytest.mark.parametrize("options", BESIDE, ids=lambda options: next(iter(options)))
def test_beside_ranks_replicas_drafts_and_adapters(options: dict[str, Any], tiny_model: Make) -> None:
    """Searches have their bits, and so have the requests beside them, with these features."""
    path, others = tiny_model("llama", "float32"), SamplingParams(max_tokens=30, allowed_token_ids=[5, 6], seed=1, logprobs=0)

    def both(llm: LLM, adapters: list[str | None] | None = None) -> tuple[list[Any], list[bytes]]:
        ids = llm.enqueue(prompts(), others)
        found = [bits(one) for one in llm.beam_search(prompts(), params(), adapters)]
        sampled = llm.wait_for_completion()
        assert len(sampled) == len(ids)
        return found, [one.outputs[0].sampled.raw.tobytes() for one in sampled]

    with open_llm(path, "cpu") as llm:
        wanted = both(llm)
    with open_llm(path, "cpu", **options) as llm:
        assert both(llm) == both(llm) == wanted
        assert llm.stats().draft_rows > 0 or "speculative_config" not in options
        if "enable_lora" in options:
            llm.load_adapter("a", adapter_tensors(path), {"r": 4, "lora_alpha": 8})
            alone = list(map(bits, llm.beam_search(prompts(), params(), "a")))
            chosen = [("a", None)[i % 2] for i in range(len(LENGTHS))]
            mixed = [alone[i] if i % 2 == 0 else wanted[0][i] for i in range(len(LENGTHS))]
            assert both(llm, chosen) == (mixed, wanted[1]) and alone != wanted[0]


def adapter_tensors(path: Path) -> dict[str, np.ndarray]:
    """A random adapter of all linears of a model's layers."""
    with safe_open(path / "model.safetensors", "numpy") as file:
        names = [name.removesuffix(".weight") for name in file.keys() if "_proj.weight" in name]  # noqa: SIM118
        return files.factors({name: tuple(file.get_slice(f"{name}.weight").get_shape()) for name in names})


@pytest.mark.parametrize("recurrent_model", ["hybrid"], indirect=True)
def test_a_hybrid(recurrent_model: Path) -> None:
    """Forks share the recurrent state until one of them writes it."""
    searches = [[5, 9, 77] * 6, [8] * 17], [BeamSearchParams(4, 12), BeamSearchParams(2, 9)]
    with open_llm(recurrent_model, "cpu", max_num_batched_tokens=7, max_num_seqs=3) as llm:
        wanted = [bits(llm.beam_search([p], s)[0]) for p, s in zip(*searches, strict=True)]
        assert [bits(one) for one in llm.beam_search(*searches)] == wanted
        llm.check()
        for best in llm.beam_search(*searches):  # the state of a beam is that of its tokens
            own = best.sequences[0]
            scores = llm.score([own.tokens])[0].token_logprobs[-len(own.token_ids) :]
            assert own.cum_logprob == pytest.approx(scores.sum(), abs=1e-4)


@pytest.mark.slow
def test_recurrent_models(recurrent_model: Path) -> None:
    wanted = alone(recurrent_model, "cpu")
    with open_llm(recurrent_model, "cpu") as llm:
        page, n_state = int(llm._driver.model.describe()["page_bytes"]), llm.num_state_blocks
    tight = {"kv_cache_memory_bytes": (14 + 4 * n_state) * page, "max_model_len": 160, "max_num_seqs": 6}
    for options in ({}, {"max_num_batched_tokens": 21, "max_num_seqs": 3}, tight):
        check(recurrent_model, "cpu", wanted, options, options is tight)
