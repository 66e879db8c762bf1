"""The table of limits: the page shows it, and each row holds on every path that it names."""

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from llmpy import ConfigError
from llmpy.cli import main
from llmpy.server import build_app, limits, requests
from llmpy.server.batch import call
from llmpy.server.limits import LIMITS, most
from llmpy.server.middleware import BodyTooLong, _Limited
from llmpy.server.service import Options

ROOT = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "hello"}]
TALKS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions/render": {"prompt": "hello"},
    "/v1/chat/completions/render": {"messages": HELLO},
}
IDS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
SAMPLING = {
    "n": (129, "wanted at most 128 samples, have 129"),
    "stop": (["x"] * 17, "wanted at most 16 strings, have 17"),
    "bad_words": (["x"] * 129, "wanted at most 128 strings, have 129"),
    "logit_bias": ({str(i): 0.0 for i in range(305)}, "wanted at most 304 ids, have 305"),
    "stop_token_ids": ([1] * 305, "wanted at most 304 ids, have 305"),
    "allowed_token_ids": ([1] * 305, "wanted at most 304 ids, have 305"),
}
LONG_STRINGS = {"stop": "x" * 257, "bad_words": ["é" * 129]}


def ask(app, path, body):
    status, content = asyncio.run(call(app, path, msgspec.json.encode(body)))
    return status, json.loads(content)


@pytest.fixture(scope="module")
def app(engine):
    assert engine._frontend.vocab_size == 304
    return build_app(engine)


def refused(app, path, body):
    status, made = ask(app, path, body)
    assert status == 400, made
    return made["error"]["message"]


def test_the_page_shows_the_table():
    assert limits.table() in (ROOT / "docs/use/server.md").read_text()


def test_every_row_of_a_field_exists():
    used = {row for rows in limits.FIELDS.values() for row, _ in rows}
    assert used <= LIMITS.keys()
    for row in LIMITS.values():
        assert row.scope in ("request", "connection", "server") and row.what


@pytest.mark.parametrize("path", TALKS)
@pytest.mark.parametrize("field", SAMPLING)
def test_sampling_fields(app, path, field):
    value, message = SAMPLING[field]
    assert refused(app, path, {**TALKS[path], field: value}) == f"{field}: {message}"


@pytest.mark.parametrize("field", SAMPLING)
def test_sampling_fields_of_ids(app, field):
    value, message = SAMPLING[field]
    params = {**IDS["sampling_params"], field: value}
    assert refused(app, "/inference/v1/generate", {**IDS, "sampling_params": params}) == f"sampling_params.{field}: {message}"


@pytest.mark.parametrize("field", LONG_STRINGS)
def test_strings_have_so_many_bytes(app, field):
    message = f"{field}: wanted at most 256 bytes a string, have {258 if field == 'bad_words' else 257}"
    for path, body in TALKS.items():
        assert refused(app, path, {**body, field: LONG_STRINGS[field]}) == message
    params = {**IDS["sampling_params"], field: LONG_STRINGS[field]}
    assert refused(app, "/inference/v1/generate", {**IDS, "sampling_params": params}) == f"sampling_params.{message}"


def test_further_fields(app):
    names = {"model": "/v1/completions", "request_id": "/v1/chat/completions", "cache_salt": "/inference/v1/generate"}
    for name, path in names.items():
        body = {**(IDS if "inference" in path else TALKS[path]), name: "x" * 1025}
        assert refused(app, path, body) == f"{name}: wanted at most 1024 characters, have 1025"
    assert "at most 1048576 ids, have 1048577" in refused(app, "/detokenize", {"tokens": [1] * (most("detokenize") + 1)})
    stops = {"messages": HELLO, "max_tokens": 1, "stop_sequences": ["a"] * 17}
    assert "stop_sequences: wanted at most 16 strings, have 17" in str(ask(app, "/v1/messages", stops))
    sequences = {**IDS, "sampling_params": {"max_tokens": 1, "bad_token_ids": [[1] * 65]}}
    assert refused(app, "/inference/v1/generate", sequences).startswith("sampling_params.bad_token_ids: wanted at most 256")


def test_what_is_allowed_is_taken(app):
    body = {
        **TALKS["/v1/completions"],
        "stop": ["x" * 256] * 16,
        "bad_words": ["x" * 256] * 128,
        "n": 128,
        "logit_bias": {str(i): 0.0 for i in range(300)},
        "user": "x" * 1024,
    }
    assert ask(app, "/v1/completions", body)[0] == 200
    params = {"max_tokens": 1, "stop": ["x"] * 16, "bad_words": ["x"] * 128, "allowed_token_ids": list(range(300))}
    assert ask(app, "/inference/v1/generate", {**IDS, "sampling_params": params})[0] == 200


TEXT_PATHS = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "plain": lambda text: {"prompt": text, "max_tokens": 1, "add_special_tokens": False},
    "/v1/completions/render": lambda text: {"prompt": [text]},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/chat/completions/render": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/embeddings": lambda text: {"input": text},
    "plain embeddings": lambda text: {"input": text, "add_special_tokens": False},
    "/score": lambda text: {"text_1": text, "text_2": text},
    "/tokenize": lambda text: {"prompt": text},
}
PATHS = {"plain": "/v1/completions", "plain embeddings": "/v1/embeddings"}


@pytest.mark.parametrize("name", TEXT_PATHS)
def test_text_that_cannot_fit_is_not_tokenised(app, tokenizing, name):
    text = "hello " * 100_000
    status, made = ask(app, PATHS.get(name, name), TEXT_PATHS[name](text))
    assert status == 400 and "bytes of text) is longer than the maximum model length of 16384" in made["error"]["message"], made
    assert [call for call, _ in tokenizing if call.startswith("encode")] == []


def test_ids_that_cannot_fit(app):
    message = "The prompt (length 16385) is longer than the maximum model length of 16384."
    for prompt in ([1] * 16385, [[1], [1] * 16385]):
        assert message in refused(app, "/v1/completions", {"prompt": prompt})
    assert message in refused(app, "/inference/v1/generate", {**IDS, "token_ids": [1] * 16385})
    assert message in refused(app, "/v1/embeddings", {"input": [1] * 16385})


# ---- bodies ----------------------------------------------------------------------------------------------------------


class Server:
    """The attributes of a server that _Limited uses."""

    def __init__(self, most):
        self.options = Options(max_body_bytes=most)
        self.body_bytes = 0


def limited(service, parts):
    """A _Limited reader of a body with these parts."""
    left = [*parts]

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return _Limited(receive, {"headers": []}, service)


def take(reader, times):
    async def run():
        for _ in range(times):
            await reader()

    asyncio.run(run())


def test_short_bodies_do_not_count():
    service = Server(1 << 20)
    service.body_bytes = 8 << 20  # other requests hold the whole budget
    take(limited(service, [b"x" * 32768] * 2), 2)
    assert service.body_bytes == 8 << 20
    long = limited(service, [b"x" * 32768] * 3)
    with pytest.raises(Exception, match="too many long bodies"):
        take(long, 3)
    long.end()
    assert service.body_bytes == 8 << 20
    with pytest.raises(BodyTooLong):
        take(limited(Server(65536), [b"x" * 65536, b"x"]), 2)


def head(length):
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length


def test_short_requests_are_served_beside_long_bodies_that_do_not_come(serve, http, wait_until, monkeypatch):
    monkeypatch.setattr(requests, "PROGRESS_S", 600.0)
    running = serve(max_body_bytes=1 << 20)
    service = running.server.config.app._service
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            one.sendall(head(1 << 20) + b" " * ((1 << 20) - 1))
        wait_until(lambda: service.body_bytes == 8 * ((1 << 20) - 1))
        for _ in range(20):
            made = http.post(f"{running.url}/v1/completions", json={"prompt": "hello", "max_tokens": 1})
            assert made.status_code == 200, made.text


def test_a_body_has_as_long_as_it_goes_on(serve, http, monkeypatch):
    """A slow body that makes progress may take longer than a stalled body."""
    monkeypatch.setattr(requests, "PROGRESS_S", 1.0)
    monkeypatch.setattr(limits, "LONG_BYTES", 1000)
    running = serve()
    body = b'{"prompt": "hello", "max_tokens": 1, "user": "' + b"x" * 900 + b'"}' + b" " * 7000
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as one:
        one.sendall(head(len(body)))
        for start in range(0, len(body), 1000):
            one.sendall(body[start : start + 1000])
            asyncio.run(asyncio.sleep(0.3))
        assert one.recv(4096).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as one:
        one.sendall(head(len(body)) + body[:1500])
        assert b" 408 " in one.recv(4096)


# ---- templates from requests -----------------------------------------------------------------------------------------

TEMPLATES = [
    "{{ 9**(9**9) }}",
    "{{ 'x' * 200000000 }}",
    "{{ [1] * 100000000 }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{% for i in range(10000) %}{{ 'x' * 10000 }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_from_a_request_is_bounded(engine, template):
    app = build_app(engine, allow_request_template=True)
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        assert "chat template" in refused(app, path, {"messages": HELLO, "max_tokens": 1, "chat_template": template})


def test_a_template_from_a_request(engine, tokenizing):
    app = build_app(engine, allow_request_template=True)
    body = {"messages": HELLO, "max_tokens": 1, "chat_template": "{{ messages[0].content }}!"}
    assert ask(app, "/v1/chat/completions", body)[0] == 200
    rendered = [thread for name, thread in tokenizing if name == "apply_chat_template"]
    assert rendered and threading.main_thread() not in rendered
    message = refused(app, "/v1/chat/completions", {**body, "chat_template": "x" * 65537})
    assert message == "chat_template: wanted at most 65536 characters, have 65537"
    assert "--allow-request-template" in refused(build_app(engine), "/v1/chat/completions", body)


# ---- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_body_bytes", -5), ("max_body_bytes", 0), ("stream_timeout", float("nan")), ("stream_timeout", 0.0),
     ("stream_timeout", float("inf")), ("shutdown_timeout", -1.0), ("shutdown_timeout", float("nan")), ("keep_responses", -1),
     ("stuck_timeout", 0.0), ("stuck_timeout", float("nan"))],
)  # fmt: skip
def test_options_that_make_no_sense(option, value):
    with pytest.raises(ConfigError, match=f"{option}: wanted .* or more .*, have {value}") as caught:
        Options(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize(
    "words", [["--max-connections", "0"], ["--max-body-bytes", "-5"], ["--stream-timeout", "nan"], ["--shutdown-timeout", "-1"]]
)
def test_they_are_refused_before_the_model_is_loaded(capsys, words):
    assert main(["serve", "no/model", *words]) == 1
    told = capsys.readouterr().err
    assert words[0].strip("-").replace("-", "_") in told and "no/model" not in told
