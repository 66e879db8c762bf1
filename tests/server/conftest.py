"""A tiny model behind the server, on a socket and in process."""

import asyncio
import contextlib
import json
import threading
import time

import httpx
import pytest
import uvicorn

from llmpy import AsyncEngine
from llmpy.server import build_app
from llmpy.text.tokenizer import Tokenizer

LENGTH = 16384
"""Longest sequence in tokens; answers of this length take seconds, so that tests can interrupt them."""


def until(condition):
    """Waits until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def wait_until():
    """`until` for tests."""
    return until


@pytest.fixture
def until_idle(engine):
    """Waits until the engine is idle."""
    return lambda: until(lambda: not engine.stats().num_unfinished)


@pytest.fixture(scope="session")
def engine(tmp_path_factory, write_model):
    model = write_model(tmp_path_factory.mktemp("served"), max_position_embeddings=LENGTH)
    engine = AsyncEngine(model, device="cpu", max_queued_requests=64, kv_cache_memory_bytes="64MiB")
    yield engine
    engine.close()


@pytest.fixture
def pausing():
    """pausing(engine): pauses an engine inside a block."""

    @contextlib.contextmanager
    def block(engine):
        asyncio.run(engine.pause("keep"))
        try:
            yield
        finally:
            asyncio.run(engine.resume())

    return block


@pytest.fixture
def paused(engine, pausing):
    """paused(): pauses the engine of the tests inside a block."""
    return lambda: pausing(engine)


class Running:
    """An application on a socket, in a thread.

    Args:
        app: The application.
        config: More options of uvicorn.
    """

    def __init__(self, app, **config):
        patient = {"timeout_graceful_shutdown": 60, "timeout_keep_alive": 600}
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, **patient | config))
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self._thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self):
        """Ends the server; a second call does nothing."""
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def running():
    """Puts applications on sockets; they end with the session."""
    made = []

    def run(app, **config):
        made.append(Running(app, **config))
        return made[-1]

    yield run
    for one in made:
        one.stop()


@pytest.fixture(scope="session")
def serve(engine, running):
    """Serves the engine with options, and `config` of uvicorn."""

    def make(config=(), **options):
        return running(build_app(engine, served_model_name=("tiny", "same"), **options), **dict(config))

    return make


@pytest.fixture(scope="session")
def url(serve):
    return serve().url


@pytest.fixture
def http():
    """A client for any address."""
    with httpx.Client(timeout=60) as made:
        yield made


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture
def frames(client):
    """The frames of a streamed answer; checks that it ends correctly."""

    def read(path, **body):
        with client.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = "".join(response.iter_text())
        parts = text.split("\n\n")
        assert parts[-1] == "" and parts[-2] == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2] if not part.startswith(":")]

    return read


@pytest.fixture
def tokenizing(monkeypatch):
    """The threads that a tokenizer has worked on, by method."""
    seen = []

    def watched(name):
        method = getattr(Tokenizer, name)

        def call(self, given, *rest, **options):
            seen.append((name, threading.current_thread()))
            return method(self, given, *rest, **options)

        return call

    for name in ("encode", "encode_batch", "encode_pair", "decode", "apply_chat_template", "convert_ids_to_tokens"):
        monkeypatch.setattr(Tokenizer, name, watched(name))
    return seen
