"""A prompt goes to the decode engine while its later blocks are computed: the same bits, and each side may fail at any time."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load

from llmpy import AsyncEngine, InvalidRequestError, SamplingParams, UnsupportedError, kv
from llmpy.engine.handover import Handle, Prefill

handover = load(Path(__file__).with_name("test_handover.py"))
peers = load(Path(__file__).with_name("test_peers.py"))
tiers = handover.tiers
Make = Callable[[str, str], Path]
PARAMS = SamplingParams(temperature=1, max_tokens=12, logprobs=2, ignore_eos=True)
LONG = {"max_model_len": 512, "max_num_batched_tokens": 8, "host_cache_bytes": "8MiB"}
"""Options with which a prompt takes many steps."""
KEEP = 2
"""Number of the pause that freezes requests between two steps."""


def prompt_of(seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 131, 470).tolist()
    return found


class Stops(kv.Memory):
    """Freezes the engine that saves once it has saved some blocks, on the thread that saves them."""

    def __init__(self, after: int) -> None:
        super().__init__(64 << 20)
        self.engine: AsyncEngine | None = None
        self.left = after
        self.fails = False

    def save(self, name: bytes, data: bytes) -> None:
        if self.fails:
            raise OSError("the store is full")
        super().save(name, data)
        self.left -= 1
        if self.left == 0 and self.engine is not None:
            self.engine._driver.thread.pause(KEEP)


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


async def are_idle(*engines: AsyncEngine) -> None:
    """Nothing runs or waits, and every page and slot is free or findable."""
    for engine in engines:
        await until(lambda engine=engine: not engine.stats().num_unfinished)  # type: ignore[misc]
        await asyncio.to_thread(engine.check)
        stats = engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total and stats.num_running == stats.num_waiting == 0
        assert stats.host_blocks_swapped == stats.allocations_since_warmup == 0


@contextlib.asynccontextmanager
async def halfway(path: Path, device: str, **options: Any) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine, Prefill, Any]]:
    """Two engines of which one is frozen with a part of a prompt, and the stream of the other, which has loaded that part."""
    for attempt in range(8):  # a prompt may be done before the freeze has come
        store = Stops(4)
        own = LONG | {"kv_connector": store} | options
        async with handover.open_engine(path, device, **own) as first, handover.open_engine(path, device, **own) as second:
            store.engine = first
            prefill = await first.begin_prefill(prompt_of(attempt), PARAMS)
            stream = second.decode(prefill, PARAMS)
            await until(lambda store=store: store.left <= 0)  # type: ignore[misc]
            await asyncio.sleep(0.01)
            if not first.stats().num_running:
                continue
            await until(lambda engine=second: engine.stats().disk_loaded_bytes > 0)  # type: ignore[misc]
            yield first, second, prefill, stream
            return
    raise AssertionError("no prompt was frozen")


@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:2]))
def test_blocks_come_while_later_ones_are_computed(tiny_model: Make, model: tuple[str, str, str, int], device: str) -> None:
    path = tiny_model(*model[:2])

    async def main() -> None:
        async with halfway(path, device) as (first, second, prefill, stream):
            before = second.stats()
            assert before.host_blocks_cached > 0 and before.num_waiting == 1 and before.num_running == 0
            assert not prefill.handle.is_whole and prefill.handle.saved_tokens == 0
            await first.resume()
            handle, output = await prefill, await stream
            ids = list(handle.prompt_token_ids)
            assert tiers.bits(output) == lone(path, device, ids, handle.seed)
            assert handle.is_whole and handle.saved_tokens == output.num_cached_tokens == 464
            assert output.outputs[0].token_ids[0] == handle.first_token_id
            assert second.stats().disk_cache_queries == len(ids)
            await are_idle(first, second)

    asyncio.run(main())


def lone(path: Path, device: str, prompt: list[int], seed: int) -> tuple[bytes, ...]:
    with tiers.open_llm(path, device, enable_prefix_caching=False, max_model_len=512) as llm:
        found: tuple[bytes, ...] = tiers.bits(llm.generate([prompt], [PARAMS.replace(seed=seed)], use_tqdm=False)[0])
        return found


async def hand_over_three(path: Path, device: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    async with (
        handover.open_engine(path, device, **LONG, **one) as first,
        handover.open_engine(path, device, **LONG, **two) as second,
    ):
        prefills = [await first.begin_prefill(prompt_of(seed), PARAMS, cache_salt="mine") for seed in range(3)]
        streams = [second.decode(prefill, PARAMS) for prefill in prefills]
        for prefill, stream in zip(prefills, streams, strict=True):
            handle, output = await prefill, await stream
            assert tiers.bits(output) == lone(path, device, list(handle.prompt_token_ids), handle.seed)
            assert output.num_cached_tokens == handle.saved_tokens == 464
        await are_idle(first, second)


def test_recurrent_states_and_peers(recurrent_model: Path, device: str) -> None:
    address = peers.address("unix")
    stores = {"kv_connector": peers.peer(address)}, {"kv_connector": peers.peer(None, address)}
    asyncio.run(hand_over_three(recurrent_model, device, *stores))


def test_files(tiny_model: Make, device: str, tmp_path: Path) -> None:
    store = {"disk_cache": {"path": str(tmp_path), "bytes": "64MiB"}}
    asyncio.run(hand_over_three(tiny_model("llama", "float32"), device, store, store))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("failure", ["abort", "close", "decode ends", "store"])
def test_each_side_may_fail_halfway(tiny_model: Make, device: str, failure: str) -> None:
    path = tiny_model("llama", "float32")

    async def main() -> None:
        async with halfway(path, device) as (first, second, prefill, stream):
            ids, seed = list(prefill.handle.prompt_token_ids), prefill.handle.seed
            if failure == "decode ends":
                await stream.aclose()
                await are_idle(second)
                await first.resume()
                assert (await prefill).saved_tokens == 464
                await are_idle(first)
                return
            if failure == "abort":
                await first.abort()
                await first.resume()
            elif failure == "store":
                store = first.config.kv_connector
                assert isinstance(store, Stops)
                store.fails = True
                await first.resume()
            else:
                await first.shutdown()
            output = await stream
            assert tiers.bits(output) == lone(path, device, ids, seed)
            assert output.num_cached_tokens < 464
            await are_idle(second, *([] if failure == "close" else [first]))

    asyncio.run(main())


PREFILLER = """
import asyncio, json, sys
from llmpy import AsyncEngine, SamplingParams

async def main():
    model, options, prompt, params = json.loads(sys.argv[1])
    async with AsyncEngine(model, **options) as engine:
        prefill = await engine.begin_prefill(prompt, SamplingParams(**params))
        print(json.dumps(prefill.handle.to_dict()), flush=True)
        await prefill
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
"""A process that prints the handle of a prompt while it computes it."""


@pytest.mark.parametrize("is_killed", [False, True])
def test_two_processes_and_the_death_of_one(tiny_model: Make, device: str, is_killed: bool) -> None:
    path, address, prompt = tiny_model("llama", "float32"), peers.address("unix"), prompt_of(1)
    given = {"kv_cache_memory_bytes": 8 << 20, "host_cache_bytes": "1MiB", "prefix_cache_seed": 3, "device": device}
    params = {"temperature": 1, "max_tokens": 12, "logprobs": 2, "ignore_eos": True}
    options = tiers.OPTIONS | given | LONG | {"max_num_batched_tokens": 1 if is_killed else 8, "max_num_seqs": 1}
    work = json.dumps([str(path), options | {"kv_connector": peers.peer(address)}, prompt, params])

    async def main() -> None:
        connector = peers.peer(None, address, timeout_s=0.2)
        async with handover.open_engine(path, device, **LONG, kv_connector=connector) as engine:
            process = subprocess.Popen([sys.executable, "-c", PREFILLER, work], stdin=-1, stdout=-1, text=True)
            try:
                assert process.stdout
                handle = Handle.from_dict(json.loads(await asyncio.to_thread(process.stdout.readline)))
                stream = engine.decode(handle, PARAMS, patience_s=0.3 if is_killed else 10)
                if is_killed:
                    await until(lambda: engine.stats().disk_loaded_bytes > 0)
                    process.kill()
                output = await stream
            finally:
                process.kill()
                await asyncio.to_thread(process.communicate)
            assert tiers.bits(output) == lone(path, device, prompt, handle.seed)
            assert 0 < output.num_cached_tokens <= 464 and (is_killed or output.num_cached_tokens == 464)
            await are_idle(engine)

    asyncio.run(main())


def test_nobody_computes_the_prompt(tiny_model: Make, device: str) -> None:
    path, prompt = tiny_model("llama", "float32"), prompt_of(2)

    async def main() -> None:
        async with handover.open_engine(path, device, **LONG, kv_connector=kv.Memory(1 << 20)) as engine:
            begun, early = time.monotonic(), Handle(tuple(prompt), None, 7, 0, None, is_whole=False)
            output = await engine.decode(early, PARAMS, patience_s=0.2)
            assert tiers.bits(output) == lone(path, device, prompt, 7) and output.num_cached_tokens == 0
            assert time.monotonic() - begun >= 0.2
            busy = [engine.generate(prompt_of(i), PARAMS) for i in range(3)]  # others run while one waits
            early = Handle(tuple(prompt_of(5)), None, 7, 0, None, is_whole=False)
            stream = engine.decode(early, PARAMS, patience_s=60)
            for other in busy:
                await other
            stream.abort()
            assert (await stream).outputs[0].finish_reason == "abort"
            await are_idle(engine)

    asyncio.run(main())


def test_pools_are_read_behind_the_prompt_alone(tiny_model: Make, device: str) -> None:
    path = tiny_model("llama", "float32")

    async def main() -> None:
        async with handover.open_engine(path, device, kv_connector={"name": "device"}) as engine:
            prefill = await engine.begin_prefill(prompt_of(3)[:100], PARAMS)
            with pytest.raises(UnsupportedError, match="still computed is not supported with kv_connector"):
                engine.decode(prefill)
            handle = await prefill
            assert handle.is_whole and handle.saved_tokens == 96
            with pytest.raises(InvalidRequestError, match="longer than the maximum model length"):
                await engine.begin_prefill(prompt_of(3), PARAMS)

    asyncio.run(main())
