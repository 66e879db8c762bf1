"""Prefill and decode on different engines: ids and logprob bits are those of one engine, in one process and in two."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modules import load

from llmpy import AsyncEngine, ConfigError, SamplingParams, kv
from llmpy.engine.handover import Handle

tiers = load(Path(__file__).with_name("test_tiers.py"))
Make = Callable[[str, str], Path]
PARAMS = SamplingParams(temperature=1, max_tokens=12, logprobs=2, ignore_eos=True)
PREFILLER = """
import asyncio, json, sys
from llmpy import AsyncEngine, SamplingParams

async def main():
    model, options, prompt, params = json.loads(sys.argv[1])
    async with AsyncEngine(model, **options) as engine:
        handle = await engine.prefill(prompt, SamplingParams(**params))
        print(json.dumps(handle.to_dict()), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        engine.check()

asyncio.run(main())
"""
"""A process that computes a prompt, prints its handle, and keeps the engine open until its input ends."""
DECODER = """
import asyncio, json, sys
from llmpy import AsyncEngine, SamplingParams
from llmpy.engine.handover import Handle

async def main():
    model, options, handle, params = json.loads(sys.argv[1])
    async with AsyncEngine(model, **options) as engine:
        output = await engine.decode(Handle.from_dict(handle), SamplingParams(**params))
        sample = output.outputs[0]
        print(json.dumps([list(sample.token_ids), sample.sampled.raw.tobytes().hex(), output.num_cached_tokens]))

asyncio.run(main())
"""


def open_engine(path: Path, device: str, **options: Any) -> AsyncEngine:
    given = {"kv_cache_memory_bytes": 8 << 20, "host_cache_bytes": "1MiB", "prefix_cache_seed": 3, "device": device}
    return AsyncEngine(path, **(tiers.OPTIONS | given | options))


def lone(path: Path, device: str, prompt: list[int], seed: int) -> tuple[bytes, ...]:
    with tiers.open_llm(path, device, enable_prefix_caching=False) as llm:
        found: tuple[bytes, ...] = tiers.bits(llm.generate([prompt], [PARAMS.replace(seed=seed)], use_tqdm=False)[0])
        return found


async def hand_over(path: Path, device: str, prompt: list[int], **options: Any) -> tuple[Handle, Any]:
    async with open_engine(path, device, **options) as first, open_engine(path, device, seed=99, **options) as second:
        busy = [first.generate(other, PARAMS) for other in tiers.prompts()[:3]]
        handle = await first.prefill(prompt, PARAMS, cache_salt="mine")
        output = await second.decode(Handle.from_dict(json.loads(json.dumps(handle.to_dict()))), PARAMS)
        for stream in busy:
            await stream
        second.check()
        first.check()
        return handle, output


@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:2]))
def test_two_engines_give_the_bits_of_one(tiny_model: Make, model: tuple[str, str, str, int], device: str) -> None:
    path, prompt = tiny_model(*model[:2]), tiers.prompts()[-1]
    handle, output = asyncio.run(hand_over(path, device, prompt, kv_connector=kv.Memory(64 << 20)))
    assert tiers.bits(output) == lone(path, device, prompt, handle.seed)
    assert handle.saved_tokens == output.num_cached_tokens == 128 and output.outputs[0].token_ids[0] == handle.first_token_id


def test_recurrent_states_are_handed_over(recurrent_model: Path, device: str) -> None:
    prompt = tiers.prompts()[-1]
    handle, output = asyncio.run(hand_over(recurrent_model, device, prompt, kv_connector=kv.Memory(64 << 20)))
    assert tiers.bits(output) == lone(recurrent_model, device, prompt, handle.seed)
    assert output.num_cached_tokens == handle.saved_tokens > 100


def test_two_processes_give_the_bits_of_one(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama", "float32"), tiers.prompts()[-1]
    options = {"disk_cache": {"path": str(tmp_path), "bytes": "64MiB"}}

    async def main() -> None:
        async with open_engine(path, device, **options) as engine:
            handle = await engine.prefill(prompt, PARAMS)
            given = {"kv_cache_memory_bytes": 8 << 20, "host_cache_bytes": "1MiB", "prefix_cache_seed": 3, "device": device}
            params = {"temperature": 1, "max_tokens": 12, "logprobs": 2, "ignore_eos": True}
            work = json.dumps([str(path), tiers.OPTIONS | given | options, handle.to_dict(), params])
            done = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", DECODER, work], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            ids, raw, cached = json.loads(done.stdout)
            wanted = lone(path, device, prompt, handle.seed)
            assert (cached, raw) == (128, wanted[1].hex()) and ids[0] == handle.first_token_id

    asyncio.run(main())


def test_a_lost_store_costs_a_computation(tiny_model: Make, device: str) -> None:
    path, prompt = tiny_model("llama", "float32"), tiers.prompts()[-1]

    async def main() -> None:
        store = kv.Memory(64 << 20)
        async with open_engine(path, device, kv_connector=store) as first:
            handle = await first.prefill(prompt, PARAMS)
        store.clear(b"")
        async with open_engine(path, device, kv_connector=store) as second:
            output = await second.decode(handle, PARAMS)
        assert tiers.bits(output) == lone(path, device, prompt, handle.seed) and output.num_cached_tokens == 0

    asyncio.run(main())


def test_what_both_engines_need_names_itself(tiny_model: Make, device: str) -> None:
    path = tiny_model("llama", "float32")

    async def main() -> None:
        handle = Handle((5, 6), None, 1, 0, None)
        async with open_engine(path, device) as engine:
            with pytest.raises(ConfigError, match=r"prefill\(\) needs disk_cache or kv_connector"):
                await engine.prefill([5, 6])
            with pytest.raises(ConfigError, match=r"decode\(\) needs disk_cache or kv_connector"):
                engine.decode(handle)
        async with open_engine(path, device, kv_connector=kv.Memory(1 << 20), prefix_cache_seed=None) as engine:
            with pytest.raises(ConfigError, match=r"prefill\(\) needs prefix_cache_seed"):
                await engine.prefill([5, 6])

    asyncio.run(main())
