"""A router under load while clients go away and a server is killed and comes back: every request ends, nothing is left over."""

import asyncio
import random
import time

import httpx
import pytest

SECONDS, CLIENTS = 20, 32


@pytest.mark.slow
def test_a_storm(model, programs, route, reserve_port, tmp_path):
    port, at = reserve_port(), f"ipc://{tmp_path}"
    events = [["--kv-events-address", f"{at}/{i}", "--kv-events-replay-address", f"{at}/r{i}"] for i in range(2)]
    words = ["serve", model, "--device", "cpu", "--kv-cache-memory-bytes", "1MiB", "--max-model-len", "512"]
    first = programs((*words, *events[0], "--port", port))[0]
    second = programs((*words, *events[1]))[0]
    client = route(first.url, second.url)
    rng, ends = random.Random(5), {}
    deadline = time.monotonic() + SECONDS

    async def one(session):
        """Chats that grow; some are left in the middle."""
        while time.monotonic() < deadline:
            prompt = [rng.randrange(5, 200)] * rng.randrange(1, 200)
            for _ in range(3):
                body = {"prompt": prompt, "max_tokens": rng.randrange(1, 60), "ignore_eos": True, "stream": rng.random() < 0.6}
                try:
                    leaves = rng.random() < 0.2
                    made = await session.post("/v1/completions", json=body, timeout=rng.uniform(0.01, 0.3) if leaves else 60)
                    end = "broken" if "behind the first token" in made.text else made.status_code
                except httpx.TimeoutException:
                    assert leaves
                    end = "left"
                ends[end] = ends.get(end, 0) + 1
                prompt = [*prompt, *rng.choices(range(5, 200), k=20)]

    async def main():
        nonlocal first
        async with httpx.AsyncClient(base_url=client.base_url, limits=httpx.Limits(max_connections=CLIENTS)) as session:
            clients = [asyncio.ensure_future(one(session)) for _ in range(CLIENTS)]
            for _ in range(2):
                await asyncio.sleep(SECONDS / 5)
                first.kill()
                await asyncio.sleep(SECONDS / 10)
                first = await asyncio.to_thread(lambda: programs((*words, *events[0], "--port", port))[0])
            await asyncio.gather(*clients)

    asyncio.run(main())
    assert set(ends) <= {200, "broken", "left", 503} and ends[200] > 50 and ends["left"] > 5, ends
    assert ends.get(503, 0) <= ends[200] / 20, ends  # the other server takes what the killed one had
    deadline = time.monotonic() + 30
    while any(one["running"] or one["problem"] for one in client.get("/load").json()["engines"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for server in (first, second):
        assert httpx.get(f"{server.url}/load").json()["running"] == 0
    metrics = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    gauges = [name for name in metrics if name.startswith(("vllm:num_requests_running{", "vllm:num_prefill_requests{"))]
    assert len(gauges) == 4 and {metrics[name] for name in gauges} == {"0"}
    assert client.post("/v1/completions", json={"prompt": [5] * 40, "max_tokens": 2}).status_code == 200
