"""Long texts are rendered and tokenised beside the event loop, so that nobody's tokens wait for somebody's prompt."""

import asyncio
import threading

import msgspec
import pytest

from llmpy.server import build_app
from llmpy.server.batch import call

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
