"""`llmpy serve --role`: one server computes prompts, another goes on behind them, by the router and by vLLM's protocol."""

import json
import os

import httpx
import pytest

from llmpy.cli import main

PROMPT = [5 + i % 90 for i in range(200)]
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1, "seed": 3, "ignore_eos": True}
BODY |= {"return_token_ids": True, "logprobs": 2}
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
ASK |= {"remote_host": None, "remote_port": None}


@pytest.fixture(scope="module", params=["disk", "peer"])
def halves(engines, tmp_path_factory, request):
    """A server for prompts, one that goes on behind them, and one alone. They share a folder, or are peers."""
    disk = {"path": str(tmp_path_factory.mktemp("store")), "bytes": "64MiB"}
    name = f"unix:{tmp_path_factory.mktemp('peer').name}-{os.getpid()}"
    stores = {
        "disk": (["--disk-cache", json.dumps(disk)],) * 2,
        "peer": [["--kv-connector", json.dumps({"name": "peer", **how})] for how in ({"listen": name}, {"peers": [name]})],
    }[request.param]
    shared = ["--host-cache-bytes", "1MiB", "--prefix-cache-seed", "3", "--cache-loads", "always"]
    return engines(["--role", "prefill", *shared, *stores[0]], ["--role", "decode", *shared, *stores[1]], [])


@pytest.fixture(scope="module")
def routed(halves, route):
    return route(*(one.url for one in halves[:2]))


def post(server, path, body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def cached(made):
    return made.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def text(made):
    choice = made.json()["choices"][0]
    return choice.get("token_ids") or choice["message"]["content"]


def test_what_a_proxy_of_vllm_sends(halves):
    """First the prompt with one token, then the whole request with what the first answer told."""
    prefill, decode, alone = halves
    for path, body in (
        ("/v1/completions", BODY | {"prompt": [3, *PROMPT]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": 8, "temperature": 0}),
    ):
        first = post(prefill, path, body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK})
        told = first.json()["kv_transfer_params"]
        assert first.status_code == 200 and told["do_remote_prefill"] and told["remote_block_ids"]
        second = post(decode, path, body | {"kv_transfer_params": told})
        assert second.status_code == 200 and cached(second) == 16 * len(told["remote_block_ids"])
        whole = post(alone, path, body)
        assert text(second) == text(whole)
        if path == "/v1/completions":
            assert second.json()["choices"] == whole.json()["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_older_proxy_asks_for_one_token(halves, stream):
    """Whatever a server of the role prefill computes can be found by others."""
    prefill, decode, _ = halves
    prompt = [4 + stream, 4, *PROMPT]
    assert post(prefill, "/v1/completions", BODY | {"prompt": prompt, "max_tokens": 1, "stream": stream}).status_code == 200
    assert cached(post(decode, "/v1/completions", BODY | {"prompt": prompt})) == 192
    turns = {"messages": [{"role": "user", "content": f"{stream} " * 40}], "temperature": 0}
    assert post(prefill, "/v1/chat/completions", turns | {"max_completion_tokens": 1, "stream": stream}).status_code == 200
    assert cached(post(decode, "/v1/chat/completions", turns | {"max_tokens": 2})) > 0


def test_roles_refuse_the_other_half(halves):
    prefill, decode, _ = halves
    for path, body in (("/v1/completions", BODY), ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}})):
        made = post(prefill, path, body)
        assert made.status_code == 400 and "the role prefill: wanted max_tokens 1" in made.json()["error"]["message"]
    made = post(decode, "/v1/completions", BODY | {"kv_transfer_params": ASK})
    assert made.status_code == 400 and "the role decode" in made.json()["error"]["message"]
    assert [httpx.get(f"{one.url}/load").json()["role"] for one in halves] == ["prefill", "decode", "both"]


def test_a_role_needs_a_store(model, capsys):
    assert main(["serve", str(model), "--role", "prefill"]) == 1
    assert "--role prefill needs disk_cache or kv_connector" in capsys.readouterr().err


def test_the_router_joins_them(halves, routed):
    """The bits of one server; the decode server computes no more than the rest of a block."""
    prompt = [6, 6, *PROMPT]
    made = routed.post("/v1/completions", json=BODY | {"prompt": prompt})
    assert made.status_code == 200 and made.headers["x-llmpy-engine"] == halves[1].url and cached(made) == 192
    assert made.json()["choices"] == post(halves[2], "/v1/completions", BODY | {"prompt": prompt}).json()["choices"]
    assert "llmpy:router_prefills_total 1\n" in routed.get("/metrics").text
    turns = {"messages": [{"role": "user", "content": "sun " * 40}], "max_tokens": 6, "seed": 5, "n": 2, "logprobs": True}
    turns["top_logprobs"] = 2
    made = routed.post("/v1/chat/completions", json=turns)
    assert cached(made) > 0 and text(made) == text(post(halves[2], "/v1/chat/completions", turns))
    made = routed.post("/inference/v1/generate", json={"token_ids": [8, *PROMPT], "sampling_params": {"max_tokens": 3}})
    assert made.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    with routed.stream("POST", "/v1/completions", json=BODY | {"prompt": [7, *PROMPT], "stream": True}) as response:
        lines = list(response.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    assert "llmpy:router_prefills_total 4\n" in routed.get("/metrics").text


def test_without_a_prefill_engine_the_decode_engine_computes(engines, route, tmp_path):
    store = json.dumps({"path": str(tmp_path), "bytes": "64MiB"})
    shared = ["--host-cache-bytes", "1MiB", "--disk-cache", store, "--prefix-cache-seed", "3", "--cache-loads", "always"]
    first, second = engines(["--role", "prefill", *shared], ["--role", "decode", *shared])
    client = route(first.url, second.url)
    first.kill()
    made = client.post("/v1/completions", json=BODY)
    assert made.status_code == 200 and cached(made) == 0
    second.kill()
    made = client.post("/v1/completions", json=BODY)
    assert made.status_code == 503 and second.url in made.json()["error"]["message"]
