"""`llmpy serve` as a program: what it prints, what it logs."""

import os
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

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


def test_drafts_change_no_bit_of_an_answer(served, client):
    """`--speculative-config`: the answers of a server without drafts, and counts of those requests alone that want drafts."""
    ask = {"prompt": [5, 6, 5, 6], "max_tokens": 30, "seed": 3, "allowed_token_ids": [5, 6], "logprobs": 2}
    wanted = client.post("/v1/completions", json={**ask, "model": "tiny"}).json()["choices"]
    config, said = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}', []

    def counts(root):
        families = text_string_to_metric_families(httpx.get(f"{root}/metrics").text)
        samples = {one.name: one.value for family in families for one in family.samples}
        return [samples[f"vllm:spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")]

    with served("--speculative-config", config, "--served-model-name", "tiny", said=said) as lines:
        root = lines[-1].strip().removesuffix("/v1")
        found = []
        for is_drafted in (False, True, False):
            body = {**ask, "model": "tiny", "speculative": is_drafted}
            assert httpx.post(f"{root}/v1/completions", json=body, timeout=60).json()["choices"] == wanted
            found.append(counts(root))
        assert found[0] == [0, 0] and found[1] == found[2] and 0 < found[1][1] < found[1][0]
