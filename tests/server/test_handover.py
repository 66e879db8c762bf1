"""`kv_transfer_params`: one server computes a prompt, another goes on with it, as vLLM's proxies do it."""

import asyncio
import os
from typing import Any

import msgspec
import pytest

from llmpy import AsyncEngine, kv
from llmpy.server import build_app
from llmpy.server.batch import call

PROMPT = [5 + i % 90 for i in range(50)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def post(app, path, body):
    status, content = asyncio.run(call(app, path, msgspec.json.encode(body)))
    return status, msgspec.json.decode(content)


@pytest.fixture(scope="module")
def servers(tmp_path_factory, write_model):
    model, store = write_model(tmp_path_factory.mktemp("handed"), max_position_embeddings=256), kv.Memory(64 << 20)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "32MiB", "host_cache_bytes": "8MiB"}
    engines = [AsyncEngine(model, **options, kv_connector=store, prefix_cache_seed=5) for _ in range(2)]
    yield [build_app(engine) for engine in engines]
    for engine in engines:
        engine.close()


def test_a_proxy_joins_two_servers(servers):
    status, first = post(servers[0], "/v1/completions", BODY | {"max_tokens": 1, "kv_transfer_params": PREFILL})
    told = first["kv_transfer_params"]
    assert status == 200 and told["do_remote_prefill"] and not told["do_remote_decode"] and len(told["remote_block_ids"]) == 3
    status, second = post(servers[1], "/v1/completions", BODY | {"kv_transfer_params": told})
    assert status == 200 and "kv_transfer_params" not in second
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    status, whole = post(servers[0], "/v1/completions", BODY)
    assert whole["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert second["choices"][0]["token_ids"][:1] == first["choices"][0]["token_ids"]


def test_both_servers_get_the_request_at_once(servers):
    bodies = [
        BODY | {"cache_salt": "at once", "max_tokens": 1, "kv_transfer_params": PREFILL},
        BODY | {"cache_salt": "at once", "kv_transfer_params": {"do_remote_prefill": True, "is_whole": False}},
    ]

    async def both():
        encoded = [msgspec.json.encode(body) for body in bodies]
        return await asyncio.gather(*(call(servers[i], "/v1/completions", encoded[i]) for i in (1, 0)))

    (status, content), (first_status, _) = asyncio.run(both())
    second = msgspec.json.decode(content)
    assert status == first_status == 200 and second["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    whole = post(servers[0], "/v1/completions", BODY)[1]
    assert whole["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]


def test_pools_hand_over(tmp_path_factory, write_model):
    model = write_model(tmp_path_factory.mktemp("pools"), max_position_embeddings=256)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "32MiB", "host_cache_bytes": "8MiB"}
    options |= {"prefix_cache_seed": 5, "kv_connector": {"name": "device"}}
    with AsyncEngine(model, **options) as first, AsyncEngine(model, **options) as second:
        told = post(build_app(first), "/v1/completions", BODY | {"max_tokens": 1, "kv_transfer_params": PREFILL})[1]
        answer = post(build_app(second), "/v1/completions", BODY | {"kv_transfer_params": told["kv_transfer_params"]})[1]
        whole = post(build_app(first), "/v1/completions", BODY)[1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == second.stats().fetched_tokens == 48
        assert answer["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        early = BODY | {"kv_transfer_params": {"do_remote_prefill": True, "is_whole": False}}
        status, refused = post(build_app(second), "/v1/completions", early)
        assert status == 501 and "is_whole=false is not supported" in refused["error"]["message"]
        unknown = told["kv_transfer_params"] | {"remote_engine_id": "nobody"}
        answer = post(build_app(second), "/v1/completions", BODY | {"cache_salt": "own", "kv_transfer_params": unknown})[1]
        assert answer["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        assert second.stats().fetched_tokens == 48


def test_peers_hand_over(tmp_path_factory, write_model):
    model, where = write_model(tmp_path_factory.mktemp("peers"), max_position_embeddings=256), f"unix:server-{os.getpid()}"
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "32MiB", "host_cache_bytes": "8MiB"}
    options["prefix_cache_seed"] = 5
    with (
        AsyncEngine(model, **options, kv_connector={"name": "peer", "listen": where}) as first,
        AsyncEngine(model, **options, kv_connector={"name": "peer", "peers": [where]}) as second,
    ):
        told = post(build_app(first), "/v1/completions", BODY | {"max_tokens": 1, "kv_transfer_params": PREFILL})[1]
        answer = post(build_app(second), "/v1/completions", BODY | {"kv_transfer_params": told["kv_transfer_params"]})[1]
        whole = post(build_app(first), "/v1/completions", BODY)[1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert answer["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]


def test_conversations_are_handed_over(servers):
    talk = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 1, "kv_transfer_params": PREFILL}
    status, first = post(servers[0], "/v1/chat/completions", talk)
    assert status == 200 and first["kv_transfer_params"]["remote_block_ids"]
    status, second = post(servers[1], "/v1/chat/completions", talk | {"kv_transfer_params": first["kv_transfer_params"]})
    assert status == 200 and second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_cannot_be_handed_over_names_itself(servers, engine):
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = BODY if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for wrong, status in ((7, 400), ({"do_remote_decode": "yes"}, 400)):
            made = post(servers[0], path, body | {"kv_transfer_params": wrong})
            assert made[0] == status and "kv_transfer_params" in made[1]["error"]["message"]
        made = post(servers[0], path, body | {"kv_transfer_params": PREFILL, "stream": True})
        assert made[0] == 400 and "stream=false" in made[1]["error"]["message"]
        made = post(build_app(engine), path, body | {"kv_transfer_params": PREFILL})
        assert made[0] == 501 and "kv_transfer_params needs disk_cache or kv_connector" in made[1]["error"]["message"]
