"""Servers of a tiny model in processes of their own, and a router before them."""

import contextlib
import subprocess
import sys

import httpx
import pytest

WORDS = ["--device", "cpu", "--kv-cache-memory-bytes", "8MiB", "--max-model-len", "2048", "--log-level", "warning"]


class Program:
    """`llmpy serve` or `llmpy route` as a process.

    Args:
        words: The command.
    """

    def __init__(self, *words):
        command = [sys.executable, "-m", "llmpy", *map(str, words), *(() if "--port" in words else ("--port", "0"))]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = ""

    def join(self):
        """Waits for its address."""
        lines = []
        while not (lines and lines[-1].startswith("http")):
            lines.append(self.process.stderr.readline())
            assert lines[-1], lines
        self.url = lines[-1].strip().removesuffix("/v1")
        return self

    def kill(self):
        """Ends it at once, as kill -9 does."""
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_model):
    return write_model(tmp_path_factory.mktemp("routed"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def programs():
    """Starts programs side by side; they end with the module."""
    made = []

    def start(*commands):
        begun = [Program(*words) for words in commands]
        made.extend(begun)
        return [one.join() for one in begun]

    yield start
    for one in made:
        one.kill()


@pytest.fixture(scope="module")
def engines(programs, model):
    """engines([options of one], [of another]): servers of the model."""
    return lambda *options: programs(*(("serve", model, *WORDS, *one) for one in options))


@pytest.fixture(scope="module")
def route(programs):
    """route(options and URLs): a client of a router, which has asked its engines before it tells its address."""
    clients = contextlib.ExitStack()

    def start(*words):
        router = programs(("route", "--poll", "0.1", "--log-level", "error", *words))[0]
        client = clients.enter_context(httpx.Client(base_url=router.url, timeout=60))
        assert not any(one["problem"] for one in client.get("/load").json()["engines"])
        return client

    yield start
    clients.close()
