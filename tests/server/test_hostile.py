"""Hostile clients: they are disconnected, with an HTTP error if possible, and leave no resources behind."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from llmpy.server import connections, requests
from llmpy.server.connections import bounded

ROOT = Path(__file__).parents[2]
TALK = {"prompt": "hello", "max_tokens": 16000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module", params=["httptools", "h11"])
def port(serve, request):
    """The port of a server with short time limits, for each of the two HTTP parsers."""
    patch = pytest.MonkeyPatch()
    for name, value in {"HEAD_S": 600.0, "LINGER_S": 0.4, "SWEEP_S": 0.05, "MAX_REST_BYTES": 1 << 18}.items():
        patch.setattr(connections, name, value)
    kinds = {"httptools": "uvicorn.protocols.http.httptools_impl", "h11": "uvicorn.protocols.http.h11_impl"}
    module = pytest.importorskip(kinds[request.param])
    name = {"httptools": "HttpToolsProtocol", "h11": "H11Protocol"}[request.param]
    patch.setattr(connections, "AutoHTTPProtocol", getattr(module, name))
    running = serve(config={"http": bounded(8, 0.5), "timeout_keep_alive": 1})
    running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    yield running.port
    patch.undo()


@contextlib.contextmanager
def connected(port, sent=b"", buffer=None):
    with socket.socket() as raw:
        if buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        raw.settimeout(60)
        raw.connect(("127.0.0.1", port))
        raw.sendall(sent)
        yield raw


def post(body, length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (length or len(body)) + body


def answer(raw):
    """Reads until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            parts.append(part)
    return b"".join(parts)


def pour(raw, data):
    """Sends data repeatedly, more than the socket buffers hold."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        raw.sendall(data)


def test_one_sweep_a_server():
    """A server has one sweep, however often connections open and close."""
    loop, state = Mock(), ServerState()
    loop.time.return_value = 0.0
    config = uvicorn.Config(Mock(), log_config=None)
    config.load()
    kind = bounded(8, 1.0)
    for _ in range(20):
        connection, transport = kind(config, state, {}, _loop=loop), Mock()
        transport.get_extra_info.return_value = None
        connection.connection_made(transport)
        connection.connection_lost(None)
    ((_, sweep, *rest),) = (call.args for call in loop.call_later.call_args_list)
    sweep(*rest)  # finds no connection, and ends
    kind(config, state, {}, _loop=loop).connection_made(transport)
    assert loop.call_later.call_count == 2


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /he"])
def test_a_head_that_does_not_come(port, monkeypatch, sent):
    with connected(port, sent) as raw:
        if b"\r\n\r\n" in sent:
            assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")
        monkeypatch.setattr(connections, "HEAD_S", 0.2)
        assert b"HTTP" not in answer(raw)


def test_an_endless_head(port):
    with connected(port, b"GET / HTTP/1.1\r\n") as raw, pytest.raises(OSError, match=r"reset|pipe"):
        pour(raw, b"x: " + b"y" * 4000 + b"\r\n")


def test_a_body_that_does_not_come(port, monkeypatch):
    monkeypatch.setattr(requests, "PROGRESS_S", 0.2)
    with connected(port, post(b'{"prompt"', length=100)) as raw:
        assert answer(raw).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_goes_on_behind_its_refusal(port):
    with connected(port, post(b"{", length=1 << 40)) as raw, pytest.raises(OSError, match=r"reset|pipe"):
        pour(raw, b" " * (1 << 16))


def test_too_many_connections(port, wait_until):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connected(port))
        with connected(port) as raw:
            assert answer(raw).startswith(b"HTTP/1.1 503 ")
    wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200)


def test_a_reader_that_stops(port, until_idle):
    with connected(port, post({**TALK, "logprobs": 20}), 4096) as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 200 OK")
        until_idle()
        assert b"[DONE]" not in answer(raw)


@pytest.mark.parametrize("body", [b"[]," * 200_000, b"1," * 4_000_001, b'"a":1,' * 100_001])
def test_bodies_of_many_parts(client, body):
    response = client.post("/v1/completions", content=b'{"prompt": "hello", "x": [' + body + b"1]}")
    assert response.status_code == 413 and "too many parts" in response.json()["error"]["message"]


def test_long_bodies_at_once(serve, http, wait_until, monkeypatch):
    monkeypatch.setattr(requests, "PROGRESS_S", 600.0)
    running = serve(max_body_bytes=100_000)
    service = running.server.config.app._service
    body = post(b" " * 90_000, length=99_999)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connected(running.port, body))
        wait_until(lambda: service.body_bytes == 8 * 90_000)
        response = http.post(f"{running.url}/v1/completions", content=b" " * 99_999)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
    wait_until(lambda: service.body_bytes == 0)
    assert http.post(f"{running.url}/v1/completions", content=b" " * 99_999).status_code == 400


def test_a_full_queue(url, paused, wait_until):
    """The queue takes 64 requests; a later client gets Retry-After."""
    seen, threads = [], []

    def ask():
        seen.append(httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 2}, timeout=600))

    with paused():
        for _ in range(70):
            threads.append(threading.Thread(target=ask))
            threads[-1].start()
        wait_until(lambda: len(seen) >= 6)
    for thread in threads:
        thread.join(60)
    refused = [response for response in seen if response.status_code == 429]
    assert len(refused) == 6 and sum(response.status_code == 200 for response in seen) == 64
    assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in refused)
    assert refused[0].json()["error"]["type"] == "rate_limit_error"


@pytest.mark.slow
def test_all_of_them_at_once():
    """15 seconds of a test that was also run for ten minutes. The latency of normal clients is measured on an idle machine."""
    words = ["--seconds", "15", "--quiet", "5", "--flood-seconds", "10", "--queued", "500", "--share", "0.1", "--times", "1000"]
    words += ["--flood-share", "0.05"]
    path = os.pathsep.join([str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "benchmarks/hostile.py", *words]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=1200)
