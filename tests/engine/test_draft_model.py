"""Drafts by a second model: they change no bit, and a drafter equal to the model is always right."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from speculating import PAGE, bits, open_llm, run, texts

from llmpy import LLM, SamplingParams
from llmpy.errors import ConfigError, UnsupportedError

Make = Callable[[str, str], Path]


def blurred(path: Path, to: Path, share: float = 0.1) -> Path:
    """A copy of a checkpoint with noise, so that it drafts well but not always right."""
    rng = np.random.default_rng(1)
    tensors = load_file(path / "model.safetensors")
    noisy = {name: (x + share * x.std() * rng.standard_normal(x.shape)).astype(x.dtype) for name, x in tensors.items()}
    to.mkdir()
    save_file(noisy, to / "model.safetensors")
    (to / "config.json").write_text((path / "config.json").read_text())
    return to


def drafts(path: Path, k: int | str = 4) -> dict[str, Any]:
    return {"method": "draft", "model": str(path), "k": k}


ENGINES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 21, "max_num_seqs": 3},
    {"kv_cache_memory_bytes": 2 * 24 * PAGE, "max_model_len": 160},
    {"enable_prefix_caching": False, "block_size": 32},
]


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed"])
def test_bits_with_and_without(family: str, tiny_model: Make, tmp_path: Path) -> None:
    path = tiny_model(family, "float32")
    other = blurred(path, tmp_path / "blurred")
    with open_llm(path, enable_prefix_caching=False) as llm:
        wanted = run(llm)
    for engine in ENGINES if family == "llama" else ENGINES[:1]:
        for drafter, k in [(path, 4), (other, 3)] if engine == {} else [(other, 4)]:
            with open_llm(path, speculative_config=drafts(drafter, k), **engine) as llm:
                assert run(llm) == wanted
                assert run(llm) == wanted  # with a full cache
                llm.check()
                stats = llm.stats()
                assert 0 < stats.accepted_rows <= stats.draft_rows
                assert stats.allocations_since_warmup == 0
                assert stats.num_unfinished == 0 and stats.kv_blocks_free == stats.kv_blocks_total


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_drafter_equal_to_the_model_is_always_right(engine: dict[str, Any], tiny_model: Make) -> None:
    """Also at temperature 1, with penalties, several samples, chunked prompts, hits and preemptions: the draws are coupled."""
    path = tiny_model("llama", "float32")
    with open_llm(path, speculative_config=drafts(path), **engine) as llm:
        run(llm)
        run(llm)
        stats = llm.stats()
        assert 0 < stats.accepted_rows == stats.draft_rows
        assert stats.accepted_drafts == stats.drafts


def test_few_samples_take_few_steps(tiny_model: Make) -> None:
    path = tiny_model("llama", "float32")
    with open_llm(path, speculative_config=drafts(path)) as llm:
        llm.generate([[7, 8, 9]], temperature=1, seed=1, max_tokens=41, ignore_eos=True, use_tqdm=False)
        assert llm.stats().num_steps == 1 + 8  # the prompt's, then five tokens a step
