"""Prompts handed over from pool to pool, without a store: ids and logprob bits are those of one engine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modules import load

from llmpy import LlmpyError, UnsupportedError
from llmpy.engine import lending
from llmpy.engine.handover import Handle

handover = load(Path(__file__).with_name("test_handover.py"))
tiers = load(Path(__file__).with_name("test_tiers.py"))
Make = Callable[[str, str], Path]
DEVICE: dict[str, Any] = {"kv_connector": {"name": "device"}}


@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:2]))
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_two_engines_give_the_bits_of_one(
    tiny_model: Make, model: tuple[str, str, str, int], device: str, n_ranks: int
) -> None:
    path, prompt = tiny_model(*model[:2]), tiers.prompts()[4]
    ranks = {"tensor_parallel_size": 2, "device_ids": (0, 0)} if n_ranks == 2 else {}
    if n_ranks == 2 and model[0] == "qwen2-mixed":
        pytest.skip("one model with windows is enough")
    handle, output = asyncio.run(handover.hand_over(path, device, prompt, **DEVICE, **ranks))
    assert tiers.bits(output) == handover.lone(path, device, prompt, handle.seed)
    assert handle.saved_tokens == output.num_cached_tokens == 128


def test_recurrent_states_are_copied(recurrent_model: Path, device: str) -> None:
    prompt = tiers.prompts()[4]
    handle, output = asyncio.run(handover.hand_over(recurrent_model, device, prompt, **DEVICE))
    assert tiers.bits(output) == handover.lone(recurrent_model, device, prompt, handle.seed)
    assert output.num_cached_tokens == 128


def test_two_devices_give_the_bits_of_one(tiny_model: Make, device: str) -> None:
    from llmpy import devices

    if device == "cpu" or len([one for one in devices() if one["available"] and one["device"].startswith("cuda")]) < 2:
        pytest.skip("needs two GPUs")
    path, prompt = tiny_model("llama", "bfloat16"), tiers.prompts()[4]

    async def main() -> None:
        one = handover.open_engine(path, "cuda:0", **DEVICE)
        two = handover.open_engine(path, "cuda:1", **DEVICE)
        async with one, two:
            for source, other in ((one, two), (two, one)):
                handle = await source.prefill(prompt[1:] if source is two else prompt, handover.PARAMS)
                output = await other.decode(handle, handover.PARAMS)
                assert tiers.bits(output) == handover.lone(path, "cuda:0", list(handle.prompt_token_ids), handle.seed)
                assert other.stats().fetched_tokens == handle.saved_tokens > 0

    asyncio.run(main())


def test_what_is_gone_is_computed(tiny_model: Make, device: str) -> None:
    """The source forgets the prompt, sleeps, is closed, or has other weights."""
    path, other_path, prompt = tiny_model("llama", "float32"), tiny_model("qwen3", "float32"), tiers.prompts()[4]

    async def main() -> None:
        first, second, third = (handover.open_engine(one, device, **DEVICE) for one in (path, path, other_path))
        async with second, third:
            handle = await first.prefill(prompt, handover.PARAMS)
            wanted = handover.lone(path, device, prompt, handle.seed)
            strange = await third.decode(handle, handover.PARAMS)
            assert third.stats().fetched_tokens == strange.num_cached_tokens == 0
            for lose in (first.reset_prefix_cache, lambda: first.sleep(1), first.shutdown):
                result = lose()
                if asyncio.iscoroutine(result):
                    await result
                output = await second.decode(handle, handover.PARAMS)
                assert tiers.bits(output) == wanted and output.num_cached_tokens == 0
                await second.reset_prefix_cache()

    asyncio.run(main())


def test_both_directions_at_once(tiny_model: Make, device: str) -> None:
    path, texts = tiny_model("llama", "float32"), tiers.prompts()[4:]

    async def main() -> None:
        async with handover.open_engine(path, device, **DEVICE) as one, handover.open_engine(path, device, **DEVICE) as two:

            async def hand_over(source: Any, other: Any, text: list[int]) -> tuple[Handle, Any]:
                handle = await source.prefill(text, handover.PARAMS)
                return handle, await other.decode(handle, handover.PARAMS)

            ways = [(one, two) if i % 2 else (two, one) for i in range(len(texts))]
            found = await asyncio.gather(*(hand_over(*way, text) for way, text in zip(ways, texts, strict=True)))
            for (handle, output), text in zip(found, texts, strict=True):
                assert tiers.bits(output) == handover.lone(path, device, text, handle.seed)
            assert one.stats().fetched_tokens == two.stats().fetched_tokens == 256
            one.check()
            two.check()

    asyncio.run(main())


def test_an_error_in_the_thread_that_lends(tiny_model: Make, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompt = tiny_model("llama", "float32"), tiers.prompts()[4]

    def fail(*unused: object) -> None:
        raise RuntimeError("lost")

    async def main() -> None:
        async with handover.open_engine(path, device, **DEVICE) as one, handover.open_engine(path, device, **DEVICE) as two:
            handle = await one.prefill(prompt, handover.PARAMS)
            for answer in (fail, lending._answer):  # the thread outlives the error
                monkeypatch.setattr(lending, "_answer", answer)
                given = (two._driver.thread, handle.engine_id, two._fingerprint, prompt, None)
                if answer is fail or device == "cpu":
                    with pytest.raises((LlmpyError, OSError), match=r"does not answer|Broken pipe|reset"):
                        lending.borrow(*given)
                else:
                    assert lending.borrow(*given) == 128
            assert one._lender is not None
        with pytest.raises(OSError, match="refused"):
            lending.borrow(*given)

    asyncio.run(main())


def test_replicas_are_refused(tiny_model: Make, device: str) -> None:
    with pytest.raises(UnsupportedError, match="'device'} is not supported yet with data_parallel_size above 1"):
        handover.open_engine(tiny_model("llama", "float32"), device, data_parallel_size=2, device_ids=(0, 0), **DEVICE)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_two_processes_give_the_bits_of_one(tiny_model: Make, device: str, n_ranks: int) -> None:
    """Over a GPU's memory; on a CPU, whose pools other processes cannot read, the prompt is computed again."""
    path, prompt = tiny_model("llama", "bfloat16"), tiers.prompts()[4]
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "device_ids": (0, 0)} if n_ranks == 2 else {}
    options = tiers.OPTIONS | DEVICE | ranks | {"device": device, "kv_cache_memory_bytes": 8 << 20, "prefix_cache_seed": 3}
    given = [str(path), options | {"host_cache_bytes": 1 << 20}, prompt, handover.PARAMS.to_dict()]
    command = [sys.executable, "-c", handover.PREFILLER, json.dumps(given)]

    async def main() -> None:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None and other.stdout is not None
            handle = Handle.from_dict(json.loads(other.stdout.readline()))
            async with handover.open_engine(path, device, **DEVICE, **ranks) as engine:
                for found in (128 if device != "cpu" else 0, 0):
                    output = await engine.decode(handle, handover.PARAMS)
                    assert tiers.bits(output) == handover.lone(path, device, prompt, handle.seed)
                    assert output.num_cached_tokens == found
                    await engine.reset_prefix_cache()
                    if other.poll() is None:  # the second time the owner is dead
                        other.kill()
                        other.wait()

    asyncio.run(main())
