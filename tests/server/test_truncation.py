"""Conversations longer than the context: refused, or without their oldest turns if the request allows it."""

import asyncio

import httpx
import pytest

from llmpy import AsyncEngine
from llmpy.server import build_app

LENGTH = 128
SYSTEM = {"role": "system", "content": "s"}
LAST = {"role": "user", "content": "last"}
TALK = [
    SYSTEM,
    *(m for i in range(6) for m in ({"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "answer"})),
    LAST,
]


@pytest.fixture(scope="module")
def small(tmp_path_factory, write_model):
    model = write_model(tmp_path_factory.mktemp("small"), max_position_embeddings=LENGTH)
    made = AsyncEngine(model, device="cpu", kv_cache_memory_bytes="16MiB")
    yield made
    made.close()


@pytest.fixture
def post(small):
    app = build_app(small)

    def ask(path, **body):
        async def answer():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                return await client.post(path, json=body)

        return asyncio.run(answer())

    return ask


def test_without_it_a_long_talk_is_refused(post):
    for how in ({}, {"truncation": "disabled"}):
        response = post("/v1/chat/completions", messages=TALK, max_tokens=8, **how)
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    response = post("/v1/chat/completions", messages=TALK, truncation="perhaps")
    assert response.status_code == 400 and response.json()["error"]["param"] == "truncation"


@pytest.mark.parametrize("stream", [False, True])
def test_the_oldest_turns_are_dropped(post, stream):
    asked = {"messages": TALK, "max_tokens": 8, "temperature": 0, "truncation": "auto"}
    response = post("/v1/chat/completions", stream=stream, **asked)
    assert response.status_code == 200, response.text
    dropped = int(response.headers["x-llmpy-dropped-messages"])
    assert 0 < dropped < len(TALK) - 2 and dropped % 2 == 0
    kept = [SYSTEM, *TALK[1 + dropped :]]
    tokens = post("/tokenize", messages=kept).json()["count"]
    more = post("/tokenize", messages=[SYSTEM, *TALK[dropped - 1 :]]).json()["count"]
    assert tokens <= LENGTH - 8 < more
    if not stream:
        plain = post("/v1/chat/completions", messages=kept, max_tokens=8, temperature=0)
        assert plain.json()["choices"] == response.json()["choices"] and "x-llmpy-dropped-messages" not in plain.headers
        rendered = post("/v1/chat/completions/render", **asked)
        assert len(rendered.json()["token_ids"]) == tokens == response.json()["usage"]["prompt_tokens"]


def test_responses_know_it_too(post):
    items = [{**message, "type": "message"} for message in TALK]
    response = post("/v1/responses", input=items, truncation="auto")
    assert response.status_code == 200 and response.json()["truncation"] == "auto"
    assert int(response.headers["x-llmpy-dropped-messages"]) > 0
    assert post("/v1/responses", input=items).status_code == 400


def test_a_short_talk_stays(post):
    response = post("/v1/chat/completions", messages=TALK[-3:], max_tokens=4, truncation="auto")
    assert response.status_code == 200 and "x-llmpy-dropped-messages" not in response.headers


def test_one_question_that_is_too_long_is_refused(post):
    talk = [*TALK, {"role": "user", "content": "x" * 300}]
    response = post("/v1/chat/completions", messages=talk, truncation="auto")
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
