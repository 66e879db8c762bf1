"""llmpy in a local Ray: replicas behind Ray Serve, and the actor for rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, cast

import httpx
import numpy as np
import pytest
from failures import PanicError

pytest.importorskip("ray.serve")

import ray
from ray import serve
from safetensors.numpy import load_file
from starlette.requests import Request

from llmpy import LLM, InvalidRequestError
from llmpy.distributed import LLMPredictor
from llmpy.distributed._beginnings import Owners, beginnings
from llmpy.distributed._serve import Front, Replica
from llmpy.distributed.ray import RolloutActor, application
from llmpy.server.errors import HttpError
from llmpy.server.middleware import _check_is_local

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import Message, Receive, Scope, Send

SMALL = {"device": "cpu", "kv_cache_memory_bytes": "32MiB"}


def chat(text: str) -> bytes:
    return json.dumps({"max_tokens": 3, "messages": [{"role": "user", "content": text}]}).encode()


def test_beginnings_are_shared_as_far_as_prompts_are() -> None:
    long, other = beginnings(chat("a" * 1600)), beginnings(chat("a" * 900 + "b" * 700))
    assert len(long) == len(other) == 3
    assert [x == y for x, y in zip(long, other, strict=True)] == [True, False, False]
    assert beginnings(chat("short")) == beginnings(b"{") == beginnings(b"[1]") == ()
    assert long != beginnings(json.dumps({**json.loads(chat("a" * 1600)), "cache_salt": "mine"}).encode())


def test_owners() -> None:
    owners: Owners[str] = Owners(most=3)
    owners.note([b"1", b"2"], "first")
    owners.note([b"1", b"3"], "second")
    assert owners.find([b"1", b"2", b"9"], {"first", "second"}) == "first"
    assert owners.find([b"1", b"2"], {"second"}) == "second"  # the first has gone
    owners.note([b"4"], "second")
    assert owners.find([b"2"], {"first"}) is None  # forgotten


def test_a_reader_that_goes_leaves_nothing_behind() -> None:
    """A reader may stop in the middle or before the first message; failures are reported."""
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for number in range(100):
                await send({"type": "http.response.body", "body": b"%d" % number})
            raise ValueError("told")
        finally:
            ended.append("app")

    async def run(count: int) -> None:
        replica = object.__new__(Replica)
        replica._app = app
        answer = cast("AsyncGenerator[Message]", replica.answer({}, b"", ()))
        async with contextlib.aclosing(answer):
            for _ in range(count):
                await anext(answer)
            if count == 100:
                with pytest.raises(ValueError, match="told"):
                    await anext(answer)
            for _ in range(10):  # meanwhile the application waits for room
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    for count in (1, 5, 100):
        asyncio.run(run(count))
    assert ended == ["app"] * 3


@pytest.mark.parametrize("error", [KeyError, MemoryError, PanicError, asyncio.CancelledError])
def test_a_replica_tells_of_any_error(error: type[BaseException]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"0"})
        raise error("told")

    async def run() -> None:
        replica = object.__new__(Replica)
        replica._app = app
        answer = cast("AsyncGenerator[Message]", replica.answer({}, b"", ()))
        async with asyncio.timeout(30), contextlib.aclosing(answer):
            assert (await anext(answer))["body"] == b"0"
            with pytest.raises((KeyError, MemoryError, RuntimeError), match="told"):
                await anext(answer)

    asyncio.run(run())


def test_the_replica_hears_who_asks() -> None:
    """The replica gets the client's address, because without keys only clients of this machine may use control paths."""
    seen: dict[str, object] = {}

    class Replicas:
        def options(self, **_: object) -> Replicas:
            return self

        async def remote(self, scope: dict[str, object], body: bytes, **_: object) -> AsyncIterator[dict[str, object]]:
            seen.update(scope)
            yield {"status": 200, "headers": []}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/is_paused", "headers": [], "client": ("10.0.0.7", 5)}
    asyncio.run(Front(cast("DeploymentHandle", Replicas()), 100)(Request(scope, receive)))
    with pytest.raises(HttpError, match="clients of this machine"):
        _check_is_local(seen)


@pytest.fixture(scope="module")
def url(local_ray: None, served_model: str, reserve_port: Callable[[], int]) -> Iterator[str]:
    """Two replicas behind Ray Serve."""
    port = reserve_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    server = {"served_model_name": ("tiny",), "max_body_bytes": 1 << 16}
    serve.run(application(served_model, num_replicas=2, ray_actor_options={"num_cpus": 1}, server=server, **SMALL))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def test_requests_go_where_their_beginning_is(url: str) -> None:
    """Eight conversations over two replicas: by chance half of the second requests would find nothing cached."""
    with httpx.Client(base_url=url, timeout=300) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        cached = []
        for turn in range(2):
            for one in range(8):
                body = chat(f"{one} " + "the same beginning " * 60 + f"and turn {turn}")
                answer = client.post("/v1/chat/completions", content=body)
                assert answer.status_code == 200, answer.text
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert min(cached[8:]) > 0, cached


def test_streams_and_refusals(url: str) -> None:
    with httpx.Client(base_url=url, timeout=300) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "stream": True, "ignore_eos": True, "temperature": 0}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            frames = [line for line in response.iter_lines() if line]
        assert len(frames) >= 2 and frames[-1] == "data: [DONE]"
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.post("/v1/completions", content=b" " * (1 << 17)).status_code == 413
        assert client.get("/nowhere").status_code == 404


def test_a_client_that_goes_ends_its_request(url: str) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 8000, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=300) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        deadline = time.monotonic() + 60
        # Either replica may answer: eight in a row see both, but for one time in 128.
        while any(client.get("/load").json()["running"] for _ in range(8)):
            assert time.monotonic() < deadline


def test_rollouts(local_ray: None, served_model: str) -> None:
    """Generates with logprobs, sleeps, updates the weights, and returns the weights' version of each token."""
    actor = RolloutActor.options(num_cpus=1).remote(served_model, **SMALL)
    call = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    first = ray.get(actor.generate.remote([5, 6, 7], **call))
    sample = first.outputs[0]
    assert len(sample.token_ids) == len(sample.token_logprobs) == 6 and first.weight_version == 0
    with LLM(served_model, **SMALL) as llm:
        alone = llm.generate([[5, 6, 7]], logprobs=0, **call)[0].outputs[0]
    assert sample.token_ids == alone.token_ids and np.array_equal(sample.token_logprobs, alone.token_logprobs)

    weights = load_file(f"{served_model}/model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    ray.get(actor.sleep.remote(2))
    ray.get(actor.wake_up.remote(["weights"]))
    report = ray.get(actor.update_weights.remote(ray.put(weights), version="new"))
    ray.get(actor.wake_up.remote())
    assert report.version == "new" and ray.get(actor.weight_version.remote()) == "new"
    again = ray.get(actor.generate_all.remote([[5, 6, 7], [8, 9]], **call))
    assert [output.weight_version for output in again] == ["new", "new"]
    assert again[0].outputs[0].token_ids != sample.token_ids

    running = actor.generate.remote([5], request_id="long", max_tokens=32000, ignore_eos=True)
    deadline = time.monotonic() + 60
    while not (partial := ray.get(actor.abort.remote("long"))):
        assert time.monotonic() < deadline
    assert partial[0].outputs[0].finish_reason == ray.get(running).outputs[0].finish_reason == "abort"
    with pytest.raises(InvalidRequestError, match="temperature"):
        ray.get(actor.generate.remote([5], temperature=-1.0))
    ray.get(actor.shutdown.remote())
    ray.kill(actor)


def test_the_actor_is_awaited_too(local_ray: None, served_model: str) -> None:
    async def run() -> int:
        actor = RolloutActor.remote(served_model, **SMALL)
        output = await actor.generate.remote([5, 6], max_tokens=2, ignore_eos=True)
        stats = await actor.stats.remote()
        ray.kill(actor)
        assert stats.num_unfinished == 0
        return len(output.outputs[0].token_ids)

    assert asyncio.run(run()) == 2


def test_a_batch_goes_on_row_by_row(served_model: str) -> None:
    """A long answer does not delay the others, and a prompt that cannot run fails alone."""

    async def run() -> list[dict[str, list[object]]]:
        predictor = LLMPredictor(served_model, sampling={"ignore_eos": True, "max_tokens": 100, "temperature": 0}, **SMALL)
        prompts = [[5], list(range(3, 203)) * 20, [10**6]]
        batch = {"prompt": np.array(prompts, object), "name": np.array(["runs", "long", "wrong"])}
        return [part async for part in predictor(batch)]

    parts = asyncio.run(run())
    rows = {name: (place, i) for place, part in enumerate(parts) for i, name in enumerate(part["name"])}
    place, i = rows["wrong"]
    assert place == 0 and "vocabulary" in str(parts[0]["error"][i])
    place, i = rows["runs"]
    assert len(parts[place]["token_ids"][i]) == len(parts[place]["logprobs"][i]) == 100
    assert len(rows) == 3 and rows["long"][0] > 0


def test_a_batch_that_nobody_reads_ends(served_model: str) -> None:
    async def run() -> None:
        predictor = LLMPredictor(served_model, sampling={"ignore_eos": True, "max_tokens": 32000}, **SMALL)
        answer = cast("AsyncGenerator[object]", predictor({"prompt": np.array([[5], [10**6]], object)}))
        async with contextlib.aclosing(answer):
            await anext(answer)  # the prompt that cannot run
        deadline = time.monotonic() + 20
        while predictor._engine.stats().num_unfinished:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert predictor._engine.stats().generation_tokens < 32000

    asyncio.run(run())


@pytest.mark.slow
def test_a_dataset(local_ray: None, served_model: str) -> None:
    pytest.importorskip("pyarrow")
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    arguments = {"model": served_model, "sampling": {"max_tokens": 3, "temperature": 0, "ignore_eos": True}, **SMALL}
    prompts = ray.data.from_items([{"prompt": text} for text in ("hey", "hello", "cab", "abc")])
    rows = prompts.map_batches(LLMPredictor, fn_constructor_kwargs=arguments, concurrency=1, batch_size=2).take_all()
    with LLM(served_model, **SMALL) as llm:
        alone = {output.prompt: output for output in llm.generate(["hey", "hello", "cab", "abc"], **arguments["sampling"])}
    assert {row["prompt"] for row in rows} == set(alone)
    assert all(list(row["token_ids"]) == alone[row["prompt"]].token_ids and len(row["logprobs"]) == 3 for row in rows)
