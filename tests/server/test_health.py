"""Health, metrics and refusals are correct in every state."""

import asyncio
import contextlib
import re
import threading
import time

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmpy import (
    AsyncEngine,
    EngineAsleepError,
    EngineClosedError,
    EngineStuckError,
    SamplingParams,
    WeightsMissingError,
    WeightUpdateError,
)
from llmpy.server import build_app
from llmpy.server.app import find_service

ASK = {"prompt": "hello", "max_tokens": 2}


@pytest.fixture
def model(tmp_path, write_model):
    return write_model(tmp_path)


@pytest.fixture
def own(model):
    """An engine for one test."""
    engine = AsyncEngine(model, device="cpu", kv_cache_memory_bytes="16MiB")
    yield engine
    engine.close()


@contextlib.asynccontextmanager
async def client_of(engine, **options):
    app = build_app(engine, control=True, **options)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def states(client):
    text = (await client.get("/metrics")).text
    found = re.findall(r'^llmpy:engine_state\{.*state="(\w+)"\} (\d)', text, re.MULTILINE)
    assert len(found) == 8
    return {name for name, value in found if value == "1"}


async def told(client):
    """Status and text of /health, status of /ping, states in /metrics."""
    health, ping = await client.get("/health"), await client.get("/ping")
    text = health.json().get("error", {}).get("message", "")
    return health.status_code, text, ping.status_code, await states(client)


WELL = 200, "", 200, {"serving"}


def test_paused_and_asleep(own):
    async def main():
        async with client_of(own) as client:
            assert await told(client) == WELL
            await client.post("/pause?mode=keep")
            assert await told(client) == (503, "engine is paused; POST /resume", 200, {"paused"})
            assert "paused)" in repr(own) and "paused)" in own._repr_html_()
            with pytest.raises(EngineAsleepError, match="paused"):
                own.check_health()
            own.check_health(alive_only=True)
            await client.post("/resume")
            assert await told(client) == WELL
            for level in (0, 1):
                await client.post(f"/sleep?level={level}")
                text = f"engine sleeps at level {level}; POST /wake_up"
                assert await told(client) == (503, text, 200, {"asleep"})
                assert f"asleep at level {level})" in repr(own) and f"asleep at level {level})" in own._repr_html_()
                await client.post("/wake_up")
                assert await told(client) == WELL and "idle)" in repr(own)

    asyncio.run(main())


def test_weights_that_are_missing(own, model):
    """After sleep at level 2, and after an update that failed half-way; a new request is refused by name, none hangs."""
    torn = "weights are incomplete since epoch 0; commit a full update"

    async def refused(client):
        answer = await client.post("/v1/completions", json=ASK)
        assert answer.status_code == 503 and answer.json()["error"]["message"] == torn and "retry-after" in answer.headers

    async def main():
        async with client_of(own) as client:
            await client.post("/sleep?level=2")
            assert (await told(client))[3] == {"asleep", "weights_missing"}
            await client.post("/wake_up")
            assert await told(client) == (503, torn, 200, {"weights_missing"})
            assert "weights missing)" in repr(own)
            with pytest.raises(WeightsMissingError):
                own.check_health()
            await refused(client)
            assert (await client.post("/update_weights", json={"weight_dir": str(model)})).status_code == 200
            assert await told(client) == WELL
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200

    asyncio.run(main())


def test_an_update_that_fails_half_way(own, model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    broken = tmp_path / "broken"
    broken.mkdir()
    last = max(tensors)
    save_file({**tensors, last: np.zeros(3, np.float32)}, broken / "model.safetensors")

    async def main():
        async with client_of(own) as client:
            running = asyncio.ensure_future(client.post("/v1/completions", json={**ASK, "max_tokens": 200}))
            await asyncio.sleep(0.05)
            update = own.begin_update()
            await update.write(last, tensors[last])
            assert await states(client) == {"updating"} and (await client.get("/health")).status_code == 200
            with pytest.raises(WeightUpdateError):
                await update.write(min(tensors), np.zeros(3, np.float32))
            await update.abort()
            assert (await told(client))[::3] == (503, {"weights_missing"})
            assert (await client.post("/v1/completions", json=ASK)).status_code == 503
            assert (await client.post("/update_weights", json={"weight_dir": str(broken)})).status_code == 400
            assert (await client.post("/update_weights", json={"weight_dir": str(model)})).status_code == 200
            assert (await running).status_code == 200 and await told(client) == WELL

    asyncio.run(main())


def test_draining_closed_and_dead(own):
    async def main():
        async with client_of(own) as client:
            await client.post("/drain")
            assert await told(client) == (503, "the server is shutting down", 200, {"draining"})
        async with client_of(own) as client:
            await own.shutdown()
            health = await client.get("/health")
            assert (health.status_code, health.json()["error"]["message"]) == (503, "engine is closed")
            assert (await client.get("/ping")).status_code == 503
        with pytest.raises(EngineClosedError):
            own.check_health(alive_only=True)

    asyncio.run(main())


class Still:
    """An engine's thread that does not finish its step."""

    def __init__(self, inner):
        self._inner = inner

    def boundary(self):
        return 0

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_step_that_does_not_end(own):
    driver = own._driver

    async def main():
        async with client_of(own, stuck_timeout=0.2) as client:
            assert await told(client) == WELL
            real, driver.thread = driver.thread, Still(driver.thread)
            try:
                own.check_health()
                await asyncio.sleep(0.3)
                status, text, ping, found = await told(client)
                assert (status, ping, found) == (503, 503, {"stuck"}), found
                assert re.match(r"engine is stuck: a step of the engine has not ended for \d+ s, longer than 0.2 s; ", text)
                with pytest.raises(EngineStuckError):
                    own.check_health(0.1)
                own.check_health()  # the default is minutes
            finally:
                driver.thread = real
            assert await told(client) == WELL

    asyncio.run(main())


def test_an_idle_engine_is_never_stuck(own):
    for _ in range(3):
        own.check_health(0.5)
        time.sleep(0.3)


def test_a_job_that_does_not_end(own):
    gate = threading.Event()

    class Job:
        def run(self):
            gate.wait(60)

        def fail(self, error):
            raise AssertionError(error)

    async def main():
        async with client_of(own, stuck_timeout=0.2) as client:
            queue = own._driver.jobs.of(1 << 30)
            for _ in range(queue._max_threads):
                queue.put(Job())
            assert (await told(client))[0] == 200
            await asyncio.sleep(0.3)
            status, text, ping, _ = await told(client)
            assert (status, ping) == (503, 503) and "the text of a request is being tokenised for" in text
            gate.set()
            while own._driver.jobs:
                await asyncio.sleep(0.01)
            assert await told(client) == WELL

    asyncio.run(main())


def test_an_update_that_stays_open(own, model):
    tensors = load_file(model / "model.safetensors")

    async def main():
        async with client_of(own, stuck_timeout=0.2) as client:
            async with own.begin_update() as update:
                await update.write_all(tensors)
                assert (await told(client))[0] == 200
                await asyncio.sleep(0.3)
                status, text, _, found = await told(client)
                assert status == 503 and "a weight update is open for" in text and "commit or abort it" in text
                assert found == {"updating", "stuck"}
            assert await told(client) == WELL
            assert len((await own.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))).outputs[0].token_ids) == 2

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_requests_that_a_server_cuts_off_at_its_end_get_an_error(own, path, stream):
    app = build_app(own)
    bodies = {"/v1/completions": ASK, "/v1/responses": {"input": "hi"}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "model": find_service(app).names[0]}
    body = {**bodies.get(path, chat), "stream": stream}

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            await own.pause("keep")
            request = asyncio.ensure_future(client.post(path, json=body))
            while not own.stats().num_unfinished:
                await asyncio.sleep(0.01)
            find_service(app).is_draining = True
            find_service(app).end_requests()
            answer = await asyncio.wait_for(request, 60)
            assert "the server is shutting down" in answer.text
            assert answer.status_code == (200 if stream else 503)
            if stream:
                assert "error" in answer.text and answer.headers["content-type"].startswith("text/event-stream")
            else:
                assert answer.json()["error"]["message"] == "the server is shutting down"

    asyncio.run(main())
