"""Long texts are rendered and tokenised on threads, so that one request's prompt does not delay other requests' tokens."""

import asyncio
import threading
import time

import msgspec
import pytest

from llmpy.server import build_app, generate, logprobs, service
from llmpy.server.batch import call
from llmpy.text import bounds

LONG = "hello " * 2000
TOOLS = [{"type": "function", "function": {"name": "f", "description": LONG}}]
HELLO = [{"role": "user", "content": "hello"}]
CALLING = {"id": "c", "type": "function", "function": {"name": "f", "arguments": msgspec.json.encode({"x": LONG}).decode()}}
ASKS = {
    "completions": ("/v1/completions", {"prompt": LONG, "max_tokens": 1}),
    "plain": ("/v1/completions", {"prompt": LONG, "max_tokens": 1, "add_special_tokens": False}),
    "render": ("/v1/completions/render", {"prompt": [LONG]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
    "tools": ("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "max_tokens": 1}),
    "arguments": ("/v1/chat/completions/render", {"messages": [{"role": "assistant", "tool_calls": [CALLING]}, *HELLO]}),
    "responses": ("/v1/responses", {"input": LONG, "max_output_tokens": 1}),
    "anthropic": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    "embeddings": ("/v1/embeddings", {"input": ["hello", LONG]}),
    "plain embeddings": ("/v1/embeddings", {"input": LONG, "add_special_tokens": False}),
    "rerank": ("/rerank", {"query": "hello", "documents": [LONG]}),
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "tokenize tools": ("/tokenize", {"messages": HELLO, "tools": TOOLS}),
    "detokenize": ("/detokenize", {"tokens": [5] * 20_000}),
}


@pytest.mark.parametrize("ask", ASKS)
def test_long_texts(engine, tokenizing, ask):
    app = build_app(engine)
    path, body = ASKS[ask]
    status, content = asyncio.run(call(app, path, msgspec.json.encode(body)))
    assert status == 200, content
    heavy = [(name, thread) for name, thread in tokenizing if name != "decode" or ask == "detokenize"]
    assert heavy and all(thread is not threading.main_thread() for _, thread in heavy), heavy


SAMPLED = {"max_tokens": 3, "stream": False}
CHATTED = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **SAMPLED}
RESPONDED = {"input": "hello", "max_output_tokens": 3, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
GIVEN = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}}
WRITTEN = {
    "completions": ("/v1/completions", {"prompt": "hello", "logprobs": 2, "echo": True, **SAMPLED}),
    "chat": ("/v1/chat/completions", CHATTED),
    "responses": ("/v1/responses", RESPONDED),
    "generate": ("/inference/v1/generate", GIVEN),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", WRITTEN)
def test_many_logprobs_are_written_beside(engine, monkeypatch, ask, stream):
    """A client that reads slowly gets hundreds of tokens at once, and an answer that is not streamed has them all."""
    threads = []
    split = logprobs.finite

    def finite(value):
        threads.append(threading.current_thread())
        return split(value)

    for module in (logprobs, generate):
        monkeypatch.setattr(module, "finite", finite)
    monkeypatch.setattr(service, "LOGPROB_SIZE", service.THREAD_SIZE + 1)
    path, body = WRITTEN[ask]
    status, content = asyncio.run(call(build_app(engine), path, msgspec.json.encode({**body, "stream": stream})))
    assert status == 200, content
    assert len(threads) > 3 and threading.main_thread() not in threads


HUGE = "hello there, " * 100_000
USER = [{"role": "user", "content": HUGE}]
WORDS = ["word" * 60 + str(number) for number in range(128)]
TEMPLATE = "{% for i in range(150000) %}{{ i * i }}{% endfor %}"
HUGE_ASKS = {
    "completions": ("/v1/completions", {"prompt": HUGE, "max_tokens": 1}),
    "plain": ("/v1/completions", {"prompt": HUGE, "max_tokens": 1, "add_special_tokens": False}),
    "completions render": ("/v1/completions/render", {"prompt": [HUGE]}),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 1}),
    "chat render": ("/v1/chat/completions/render", {"messages": USER}),
    "responses": ("/v1/responses", {"input": HUGE, "max_output_tokens": 1}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 1}),
    "count tokens": ("/v1/messages/count_tokens", {"messages": USER}),
    "embeddings": ("/v1/embeddings", {"input": HUGE}),
    "plain embeddings": ("/v1/embeddings", {"input": HUGE, "add_special_tokens": False}),
    "score": ("/score", {"text_1": "hello", "text_2": HUGE}),
    "rerank": ("/rerank", {"query": "hello", "documents": [HUGE]}),
    "tokenize": ("/tokenize", {"prompt": HUGE}),
    "tokenize chat": ("/tokenize", {"messages": USER}),
    "detokenize": ("/detokenize", {"tokens": [5] * 1_000_000}),
    "bad words": ("/v1/completions", {"prompt": "hello", "max_tokens": 1, "bad_words": WORDS}),
    "stop": ("/v1/completions", {"prompt": "hello", "max_tokens": 1, "stop": WORDS[:16]}),
    "ids": ("/v1/completions", {"prompt": [[1] * 10_000] * 200, "max_tokens": 1}),
    "template": ("/v1/chat/completions/render", {"messages": HELLO, "chat_template": TEMPLATE}),
    "many messages": ("/v1/chat/completions/render", {"messages": HELLO * 5_000}),
}


async def with_stall(app, path, content):
    """Status of an answer, its duration in seconds, and the longest stall of the event loop."""
    stall, ends = 0.0, False

    async def tick():
        nonlocal stall
        last = time.perf_counter()
        while not ends:
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            stall, last = max(stall, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    begun = time.perf_counter()
    status, _ = await call(app, path, content)
    took = time.perf_counter() - begun
    ends = True
    await ticking
    return status, took, stall


@pytest.mark.parametrize("ask", HUGE_ASKS)
def test_nothing_stands_still_while_a_huge_text_is_worked_on(engine, longest_stall, monkeypatch, ask):
    """No path stalls the event loop or another thread, although no text is refused by its length."""
    monkeypatch.setattr(bounds, "USUAL_CHARS", len(HUGE))
    app = build_app(engine, allow_request_template=True)
    path, body = HUGE_ASKS[ask]
    content = msgspec.json.encode(body)
    found = []
    for _ in range(5):  # what holds the GIL does so each time, other work on a busy machine does not
        with longest_stall() as of_threads:
            status, took, of_loop = asyncio.run(with_stall(app, path, content))
        assert status in (200, 400, 429)
        found.append((of_threads.seconds, of_loop, took))
        if max(of_threads.seconds, of_loop) < max(0.35, 0.35 * took):
            return
    pytest.fail(f"stalls of threads and of the loop, and the time of the call: {found}")
