"""`llmpy serve` as a program: what it prints, what it logs."""

import os
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

WORDS = ["--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", "4MiB", "--trust-remote-code"]


@pytest.fixture
def served(engine):
    """Runs the server; returns the lines up to its address, and a list that receives the other lines."""

    @contextmanager
    def run(*words, said):
        command = [sys.executable, "-m", "llmpy", "serve", *WORDS, *words, "--", str(engine.config.model)]
        environment = {**os.environ, "LLMPY_DEVICE": "cpu"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            lines = []
            try:
                while not (lines and lines[-1].startswith("http")):
                    lines.append(process.stderr.readline())
                    assert lines[-1], lines
                yield lines
            finally:
                process.terminate()
                said.append(process.communicate(timeout=60)[1])

    return run


def test_it_tells_its_page_and_its_api(served, engine):
    said = []
    with served(said=said) as lines:
        api = lines[-1].strip()
        root = api.removesuffix("/v1")
        assert lines[-2].startswith(f"open {root}/ in a browser") and "--trust-remote-code does nothing" in lines[0]
        assert httpx.get(f"{root}/").headers["content-type"].startswith("text/html")
        models = httpx.get(f"{api}/models").json()["data"]
        assert [model["id"] for model in models] == [engine.name]
    assert "GET /v1/models 200" in said[0] and str(engine.config.model) not in said[0]


def test_the_log_can_be_quiet(served):
    said = []
    with served("--log-level", "warning", said=said) as lines:
        assert httpx.get(f"{lines[-1].strip()}/models").status_code == 200
    assert "GET" not in said[0]
