"""Checks of callers: origins of pages, names of hosts, ambiguous request heads, ids, names."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmpy.server import build_app
from llmpy.server.errors import for_clients
from llmpy.server.strict_head import Strict, strict

BODY = {"prompt": "hello", "max_tokens": 2}
PATH = "/v1/completions"


# ---- origins and hosts -----------------------------------------------------------------------------------------------


def test_pages_of_other_origins_are_refused(serve, http):
    server = serve(cors_origins=("https://good.example",))
    for origin in ("https://evil.example", "null", "https://good.example.evil", "http://127.0.0.1:1", "http://good.example"):
        for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/")):
            headers = {"origin": origin, "content-type": "text/plain"}
            response = http.request(method, server.url + path, json=BODY, headers=headers)
            assert response.status_code == 403 and "--cors-origin" in response.json()["error"]["message"], (origin, path)
    for origin in (server.url, "https://good.example", f"http://127.0.0.1:{server.port}"):
        assert http.post(server.url + PATH, json=BODY, headers={"origin": origin}).status_code == 200
    assert http.get(f"{server.url}/health", headers={"origin": "https://evil.example"}).status_code == 200
    allowed = http.post(server.url + PATH, json=BODY, headers={"origin": "https://good.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    anyone = serve(cors_origins=("*",)).url
    assert http.post(anyone + PATH, json=BODY, headers={"origin": "https://evil.example"}).status_code == 200


def test_names_that_dns_may_point_here_are_refused(serve, http):
    server = serve()
    evil = ("evil.example", f"evil.example:{server.port}", "localhost.evil.example", "127.0.0.1.evil.example", "x@evil.example")
    for name in evil:
        for origin in ({}, {"origin": f"http://{name}"}):
            response = http.get(f"{server.url}/v1/models", headers={"host": name, **origin})
            assert response.status_code == 403 and "--api-key-file" in response.json()["error"]["message"], name
    local = ("localhost", "LOCALHOST:80", "[::1]:8000", "127.0.0.1", "127.0.0.2", "0.0.0.0", "a.localhost", "box")
    for name in (*local, "host.docker.internal", socket.gethostname()):
        assert http.get(f"{server.url}/v1/models", headers={"host": name}).status_code == 200, name
    assert http.get(f"{server.url}/health", headers={"host": "evil.example"}).status_code == 200
    keyed = {"authorization": "Bearer one", "host": "llm.example"}
    assert http.get(f"{serve(api_keys=('one',)).url}/v1/models", headers=keyed).status_code == 200


def test_an_address_beyond_this_machine_has_any_name(engine):
    async def status(address):
        transport = httpx.ASGITransport(app=build_app(engine), client=("10.0.0.7", 5))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{address}") as client:
            return (await client.get("/v1/models", headers={"host": "llm.example"})).status_code

    assert asyncio.run(status("10.0.0.1")) == 200 and asyncio.run(status("127.0.0.1")) == 403


# ---- heads -----------------------------------------------------------------------------------------------------------

BOTH = b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
HEADS = {
    "both lengths": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + BOTH, 400),
    "bare line feeds": (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
    "one bare line feed": (b"GET /health HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n", 400),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "no host in 1.0": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "as it should be": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 200),
}
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("implementation", ["h11", "httptools"])
@pytest.mark.parametrize("name", HEADS)
def test_heads(serve, implementation, name):
    pytest.importorskip(implementation)
    head, status = HEADS[name]
    server = serve(config=[("http", strict(H11Protocol) if implementation == "h11" else "httptools")])
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(20)
        raw.sendall(head + SMUGGLED)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert (b'"version"' in answer) == (status == 200 and b"1.0" not in head), answer


def test_a_head_that_comes_in_pieces_is_looked_at_whole(serve):
    server = serve(config=[("http", Strict)])
    for pieces, status in (
        ((b"GET /health HTTP/1.1\r", b"\nHost: x\r\n", b"\r\n"), 200),
        ((b"GET /health HTTP/1.1\r\nHost: x", b"\n\r\n"), 400),
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.settimeout(20)
            for piece in pieces:
                raw.sendall(piece)
            assert raw.recv(65536).startswith(b"HTTP/1.1 %d " % status)


# ---- statuses, codes, names, ids -------------------------------------------------------------------------------------


def test_headers_of_refusals(serve, http, client):
    assert http.get(f"{serve(api_keys=('one',)).url}/v1/models").headers["www-authenticate"] == "Bearer"
    response = client.get(PATH)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert client.get("/health/", headers={"host": "localhost"}).status_code == 404


def test_codes_are_those_of_the_protocol(serve, http, client):
    def code(**body):
        return client.post(PATH, json={**BODY, **body}).json()["error"]["code"]

    assert code(model="other") == "model_not_found" and code(top_p=7) is None
    assert code(prompt=[1] * 20000) == "context_length_exceeded" and code(max_tokens=10**6) == "context_length_exceeded"
    assert http.get(f"{serve(api_keys=('one',)).url}/v1/models").json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        (PATH, "max_tokens", {"prompt": "hello"}),
        ("/v1/chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", "max_output_tokens", {"input": "hello"}),
        ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_have_to_fit(client, engine, path, name, body, stream):
    most = engine.config.max_model_len
    response = client.post(path, json={**body, name: most, "stream": stream})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and f"Lower {name} to at most " in message and "raise --max-model-len" in message
    fitting = int(message.partition("to at most ")[2].partition(",")[0])
    assert 0 < fitting < most
    response = client.post(path, json={**body, name: fitting if path == PATH else 1})
    assert response.status_code == 200, response.text


def test_errors_speak_of_http(client):
    told = {
        "echo": {"max_tokens": 0},
        "--max-logprobs": {"logprobs": 1000},
        "unknown key 'colour'; use one of json, regex": {"structured_outputs": {"colour": 1}},
    }
    for words, body in told.items():
        response = client.post(PATH, json={**BODY, **body})
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and words in message, message
        assert "score()" not in message and "__init__" not in message
    dump = "structured_outputs: no way on\n<state>\nTokens: 1 2 3\n</state>"
    assert for_clients(dump) == "structured_outputs: no way on"


def test_an_id_may_come_twice(client, paused, wait_until, engine):
    def ask(path, **body):
        return client.post(path, json=body, headers={"x-request-id": "same"})

    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with ThreadPoolExecutor(4) as pool:
        with paused():
            asked = [pool.submit(ask, PATH, **BODY), pool.submit(ask, PATH, **BODY)]
            asked += [pool.submit(ask, "/v1/chat/completions", **talk), pool.submit(ask, "/v1/messages", **talk)]
            wait_until(lambda: engine.stats().num_unfinished == 4)
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.json()["id"] for answer in answers] == ["cmpl-same", "cmpl-same", "chatcmpl-same", "msg_same"]
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}


def test_the_models_file_is_no_name(engine):
    async def answers():
        transport = httpx.ASGITransport(app=build_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            models = await client.get("/v1/models")
            made = [await client.post(PATH, json={**BODY, "model": name}) for name in (engine.name, str(engine.config.model))]
            return models, made, await client.post(PATH, json={**BODY, "model": "other"}), await client.get("/metrics")

    models, made, refused, metrics = asyncio.run(answers())
    assert [model["id"] for model in models.json()["data"]] == [engine.name]
    assert [answer.json()["model"] for answer in made] == [engine.name] * 2
    for answer in (models, *made, refused, metrics):
        assert str(engine.config.model) not in answer.text


def test_a_served_name_hides_the_model(client, engine):
    text = client.get("/v1/models").text
    assert engine.name not in text and str(engine.config.model) not in text
    assert client.post(PATH, json={**BODY, "model": engine.name}).status_code == 404
    listed = client.get("/v1/models").json()
    assert listed["first_id"] == "tiny" and listed["has_more"] is False and listed["data"][0]["type"] == "model"


# ---- fields that say nothing here ------------------------------------------------------------------------------------


def test_fields_of_openai_are_null_rather_than_missing(client, frames):
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True, "logprobs": True}
    for made in (client.post("/v1/chat/completions", json=talk).json(), client.post(PATH, json=BODY).json()):
        assert made["system_fingerprint"] is None and made["service_tier"] is None
    choice = client.post("/v1/chat/completions", json=talk).json()["choices"][0]
    assert choice["message"]["refusal"] is None and choice["logprobs"]["refusal"] is None
    for path, body in (("/v1/chat/completions", talk), (PATH, {**BODY, "ignore_eos": True})):
        *parts, last = frames(path, **body, stream_options={"include_usage": True})
        assert parts and all(part["usage"] is None and part["system_fingerprint"] is None for part in parts)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
        assert all("usage" not in part for part in frames(path, **body))


# ---- Anthropic's protocol --------------------------------------------------------------------------------------------


def test_a_prefill_is_continued(client):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello the"}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    made = client.post("/v1/messages", json=body).json()
    chat = client.post("/v1/chat/completions", json={**body, "continue_final_message": True}).json()
    assert made["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert made["usage"]["input_tokens"] + made["usage"]["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert counted == chat["usage"]["prompt_tokens"]


def test_an_aborted_answer_says_so(client, engine, wait_until, paused):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16000}
    for stream in (False, True):
        with ThreadPoolExecutor(1) as pool:
            with paused():  # it cannot end by itself meanwhile
                asked = pool.submit(client.post, "/v1/messages", json={**body, "stream": stream})
                wait_until(lambda: engine.stats().num_unfinished)
                asyncio.run(engine.abort())
            assert '"stop_reason":"pause_turn"' in asked.result().text


def test_an_answer_of_a_schema(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
    for field in ({"output_config": {"format": form}}, {"output_format": form}):
        text = client.post("/v1/messages", json={**body, **field}).json()["content"][0]["text"]
        assert text.translate(str.maketrans("", "", " \n\t\r")) == '{"a":1}', text
    assert client.post("/v1/messages", json={**body, "output_format": {"type": "xml"}}).status_code == 400
