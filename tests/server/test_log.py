"""The log: one line per request, without the request's text unless enabled."""

import logging
import socket

import pytest

SECRET = "xyzzy"  # in every prompt here


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):  # the client's own
        logging.getLogger(name).setLevel(logging.WARNING)
    return caplog


ASKS = [
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}, 200),
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "stream": True}, 200),
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "temperature": "hot"}, 400),
    ("/v1/completions", {"prompt": SECRET * 20_000, "max_tokens": 2}, 400),
    ("/v1/completions", {"prompt": {SECRET: SECRET}}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}, 200),
    ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": {SECRET: 1}}], "max_tokens": 2}, None),
    ("/v1/messages", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}, 200),
    ("/v1/embeddings", {"input": SECRET}, 200),
    ("/tokenize", {"prompt": SECRET}, 200),
]


def lines_of(logged):
    """Lines of requests."""
    messages = [record.getMessage() for record in logged.records if record.name == "llmpy.server"]
    return [message for message in messages if message.startswith("POST ")]


def test_one_line_a_request_without_its_text(client, logged, wait_until):
    for path, body, status in ASKS:
        logged.clear()
        response = client.post(path, json=body)
        assert status in (None, response.status_code), response.text
        response.read()
        wait_until(lambda: lines_of(logged))  # they come behind the answers
        (line,) = lines_of(logged)
        assert line.startswith(f"POST {path} {response.status_code} ")
        assert SECRET not in logged.text


def test_prompts_where_they_are_wanted(serve, logged, http):
    http.post(f"{serve(log_prompts=True).url}/v1/completions", json={"prompt": SECRET, "max_tokens": 2})
    assert SECRET in logged.text


def test_images_are_not_logged(serve, logged, http):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 500}}
    body = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": SECRET}]}]}
    http.post(f"{serve(log_prompts=True).url}/v1/chat/completions", json=body)
    assert SECRET in logged.text and "data:image/png;base64,(2000 bytes)" in logged.text and "QUJD" not in logged.text


def test_paths_write_one_line(client, logged, wait_until):
    """Any path gives one line; of a long path the line has the beginning."""
    assert client.post("/v1/nothing%0aPOST%20/forged%20200%1b[2J" + "x" * 5000).status_code == 404
    wait_until(lambda: lines_of(logged))
    (line,) = lines_of(logged)
    assert line.startswith("POST /v1/nothing%0APOST%20/forged%20200%1B%5B2Jxxx") and len(line) < 400 and "\n" not in line


def test_what_the_page_asks_every_second_is_no_news(client, logged, wait_until):
    client.get("/metrics", headers={"x-llmpy-page": "1"})
    client.get("/metrics")
    wait_until(lambda: len([record for record in logged.records if record.name == "llmpy.server"]) == 2)
    assert [record.levelname for record in logged.records if record.name == "llmpy.server"] == ["DEBUG", "INFO"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_a_client_that_goes_before_its_body_is_there_is_no_failure(url, logged, wait_until, path):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{".encode())
    wait_until(lambda: lines_of(logged))
    (line,) = lines_of(logged)
    assert line.startswith(f"POST {path} 499 ") and "a request failed" not in logged.text
