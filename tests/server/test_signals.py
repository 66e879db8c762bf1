"""`llmpy serve` as a process: SIGTERM ends it in every state of the engine and of standard error."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

WAIT_S = 60
ASK = {"prompt": "hello", "max_tokens": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_model):
    return write_model(tmp_path_factory.mktemp("signals"), max_position_embeddings=4096)


@pytest.fixture
def start(model, reserve_port):
    """Starts a server with a given standard error; returns its process and address once it answers."""
    made = []

    def begin(stderr, *options):
        port = reserve_port()
        words = [sys.executable, "-m", "llmpy", "serve", str(model), "--port", str(port), "--kv-cache-memory-bytes", "16MiB"]
        words += ["--device", "cpu", "--control", *options]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr)
        made.append(process)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    return process, url
            time.sleep(0.05)

    yield begin
    for process in made:
        process.kill()
        process.wait()


def ends(process):
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


@contextlib.contextmanager
def log_of(kind):
    """A standard error without a reader, and a function to call on it once the server answers."""
    reading, writing = os.pipe()
    try:
        if kind == "gone":
            yield writing, lambda: os.close(reading)
        elif kind == "blocked":
            yield writing, lambda: None
        elif kind == "full":
            with open("/dev/full", "w") as full:
                yield full, lambda: None
        else:
            yield subprocess.DEVNULL, lambda: None
    finally:
        for descriptor in (reading, writing):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.mark.parametrize("log", ["gone", "blocked", "full"])
def test_a_log_that_takes_nothing(start, log):
    """Start, requests and shutdown neither wait for the log nor fail because of it."""
    with log_of(log) as (stderr, spoil):
        process, url = start(stderr)
        spoil()
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            for _ in range(600):  # lines of 200 bytes: more than a pipe holds
                assert client.get("/" + "x" * 199).status_code == 404
            assert client.post("/v1/completions", json=ASK).status_code == 200
        ends(process)


def test_a_log_that_is_read_later_says_what_is_lost(start):
    reading, writing = os.pipe()
    try:
        process, url = start(writing)
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            for _ in range(600):
                client.get("/" + "x" * 199)
            assert len(os.read(reading, 1 << 20)) > 60_000
            client.get("/health")
            assert b"bytes of the log are lost: standard error was full)" in os.read(reading, 1 << 20)
        ends(process)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/sleep?level=1", "/sleep?level=2"])
def test_an_engine_that_stands_still(start, path):
    """At shutdown, a request that makes no progress gets 503, or an error event, after the time limit."""
    process, url = start(subprocess.DEVNULL, "--shutdown-timeout", "1")

    async def main():
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            assert (await client.post(path)).status_code == 200
            asks = [asyncio.ensure_future(client.post("/v1/completions", json={**ASK, "stream": one})) for one in (False, True)]
            while (await client.get("/load")).json()["server_load"] < 3:  # this one counts, too
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            whole, stream = await asyncio.gather(*asks)
            assert whole.status_code == 503 and whole.json()["error"]["message"] == "the server is shutting down"
            assert stream.status_code == 200 and "the server is shutting down" in stream.text and "error" in stream.text

    asyncio.run(main())
    assert process.wait(WAIT_S) == 0


def test_a_second_signal_ends_it_at_once(start):
    process, url = start(subprocess.DEVNULL, "--shutdown-timeout", "600")
    httpx.post(f"{url}/pause?mode=keep")
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        body = b'{"prompt": "a"}'
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n" + body)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        ends(process)
