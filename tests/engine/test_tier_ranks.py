"""Tiers of a model on two ranks: a slot has the pages of both. Ids and logprob bits are those of a request that is alone,
without a cache."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modules import load

from llmpy import kv

disk = load(Path(__file__).with_name("test_disk_cache.py"))
handover = load(Path(__file__).with_name("test_handover.py"))
tiers = load(Path(__file__).with_name("test_tiers.py"))
Make = Callable[[str, str], Path]
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "device_ids": (0, 0)}


@pytest.mark.parametrize("model", [tiers.MODELS[0], tiers.MODELS[1]], ids=lambda model: "-".join(model[:3]))
def test_host_memory_holds_the_pages_of_both(tiny_model: Make, model: tuple[str, str, str, int], device: str) -> None:
    tiers.compare(tiny_model(*model[:2]), device, model[3], kv_cache_dtype=model[2], **RANKS)


def test_samples_swap(tiny_model: Make, device: str) -> None:
    stats = tiers.crowd(tiny_model("llama", "float32"), device, 20, preemption="swap", enable_prefix_caching=False, **RANKS)
    assert 0 < stats.num_swaps == stats.num_preemptions and stats.redone_rows == 0


def test_blocks_come_from_disk(tiny_model: Make, device: str, tmp_path: Path) -> None:
    disk.compare(tiny_model("llama", "float32"), device, 20, tmp_path, **RANKS)


def test_files_of_other_ranks_are_not_read(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama", "float32"), tiers.prompts()[4]
    for options, n_found in (({}, 0), (RANKS, 0), (RANKS, 128)):
        with tiers.open_llm(path, device, **disk.disk_options(tmp_path), **options) as llm:
            output = llm.generate([prompt], [tiers.params(0)], use_tqdm=False)[0]
            assert output.num_cached_tokens == n_found


@pytest.mark.parametrize("kind", ["memory", "peer"])
def test_prompts_are_handed_over(tiny_model: Make, device: str, kind: str) -> None:
    path, prompt = tiny_model("llama", "float32"), tiers.prompts()[4]
    memory = kv.Memory(16 << 20)
    address = f"unix:ranks-{os.getpid()}"
    listening = {"name": "peer", "listen": address, "bytes": "16MiB"}
    stores = (memory, memory) if kind == "memory" else (listening, {"name": "peer", "peers": [address]})

    async def main() -> None:
        first = handover.open_engine(path, device, kv_connector=stores[0], **RANKS)
        second = handover.open_engine(path, device, kv_connector=stores[1], seed=99, **RANKS)
        async with first, second:
            handle = await first.prefill(prompt, handover.PARAMS)
            output = await second.decode(handle, handover.PARAMS)
        assert handle.saved_tokens == output.num_cached_tokens == 128
        assert tiers.bits(output) == handover.lone(path, device, prompt, handle.seed)

    asyncio.run(main())


def test_the_cache_outlives_sleep(tiny_model: Make, device: str) -> None:
    prompt = tiers.prompts()[-1]
    with tiers.open_llm(tiny_model("llama", "float32"), device, host_cache_bytes="4MiB", **RANKS) as llm:
        first = llm.generate([prompt], [tiers.params(0)], use_tqdm=False)[0]
        llm.sleep(1)
        llm.wake_up()
        second = llm.generate([prompt], [tiers.params(0)], use_tqdm=False)[0]
        assert tiers.bits(second) == tiers.bits(first) and second.num_cached_tokens >= len(prompt) - 16
