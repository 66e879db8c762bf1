"""The engine of a verl replica with a stand-in for the trainer: all calls of verl's adapter and actor, without verl."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpy import AsyncEngine, WeightUpdateError
from llmpy.rl._rpc import Client
from llmpy.rl._verl_engine import EngineHost, Settings

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

PROMPT = [5, 9, 3]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "ignore_eos": True, "seed": 4}
OPTIONS = {"kv_cache_memory_bytes": "16MiB", "max_num_seqs": 16, "max_model_len": 128}


@pytest.fixture
def open_host(device: str, qwen3: Path) -> Iterator[Callable[..., EngineHost]]:
    made: list[EngineHost] = []

    def make(engine: dict[str, Any] | None = None, **settings: Any) -> EngineHost:
        options = {"device": device, **OPTIONS, **(engine or {})}
        made.append(EngineHost(AsyncEngine(qwen3, **options), Settings(prompt_length=16, response_length=24, **settings)))
        return made[-1]

    yield make
    for host in made:
        host.close()


def actor(host: EngineHost, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
    """Runs a function with a connection like the replica's actor."""

    async def main() -> Any:
        client = Client(host.path)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


def ask(client: Client, request_id: str = "r", prompt: list[int] = PROMPT, **sampling: Any) -> Any:
    return client.call("generate", prompt_ids=prompt, sampling_params={**SAMPLING, **sampling}, request_id=request_id)


def new_model(qwen3: Path, seed: int) -> "torch.nn.Module":
    """The trainer's model after some training."""
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_generate(open_host: Callable[..., EngineHost]) -> None:
    """The fields of TokenOutput; the logprobs are those of `score`."""
    host = open_host()

    async def work(client: Client) -> tuple[dict[str, Any], Any]:
        answer = await ask(client)
        return answer, await host.engine.score(PROMPT, answer["token_ids"])

    answer, score = actor(host, work)
    assert len(answer["token_ids"]) == 24 and answer["stop_reason"] == "completed"
    assert answer["log_probs"] == score.token_logprobs.tolist()
    assert answer["routed_experts"] is None and answer["num_preempted"] == 0
    assert answer["extra_fields"] == {"global_steps": None, "num_cached_tokens": 0}


def test_limits(open_host: Callable[..., EngineHost]) -> None:
    """max_tokens as in verl's servers: the requested value, else what prompt and response leave, at most max_model_len."""
    host = open_host()

    async def lengths(client: Client) -> list[int]:
        wanted = [
            ask(client, "a", max_tokens=5),
            ask(client, "b", max_new_tokens=6),
            ask(client, "c", prompt=PROMPT * 10),
            ask(client, "d", prompt=[4] * 126, max_tokens=99),
        ]
        answers = await asyncio.gather(*wanted)
        with pytest.raises(RuntimeError, match="InvalidRequestError: prompt_ids: wanted room for a token"):
            await ask(client, "e", prompt=[4] * 128)
        with pytest.raises(RuntimeError, match="UnsupportedError: image_data is not supported"):
            await client.call("generate", PROMPT, SAMPLING, "f", image_data=["x"])
        bare = await client.call("generate", PROMPT, {"temperature": 0.0}, "g")
        assert bare["log_probs"] is None
        return [len(answer["token_ids"]) for answer in answers]

    assert actor(host, lengths) == [5, 6, 10, 2]


def test_abort_and_resume(open_host: Callable[..., EngineHost], qwen3: Path) -> None:
    """A partial rollout: aborted, held or refused while the weights change, then continued to the end."""
    host = open_host({"max_model_len": 8192})
    model = new_model(qwen3, 1)

    async def work(client: Client) -> None:
        running = asyncio.create_task(ask(client, "long", max_tokens=8000))
        while not host.engine.stats().num_running:
            await asyncio.sleep(0)
        assert (await client.call("abort_all_requests"))["aborted_count"] == 1
        partial = await running
        made = partial["token_ids"]
        assert partial["stop_reason"] == "aborted" and 0 < len(made) == len(partial["log_probs"]) < 8000

        held = asyncio.create_task(ask(client, "held", prompt=PROMPT + made, max_tokens=8))
        await host.update_weights(iter(list(model.named_parameters())), 5)
        await asyncio.sleep(0.05)
        assert not held.done()
        await client.call("abort_all_requests", reject_request=True)
        assert (await held)["stop_reason"] == "aborted"
        refused = await ask(client, "refused")
        assert refused["token_ids"] == [] and refused["stop_reason"] == "aborted"
        await client.call("resume_generation")
        rest = await ask(client, "rest", prompt=PROMPT + made, max_tokens=8)
        assert rest["stop_reason"] == "completed"
        steps = {"global_steps": 5, "min_global_steps": 5, "max_global_steps": 5}
        assert steps.items() <= rest["extra_fields"].items()

    actor(host, work)


def test_abort_one(open_host: Callable[..., EngineHost]) -> None:
    host = open_host({"max_model_len": 8192})

    async def work(client: Client) -> None:
        tasks = [asyncio.create_task(ask(client, name, max_tokens=8000)) for name in ("a", "b")]
        while host.engine.stats().num_running < 2:
            await asyncio.sleep(0)
        assert (await client.call("abort_request", "a"))["aborted"]
        assert not (await client.call("abort_request", "nobody"))["aborted"]
        assert (await tasks[0])["stop_reason"] == "aborted" and not tasks[1].done()
        await client.call("abort_request", "b")
        await tasks[1]
        await client.call("wait_for_requests_to_drain")

    actor(host, work)


def lora(step: int) -> dict[str, Any]:
    """Factors of rank 2 of all linears, by PEFT's names."""
    generator, found = torch.Generator().manual_seed(step), {}
    sizes = {"q_proj": (64, 128), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (128, 64)}
    for i in range(2):
        for name, (columns, rows) in sizes.items():
            prefix = f"base_model.model.model.layers.{i}.self_attn.{name}.lora_"
            found[f"{prefix}A.weight"] = torch.randn(2, columns, generator=generator) * 0.3
            found[f"{prefix}B.weight"] = torch.randn(rows, 2, generator=generator) * 0.3
    return found


def merged_logprobs(qwen3: Path, tensors: dict[str, Any], scale: float, completion: list[int]) -> Any:
    """Logprobs of the completion by transformers, with the adapter merged."""
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                linear = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                linear.weight += scale * tensors[name.replace("lora_A", "lora_B")] @ a
        logits = model(torch.tensor([PROMPT + completion])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()


def test_adapters(open_host: Callable[..., EngineHost], qwen3: Path) -> None:
    """Requests have the adapter of the last update, also after a sleep; a running request keeps the one that it began with."""
    config = {"r": 2, "lora_alpha": 6, "peft_type": "LORA", "bias": "none", "target_modules": {"q_proj"}}
    host = open_host({"enable_lora": True, "max_loras": 2, "max_lora_rank": 2}, has_adapter=True)
    assert host.sleep_level == 1

    async def pairs(step: int) -> AsyncIterator[tuple[str, Any]]:
        for item in lora(step).items():
            yield item

    async def work(client: Client) -> list[Any]:
        found = [await ask(client)]
        for step in (1, 2):
            await client.call("sleep")
            await client.call("wake_up", tags=["weights"])
            await host.update_adapter(lora(1).items() if step == 1 else pairs(2), config, step)
            await client.call("wake_up", tags=["kv_cache"])
            found.append(await ask(client))
        running = asyncio.create_task(ask(client))
        while not host.engine.stats().num_running and not running.done():
            await asyncio.sleep(0.001)
        await host.update_adapter(lora(3).items(), config, 3)
        return [*found, await running, await ask(client)]

    answers = actor(host, work)
    steps = [answer["extra_fields"].get("min_global_steps") for answer in answers]
    assert steps == [None, 1, 2, 2, 3]
    for answer, step in zip(answers[1:], steps[1:], strict=True):
        gaps = merged_logprobs(qwen3, lora(step), 3.0, answer["token_ids"]) - answer["log_probs"]
        assert np.abs(gaps).max() < 1e-4
    assert answers[2]["token_ids"] == answers[3]["token_ids"] != answers[1]["token_ids"]


@pytest.mark.parametrize("is_async", [False, True])
def test_update_weights(open_host: Callable[..., EngineHost], qwen3: Path, is_async: bool) -> None:
    """From a generator of either kind, in the caller's loop; the trainer's probabilities follow."""
    host = open_host()
    model = new_model(qwen3, 2)

    async def weights() -> AsyncIterator[tuple[str, Any]]:
        for item in model.named_parameters():
            yield item

    async def work(client: Client) -> dict[str, Any]:
        before = await ask(client)
        await client.call("set_global_steps", 1)
        await host.update_weights(weights() if is_async else model.named_parameters(), 2)
        assert await host.engine.compare_weights(model.named_parameters())
        after = await ask(client)
        assert after["token_ids"] != before["token_ids"]
        assert after["extra_fields"]["global_steps"] == 2 and after["extra_fields"]["num_cached_tokens"] == 0
        return after

    after = actor(host, work)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + after["token_ids"]])).logits[0, len(PROMPT) - 1 : -1]
    theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(after["token_ids"])[:, None])[:, 0]
    assert np.abs(theirs.numpy() - np.array(after["log_probs"])).max() < 1e-3


def test_a_torn_update_is_refused(open_host: Callable[..., EngineHost], qwen3: Path) -> None:
    host = open_host()
    named = list(new_model(qwen3, 3).named_parameters())

    async def work(client: Client) -> None:
        with pytest.raises(WeightUpdateError, match="were not written"):
            await host.update_weights(iter(named[:-1]), 1)
        await host.update_weights(iter(named), 2)
        assert (await ask(client))["extra_fields"]["min_global_steps"] == 2

    actor(host, work)


def test_sleep_and_wake(open_host: Callable[..., EngineHost], qwen3: Path) -> None:
    """A training step on the engine's device: the engine frees all memory, then wakes weights, updates, wakes the cache."""
    host = open_host({"load_format": "dummy"})
    model = new_model(qwen3, 4)

    async def work(client: Client) -> None:
        await ask(client)
        await client.call("sleep")
        assert host.engine.is_sleeping()
        waiting = asyncio.create_task(ask(client, "waits"))
        await host.wake_up(["weights"])
        await host.update_weights(model.named_parameters(), 1)
        assert host.engine.is_sleeping() and not waiting.done()
        await host.wake_up(["kv_cache"])
        assert not host.engine.is_sleeping()
        made = await waiting
        assert made["extra_fields"]["min_global_steps"] == 1
        assert await host.engine.compare_weights(model.named_parameters())
        await client.call("abort_all_requests")
        await client.call("release_kv_cache")
        await host.update_weights(model.named_parameters(), 2)
        await client.call("resume_kv_cache")
        await client.call("clear_kv_cache")
        await client.call("resume_generation")
        again = await ask(client, "again")
        assert again["token_ids"] == made["token_ids"] and again["log_probs"] == made["log_probs"]

    actor(host, work)


@pytest.mark.parametrize(("mode", "sleeps"), [("standalone", False), ("colocated", True)])
def test_modes(open_host: Callable[..., EngineHost], mode: str, sleeps: bool) -> None:
    """A standalone engine does not sleep; a colocated one keeps its weights, because no update restores them."""
    host = open_host(mode=mode)

    async def work(client: Client) -> None:
        before = await ask(client)
        await client.call("sleep")
        assert host.engine.is_sleeping() is sleeps
        await client.call("wake_up")
        assert (await ask(client, "again"))["log_probs"] == before["log_probs"]

    actor(host, work)
