"""Rules for every path: keys, limits, names, disconnected clients, shutdown."""

import base64
import socket
import threading

import numpy as np
import pytest

LENGTH = 16384  # of the served model
TALK = {"prompt": "hello", "max_tokens": 16000, "ignore_eos": True, "stream": True}


def test_models(client):
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "same"] and models[0]["max_model_len"] == LENGTH
    assert client.get("/v1/models/same").json()["id"] == "same"
    assert client.get("/v1/models/other").status_code == 404
    response = client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"
    assert client.post("/v1/completions", json={"model": "same", "prompt": "a"}).json()["model"] == "same"


def test_unknown_fields_are_told(client):
    response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "colour": "red", "user": "me"})
    assert response.status_code == 200 and response.headers["x-llmpy-ignored"] == "colour"


def test_request_ids(client):
    response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1" and response.json()["id"] == "cmpl-mine-1"


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000, b""])
def test_bodies_that_are_no_json(client, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"):
        assert client.post(path, content=body).status_code == 400


def test_paths_and_methods(client, until_idle):
    until_idle()
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/completions").json()["error"]["type"] == "method_not_allowed_error"
    for path, feature in {"/generate": "SGLang"}.items():
        response = client.post(path, json={})
        assert response.status_code == 501 and feature in response.json()["error"]["message"]
    assert client.get("/health").status_code == 200 and client.get("/load").json()["running"] == 0
    assert client.get("/version").json()["version"]


def test_tokens(client):
    made = client.post("/tokenize", json={"prompt": "hello there", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == LENGTH
    assert client.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "hello there"}


def test_the_tokenizer_is_told(client, engine):
    told = client.get("/tokenizer_info").json()
    assert told["chat_template"] == engine.tokenizer.chat_template and told["max_model_len"] == LENGTH
    assert told["vocab_size"] == engine.tokenizer.vocab_size and told["eos_token"] == "<|end|>"


def test_embeddings(client, engine):
    body = {"input": ["hello", "you"], "model": "tiny"}
    rows = [np.array(item["embedding"], np.float32) for item in client.post("/v1/embeddings", json=body).json()["data"]]
    packed = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"]
    assert np.array_equal(rows[1], np.frombuffer(base64.b64decode(packed[1]["embedding"]), np.float32))
    assert len(rows) == 2 and rows[0].shape == (64,) and abs(float(rows[0] @ rows[0]) - 1) < 1e-5


def test_a_client_that_leaves_ends_its_request(client, engine, until_idle, wait_until):
    for _ in range(50):  # an answer may have ended before its beginning has come
        with client.stream("POST", "/v1/completions", json=TALK) as response:
            next(response.iter_text())
            is_cut = engine.stats().num_unfinished > 0
        until_idle()
        if is_cut:
            break
    assert is_cut
    aborted = engine.stats().finished["abort"]
    host, port = client.base_url.host, client.base_url.port
    body = b'{"prompt": "hello", "max_tokens": 8000, "ignore_eos": true, "n": 8}'
    with socket.create_connection((host, port)) as raw:  # not streamed: gone before the answer
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: engine.stats().num_running)
    wait_until(lambda: engine.stats().finished["abort"] > aborted)


def test_keys(serve, http):
    url = serve(api_keys=("one", "two")).url
    assert http.get(f"{url}/health").status_code == 200
    assert http.get(f"{url}/v1/models").json()["error"]["type"] == "authentication_error"
    for headers in ({"authorization": "Bearer three"}, {"authorization": "one"}, {"x-api-key": ""}):
        assert http.get(f"{url}/v1/models", headers=headers).status_code == 401
    for headers in ({"authorization": "Bearer one"}, {"x-api-key": "two"}):
        assert http.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_long_bodies(serve, http):
    url = serve(max_body_bytes=1000).url

    def pieces():
        for _ in range(20):
            yield b" " * 100

    for content in (b" " * 2000, pieces()):
        response = http.post(f"{url}/v1/completions", content=content)
        assert response.status_code == 413 and response.json()["error"]["type"] == "request_too_large"


def refuses(port):
    """Whether connections to the address are refused."""
    with socket.socket() as raw:
        return raw.connect_ex(("127.0.0.1", port)) != 0


def test_the_end_lets_running_requests_finish(engine, serve, http, paused, wait_until):
    running = serve(shutdown_timeout=60)
    answers = []
    body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(http.post(f"{running.url}/v1/completions", json=body)))
    with paused():
        thread.start()
        wait_until(lambda: engine.stats().num_unfinished)
        running.server.should_exit = True
        wait_until(lambda: refuses(running.port))
    running.stop()
    thread.join(60)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 200


@pytest.mark.parametrize("depth", [100, 400, 800, 1600])
def test_bodies_that_are_nested(client, depth):
    """Nested bodies are answered or refused, at any depth."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    fields = (b'"messages":[{"role":"user","content":"a","x":%s}]', b'"messages":[],"tools":[%s]', b'"chat_template_kwargs":%s')
    for field in fields:
        body = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,' + field % deep + b"}"
        for path in ("/v1/chat/completions", "/tokenize"):
            assert client.post(path, content=body).status_code in (200, 400)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize", "/v1/responses"])
def test_variables_of_the_template_are_no_way_to_bring_one(client, path):
    """Template variables cannot set a template or other arguments of rendering; only the server's template runs."""
    body = {"input": "hello"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hello"}]}
    for name, value in {"chat_template": "{{ 7 * 7 }}", "tokenize": False, "return_assistant_tokens_mask": True}.items():
        response = client.post(path, json={**body, "chat_template_kwargs": {name: value}})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "chat_template_kwargs" and name in error["message"]


HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages is empty"),
        ("/v1/chat/completions", {"messages": [{"content": "hello"}]}, "wanted a role"),
        ("/v1/chat/completions", {"messages": [HELLO], "tools": [{}]}, "wanted functions with names"),
        ("/v1/chat/completions", {"messages": [HELLO], "tools": [{"function": {"name": 3}}]}, "wanted functions with names"),
        ("/v1/completions", {"prompt": [[]]}, "prompt is empty"),
        ("/v1/embeddings", {"input": [[1], []]}, "input is empty"),
        ("/v1/responses", {"input": []}, "messages is empty"),
        ("/detokenize", {"tokens": [5, -1]}, "wanted ids from 0 to"),
        ("/detokenize", {"tokens": [1 << 70]}, "wanted ids from 0 to"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["ab"]}, "min_tokens": 9}, "leave none"),
    ],
)
def test_bodies_that_mean_nothing(client, path, body, why):
    response = client.post(path, json=body)
    assert response.status_code == 400 and why in response.json()["error"]["message"], response.text
