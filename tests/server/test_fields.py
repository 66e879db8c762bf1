"""Fields that a path does not support: refused by name if they would change the answer, else listed in a header."""

import asyncio

import msgspec
import pytest

from llmpy import AsyncEngine, UnsupportedError
from llmpy.server import build_app
from llmpy.server.app import POST
from llmpy.server.batch import call
from llmpy.server.fields import POOLED, TEXT, UNSUPPORTED
from llmpy.server.openapi import BODIES
from llmpy.server.protocol import MessagesRequest

TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TEXT_BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": TALK,
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": TALK,
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/v1/completions/render": {"prompt": "hello"},
    "/v1/chat/completions/render": TALK,
    "/v1/messages/count_tokens": TALK,
}
POOLED_BODIES = {
    "/v1/embeddings": {"input": "hello"},
    "/pooling": {"input": "hello", "task": "embed"},
    "/score": {"text_1": "hello", "text_2": "you"},
    "/rerank": {"query": "hello", "documents": ["you"]},
}
OTHERS = {"/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [1]}}
CLASSIFY = {"/classify": {"input": "hello"}}  # the model of these tests has no classes

CHANGING = {
    "logits_processors": ["x"],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
    "thinking_token_budget": 5,
    "mm_processor_kwargs": {"a": 1},
    "vllm_xargs": {"a": 1},
    "lora_request": "x",
    "truncate_prompt_tokens": 1,
    "logprob_token_ids": [1],
    "guided_regex": "a",
    "guided_whitespace_pattern": "a",
    "repeat_penalty": 1.3,
    "mirostat": 2,
    "typical_p": 0.5,
    "suffix": "x",
}
BEAMS = {"use_beam_search": True, "length_penalty": 2.0, "early_stopping": True}
ELSEWHERE = {
    "/v1/completions": {"messages": TALK["messages"], "tools": [{}], "max_completion_tokens": 3, "reasoning_effort": "low"},
    "/v1/chat/completions": {"best_of": 4, "echo": True, "prompt": "x", "add_special_tokens": True},
    "/v1/responses": BEAMS
    | {"kv_transfer_params": {"do_remote_decode": True}}
    | {"n": 2, "max_tokens": 3, "bad_words": ["a"], "response_format": {"type": "json"}, "prompt": {"id": "x"}},
    "/v1/messages": BEAMS | {"n": 2, "stop": ["a"], "seed": 1, "logit_bias": {"5": 1}, "mcp_servers": [{}], "min_p": 0.5},
    "/inference/v1/generate": BEAMS | {"temperature": 0.5, "stop": ["a"]},
    "/v1/messages/count_tokens": BEAMS,
}
NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "logits_processors": [],
    "functions": None,
    "function_call": "auto",
    "modalities": ["text"],
    "mm_processor_kwargs": {},
    "repeat_penalty": 1,
    "truncate_prompt_tokens": None,
    "guided_json": None,
    "n": 1,
    "echo": False,
    "best_of": 1,
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}
POOLED_CHANGING = {"truncate_prompt_tokens": 3, "messages": TALK["messages"], "embed_dtype": "float16", "lora_request": "x"}


def post(app, path, body):
    status, content = asyncio.run(call(app, path, msgspec.json.encode(body)))
    return status, msgspec.json.decode(content)


@pytest.fixture(scope="module")
def app(engine):
    return build_app(engine)


def refused(app, path, name, body):
    """The message of a refusal that names a field."""
    status, made = post(app, path, body)
    assert status == 400 and name in made["error"]["message"] and path in made["error"]["message"], (path, name, made)
    return made["error"]["message"]


def test_every_path_with_a_body_is_looked_at():
    assert {*TEXT_BODIES, *POOLED_BODIES, *OTHERS, *CLASSIFY} >= {*BODIES} - {"/v1/score", "/v1/rerank", "/v2/rerank"}
    assert {*BODIES} <= {*POST}


@pytest.mark.parametrize("path", TEXT_BODIES)
def test_what_changes_a_text_is_refused(app, path):
    body = TEXT_BODIES[path]
    for name, value in CHANGING.items():
        message = refused(app, path, name, {**body, name: value})
        assert message.partition("; ")[2]
    for name, value in ELSEWHERE.get(path, {}).items():
        refused(app, path, name, {**body, name: value})
    names = {name for name, rule in UNSUPPORTED.items() if {*TEXT} <= {*rule.kinds}}
    for name in names - {*CHANGING}:
        refused(app, path, name, {**body, name: "no such value"})


@pytest.mark.parametrize("path", [*POOLED_BODIES, *CLASSIFY])
def test_what_changes_a_state_is_refused(app, path):
    body = {**POOLED_BODIES, **CLASSIFY}[path]
    for name, value in POOLED_CHANGING.items():
        refused(app, path, name, {**body, name: value})
    assert all(name in UNSUPPORTED and {*POOLED} <= {*UNSUPPORTED[name].kinds} for name in POOLED_CHANGING)


def test_what_changes_ids_is_refused(app):
    for name, value in {"truncate_prompt_tokens": 1, "chat_template": "x", "documents": [{}], "lora_request": "x"}.items():
        refused(app, "/tokenize", name, {**OTHERS["/tokenize"], name: value})
    status, made = post(app, "/tokenize", {"messages": TALK["messages"], "add_special_tokens": True})
    assert status == 400 and made["error"]["param"] == "add_special_tokens"


@pytest.mark.parametrize("path", TEXT_BODIES)
def test_values_that_change_nothing_pass(client, path):
    own = MessagesRequest.__struct_fields__ if "/messages" in path else ()  # there tool_choice is an object
    body = {**TEXT_BODIES[path], **{name: value for name, value in NEUTRAL.items() if name not in own}}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-llmpy-ignored" not in response.headers


@pytest.mark.parametrize("path", [*TEXT_BODIES, *POOLED_BODIES, *OTHERS])
def test_harmless_fields_are_told(client, path):
    body = {**TEXT_BODIES, **POOLED_BODIES, **OTHERS}[path]
    response = client.post(path, json={**body, "colour": "red", "prediction": {"content": "x"}})
    assert response.status_code == 200, response.text
    assert response.headers["x-llmpy-ignored"] == "colour, prediction"


def test_sampling_params_of_ids(client):
    path, ids = "/inference/v1/generate", {"token_ids": [1, 2]}
    for name, value in {"length_penalty": 2.0, "truncate_prompt_tokens": 3, "messages": [1], "logprob_token_ids": [1]}.items():
        response = client.post(path, json={**ids, "sampling_params": {name: value}})
        assert response.status_code == 400 and name in response.json()["error"]["message"]
    trainer = {"max_tokens": 1, "guided_decoding": None, "length_penalty": 1.0, "_real_n": None, "skip_clone": False}
    response = client.post(path, json={**ids, "sampling_params": trainer})
    assert response.status_code == 200
    assert response.headers["x-llmpy-ignored"] == "sampling_params._real_n, sampling_params.skip_clone"


def test_prompt_logprobs_and_streams_exclude_each_other(client):
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = client.post(path, json={**TEXT_BODIES[path], "stream": True, "prompt_logprobs": 1})
        assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"


# ---- what a template does not read -----------------------------------------------------------------------------------

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, write_model):
    """An engine with a chat template that reads neither tools nor documents."""
    model = write_model(tmp_path_factory.mktemp("plain"))
    with_template = AsyncEngine(model, device="cpu", kv_cache_memory_bytes="16MiB", chat_template=PLAIN)
    yield with_template
    with_template.close()


def test_tools_that_the_template_drops_are_refused(plain):
    app = build_app(plain)
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    asked = {
        "/v1/chat/completions": {**TALK, "tools": TOOLS},
        "/v1/chat/completions/render": {**TALK, "tools": TOOLS},
        "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": "weather", "parameters": {}}]},
        "/v1/messages": {**TALK, "tools": [tool]},
        "/v1/messages/count_tokens": {**TALK, "tools": [tool]},
        "/tokenize": {"messages": TALK["messages"], "tools": TOOLS},
    }
    for path, body in asked.items():
        status, made = post(app, path, body)
        assert status == 400 and "does not read tools" in made["error"]["message"], (path, made)
        assert PLAIN[:20] in made["error"]["message"]
    status, made = post(app, "/v1/chat/completions", {**TALK, "documents": [{"title": "a", "text": "b"}]})
    assert status == 400 and "does not read documents" in made["error"]["message"]
    for body in ({**TALK, "tools": []}, {**TALK, "tools": TOOLS, "tool_choice": "none"}):
        assert post(app, "/v1/chat/completions", body)[0] == 200


def test_tools_in_python(plain, engine):
    with pytest.raises(UnsupportedError, match=r"tools: the chat template that begins .* does not read tools"):
        plain.chat(TALK["messages"], tools=TOOLS)

    async def prompt():
        return (await engine.chat(TALK["messages"], tools=TOOLS, max_tokens=1)).prompt

    assert "weather" in asyncio.run(prompt())


def test_variables_that_the_template_does_not_read_are_told(client):
    body = {**TALK, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-llmpy-ignored"] == "chat_template_kwargs.enable_thinking, reasoning_effort"
    response = client.post("/v1/messages", json={**TALK, "thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert response.headers["x-llmpy-ignored"] == "thinking"


# ---- messages without content ----------------------------------------------------------------------------------------


def test_the_turn_behind_a_call_may_lack_content(client):
    call_ = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "assistant", "tool_calls": [call_]}
    rest = {"role": "tool", "tool_call_id": "a", "content": "rain"}
    answers = []
    for message in (asked, {**asked, "content": None}, {**asked, "content": ""}):
        messages = [*TALK["messages"], message, rest]
        response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "temperature": 0})
        assert response.status_code == 200, response.text
        answers.append((response.json()["choices"][0]["message"], response.json()["usage"]["prompt_tokens"]))
    assert answers[0] == answers[1] == answers[2]


EMPTY = ({"role": "user", "content": None}, {"role": "user"}, {"role": "assistant", "content": None})


@pytest.mark.parametrize("message", EMPTY)
def test_other_messages_want_content(client, plain, message):
    messages = [*TALK["messages"], message]
    for path in ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"):
        response = client.post(path, json={"messages": messages})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "messages", error
        assert "messages[1]" in error["message"] and message["role"] in error["message"]
    with pytest.raises(ValueError, match=r"messages\[1\] .* has no content"):
        plain.chat(messages)
