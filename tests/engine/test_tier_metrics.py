"""What `stats()` and `get_metrics()` tell of the tiers: bytes, seconds, queues, saved prompts, under vLLM's names."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modules import load

from llmpy import AsyncEngine, kv

tiers = load(Path(__file__).with_name("test_tiers.py"))
Make = Callable[[str, str], Path]
GIVEN = {"host_cache_bytes": "1MiB", "prefix_cache_seed": 3, "kv_cache_memory_bytes": 8 << 20}


def read(engine: Any) -> dict[str, Any]:
    """Values by name, with the label that tells series of one name apart."""
    found = {}
    for metric in engine.get_metrics():
        own = [value for name, value in metric.labels.items() if name in ("transfer_type", "tier")]
        found[":".join([metric.name.removeprefix("vllm:"), *own])] = getattr(metric, "value", None)
    return found


def test_copies_have_the_names_of_vllm(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    disk = {"path": str(tmp_path), "bytes": "64MiB"}
    with tiers.open_llm(path, device, 256 << 10, host_cache_bytes="256KiB", disk_cache=disk) as llm:
        tiers.run_twice(llm, tiers.prompts())
        stats, metrics = llm.stats(), read(llm)
    assert metrics["kv_offload_total_bytes:GPU_to_CPU"] == stats.host_stored_bytes > 0
    assert metrics["kv_offload_total_bytes:CPU_to_GPU"] == stats.host_loaded_bytes > 0
    assert metrics["kv_offload_total_time:GPU_to_CPU"] == stats.host_store_s > 0
    assert metrics["kv_offload_total_time:CPU_to_GPU"] == stats.host_load_s > 0
    assert metrics["kv_offload_tiering_write_bytes:outer"] == stats.disk_stored_bytes > 0
    assert metrics["kv_offload_tiering_read_bytes:outer"] == stats.disk_loaded_bytes
    used = stats.host_blocks_cached + stats.host_blocks_swapped
    assert metrics["kv_offload_cpu_cache_usage_perc"] == used / stats.host_blocks_total > 0
    assert metrics["disk_cache_evictions"] == stats.disk_evictions == 0


class Slow(kv.Memory):
    """Saves nothing until it may."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.may_save = threading.Event()

    def save(self, name: bytes, data: bytes) -> None:
        self.may_save.wait(60)
        super().save(name, data)


def test_the_queue_is_told_and_empties(tiny_model: Make, device: str) -> None:
    path, store = tiny_model("llama", "float32"), Slow()
    options = {"host_cache_bytes": "256KiB", "kv_connector": store, "prefix_cache_seed": 3}
    with tiers.open_llm(path, device, 256 << 10, **options) as llm:
        for prompt in tiers.prompts():
            llm.generate([prompt], max_tokens=2, use_tqdm=False)
        assert llm.stats().disk_queued_blocks > 0 and len(store) == 0
        store.may_save.set()
        for _ in range(200):
            llm.generate([[5, 6, 7]], max_tokens=2, use_tqdm=False)
            if llm.stats().disk_queued_blocks == 0:
                break
        stats = llm.stats()
        assert stats.disk_queued_blocks == stats.host_queued_bytes == 0 and len(store) > 0


def test_saved_prompts_are_counted(tiny_model: Make, device: str) -> None:
    path, prompt = tiny_model("llama", "float32"), tiers.prompts()[-1]

    async def main() -> None:
        store = kv.Memory(64 << 20)
        async with AsyncEngine(path, **(tiers.OPTIONS | GIVEN | {"device": device, "kv_connector": store})) as engine:
            assert engine.stats().saved_prompts == 0
            for _ in range(2):
                handle = await engine.prefill(prompt)
            stats, metrics = engine.stats(), read(engine)
            assert (stats.saved_prompts, stats.saved_prompt_tokens) == (2, 2 * handle.saved_tokens) and stats.saved_prompt_s > 0
            assert metrics["saved_prompts"] == 2 and metrics["saved_prompt_seconds"] == stats.saved_prompt_s

    asyncio.run(main())
