"""A cache in host memory behind a tiny pool, and preemption into it: ids and logprob bits are those of a request that is alone,
without a cache."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmpy import LLM, ConfigError, EngineStats, RequestOutput, SamplingParams, UnsupportedError

Make = Callable[[str, str], Path]
# Model, type, type of the cache, blocks of the pool.
MODELS = [
    ("llama", "float32", "auto", 20), ("qwen3", "bfloat16", "int8", 20), ("qwen3", "float32", "fp8", 20),
    ("qwen2-mixed", "float16", "auto", 40),
]  # fmt: skip
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 144, "max_num_batched_tokens": 96, "max_num_seqs": 4}
OPTIONS["cache_loads"] = "always"


def open_llm(path: Path, device: str, size_bytes: int = 64 << 20, **options: object) -> LLM:
    return LLM(path, device=device, kv_cache_memory_bytes=size_bytes, **(OPTIONS | options))


def block_bytes(llm: LLM) -> float:
    """Bytes of a block on one rank."""
    return llm.memory()["kv"] / llm.stats().kv_blocks_total / len(llm.ranks())


def prompts() -> list[list[int]]:
    """Conversations of two turns; a turn goes on behind the one before."""
    rng = np.random.default_rng(8)
    texts = [rng.integers(3, 131, 130).tolist() for _ in range(4)]
    return [text[:n] for n in (70, 130) for text in texts]


def params(i: int) -> SamplingParams:
    return SamplingParams(temperature=i % 2, max_tokens=8, logprobs=2, seed=i, ignore_eos=True)


def bits(output: RequestOutput) -> tuple[bytes, ...]:
    sample = output.outputs[0]
    arrays = (sample.sampled.raw, sample.sampled.full, sample.logprobs.values, sample.logprobs.ids)
    return (sample.token_ids_array.tobytes(), *(array.tobytes() for array in arrays))


def run_twice(llm: LLM, batch: list[list[int]]) -> tuple[list[tuple[bytes, ...]], EngineStats]:
    """One request at a time, then all together."""
    found = [bits(llm.generate([prompt], [params(i)], use_tqdm=False)[0]) for i, prompt in enumerate(batch)]
    outputs = llm.generate(batch, [params(i) for i in range(len(batch))], use_tqdm=False)
    llm.check()
    return found + [bits(output) for output in outputs], llm.stats()


def compare(path: Path, device: str, blocks: int, **options: object) -> None:
    batch = prompts()
    with open_llm(path, device, enable_prefix_caching=False, **options) as llm:
        size_bytes = int(blocks * block_bytes(llm))
        alone = [bits(llm.generate([prompt], [params(i)], use_tqdm=False)[0]) for i, prompt in enumerate(batch)]
    with open_llm(path, device, size_bytes, host_cache_bytes="4MiB", **options) as llm:
        found, stats = run_twice(llm, batch)
        assert found == alone * 2
        assert stats.host_cache_hits > 0 and stats.host_loaded_bytes > 0
        assert stats.allocations_since_warmup == 0 and stats.kv_blocks_free == stats.kv_blocks_total
        assert 0 < stats.host_blocks_cached <= stats.host_blocks_total and 3 << 20 < llm.memory()["host_cache"] <= 4 << 20


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(model[:3]))
def test_a_cache_in_host_memory_changes_no_bit(tiny_model: Make, model: tuple[str, str, str, int], device: str) -> None:
    compare(tiny_model(*model[:2]), device, model[3], kv_cache_dtype=model[2])


def test_what_a_host_cache_cannot_do_names_itself(tiny_model: Make, device: str) -> None:
    path = tiny_model("llama", "float32")
    hosts = {"nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 29500}
    with pytest.raises(UnsupportedError, match="host_cache_bytes=1024 is not supported yet with nnodes=2"):
        open_llm(path, device, host_cache_bytes=1024, tensor_parallel_size=2, **hosts)
    with pytest.raises(ConfigError, match=r"host_cache_bytes must be 0 or at least .* got 1000"):
        open_llm(path, device, host_cache_bytes=1000)


def test_recurrent_states_come_back(recurrent_model: Path, device: str) -> None:
    compare(recurrent_model, device, 40)


def test_the_cache_outlives_sleep(tiny_model: Make, device: str) -> None:
    prompt = prompts()[-1]
    with open_llm(tiny_model("llama", "float32"), device, host_cache_bytes="4MiB") as llm:
        first = llm.generate([prompt], [params(0)], use_tqdm=False)[0]
        llm.sleep(1)
        llm.wake_up()
        second = llm.generate([prompt], [params(0)], use_tqdm=False)[0]
        assert bits(second) == bits(first) and second.num_cached_tokens >= len(prompt) - 16
        llm.reset_prefix_cache()
        third = llm.generate([prompt], [params(0)], use_tqdm=False)[0]
        assert bits(third) == bits(first) and third.num_cached_tokens == 0


def crowd(path: Path, device: str, blocks: int, **options: object) -> EngineStats:
    """Samples that do not fit the pool together, each with its bits alone."""
    batch, settings = prompts()[:4] * 2, [params(i) for i in range(8)]
    settings = [one.replace(max_tokens=40, n=1 + i % 2) for i, one in enumerate(settings)]
    ranks = {name: options[name] for name in ("tensor_parallel_size", "device_ids") if name in options}
    with open_llm(path, device, enable_prefix_caching=False, **ranks) as llm:
        size_bytes = int(blocks * block_bytes(llm))
        alone = [bits(llm.generate([prompt], [one], use_tqdm=False)[0]) for prompt, one in zip(batch, settings, strict=True)]
    with open_llm(path, device, size_bytes, host_cache_bytes="4MiB", max_num_seqs=8, **options) as llm:
        assert [bits(output) for output in llm.generate(batch, settings, use_tqdm=False)] == alone
        llm.check()
        stats = llm.stats()
    assert stats.allocations_since_warmup == 0 and stats.kv_blocks_free == stats.kv_blocks_total
    assert stats.num_preemptions > 0 and stats.host_blocks_swapped == 0
    return stats


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(model[:3]))
def test_swapping_changes_no_bit(tiny_model: Make, model: tuple[str, str, str, int], device: str) -> None:
    path = tiny_model(*model[:2])
    stats = crowd(path, device, model[3], kv_cache_dtype="auto", preemption="swap", enable_prefix_caching=False)
    assert 0 < stats.num_swaps == stats.num_preemptions and stats.redone_rows == 0
    assert stats.blocks_swapped_in == stats.blocks_swapped_out > 0
    assert crowd(path, device, model[3], preemption="swap").num_swaps > 0
    stats = crowd(path, device, model[3], preemption="recompute", enable_prefix_caching=False)
    assert stats.num_swaps == 0 and stats.redone_rows > 0


def test_recurrent_states_swap(recurrent_model: Path, device: str) -> None:
    if recurrent_model.name.startswith("mamba"):
        pytest.skip("without attention a sample never grows, so none is preempted")
    stats = crowd(recurrent_model, device, 40, preemption="swap", enable_prefix_caching=False)
    assert stats.num_swaps > 0 and stats.redone_rows == 0


def test_swapping_needs_host_memory(tiny_model: Make, device: str) -> None:
    with pytest.raises(ConfigError, match=r"host_cache_bytes must be above 0 with preemption='swap', got 0"):
        open_llm(tiny_model("llama", "float32"), device, preemption="swap")


def test_running_samples_outlive_sleep(tiny_model: Make, device: str) -> None:
    path, batch = tiny_model("llama", "float32"), prompts()[:2]
    with open_llm(path, device, enable_prefix_caching=False) as llm:
        alone = [bits(llm.generate([prompt], [params(i)], use_tqdm=False)[0]) for i, prompt in enumerate(batch)]
    with open_llm(path, device, enable_prefix_caching=False, host_cache_bytes="4MiB", preemption="swap") as llm:
        names = [llm.add_request(prompt, params(i)) for i, prompt in enumerate(batch)]
        for _ in range(4):
            assert not any(output.finished for output in llm.step())
        llm.sleep(1, mode="keep")
        assert llm.stats().num_running == 0
        llm.wake_up()
        found = {}
        while llm.has_unfinished_requests():
            found |= {output.request_id: bits(output) for output in llm.step() if output.finished}
        assert [found[name] for name in names] == alone
        stats = llm.stats()
        assert (stats.num_swaps, stats.redone_rows, stats.host_blocks_swapped) == (2, 0, 0)
