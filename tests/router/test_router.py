"""`llmpy route` before servers in processes of their own: the bits of one engine, prefixes, failures."""

import json
import re
import threading
import time

import httpx
import pytest

PROMPT = [5 + i % 90 for i in range(200)]
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1, "seed": 3, "ignore_eos": True}
BODY |= {"return_token_ids": True, "logprobs": 2}
ENGINE = "x-llmpy-engine"
KEEPS = ["--keep-responses", "100"]


@pytest.fixture(scope="module")
def two(engines, route, reserve_port, tmp_path_factory):
    """Two servers that publish what they hold, and a client of their router."""
    folder = tmp_path_factory.mktemp("events")
    options = [
        ["--kv-events-address", f"ipc://{folder}/{i}", "--kv-events-replay-address", f"ipc://{folder}/r{i}", *KEEPS]
        for i in range(2)
    ]
    made = engines(*options)
    return made, route(*(one.url for one in made))


def held(client):
    return {one["url"]: one["blocks"] for one in client.get("/load").json()["engines"]}


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metric(client, name):
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def test_answers_have_the_bits_of_one_engine(two):
    (first, _), client = two
    whole = httpx.post(f"{first.url}/v1/completions", json=BODY, timeout=60).json()["choices"]
    for _ in range(3):
        routed = client.post("/v1/completions", json=BODY)
        assert routed.status_code == 200 and routed.json()["choices"] == whole
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    assert [i for frame in frames[:-1] for i in json.loads(frame)["choices"][0]["token_ids"]] == whole[0]["token_ids"]


def test_a_prompt_goes_where_its_beginning_is(two):
    """Events tell what a server has computed for other clients, too."""
    servers, client = two
    for i, server in enumerate(servers):
        prompt = [100 + i, *PROMPT[1:]]
        before = held(client)
        assert httpx.post(f"{server.url}/v1/completions", json=BODY | {"prompt": prompt}, timeout=60).status_code == 200
        until(lambda url=server.url, n=before[server.url] + 12: held(client)[url] >= n)
        until(lambda: metric(client, "llmpy:router_other_requests") == 0)
        for tail in (7, 8, 9):
            made = client.post("/v1/completions", json=BODY | {"prompt": [*prompt, tail]})
            assert made.headers[ENGINE] == server.url
            assert made.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    assert metric(client, "llmpy:router_prompt_tokens_held_total") >= 6 * 192


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_conversations_stay_where_they_are(two, path):
    _, client = two
    limit, key = ("max_output_tokens", "input") if path.endswith("responses") else ("max_tokens", "messages")
    name = client.get("/v1/models").json()["data"][0]["id"]
    turns = [{"role": "user", "content": f"{path} " * 30}]
    used = set()
    for turn in range(4):
        made = client.post(path, json={key: turns, limit: 4, "model": name})
        assert made.status_code == 200, made.text
        used.add(made.headers[ENGINE])
        turns = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {turn}?"}]
    assert len(used) == 1


def test_responses_are_found_where_they_are_kept(two):
    _, client = two
    for i in range(4):
        made = client.post("/v1/responses", json={"input": f"{i} " * 20, "max_output_tokens": 4})
        kept, server = made.json()["id"], made.headers[ENGINE]
        found = client.get(f"/v1/responses/{kept}")
        assert found.status_code == 200 and found.headers[ENGINE] == server and found.json()["id"] == kept
        more = client.post("/v1/responses", json={"input": "more", "previous_response_id": kept, "max_output_tokens": 4})
        assert more.status_code == 200 and more.headers[ENGINE] == server
        assert client.delete(f"/v1/responses/{kept}").status_code == 200
        assert client.get(f"/v1/responses/{kept}").status_code == 404
    made = client.post("/v1/responses", json={"input": "a", "previous_response_id": "resp_none", "max_output_tokens": 4})
    assert made.status_code == 404 or made.status_code == 400, made.text


def test_new_prompts_are_shared_out(two):
    _, client = two
    used = [client.post("/v1/completions", json=BODY | {"prompt": [50 + i] * 40}).headers[ENGINE] for i in range(6)]
    assert {used.count(one) for one in used} == {3}


def test_a_client_that_goes_ends_its_request(two):
    servers, client = two
    body = BODY | {"prompt": [9] * 40, "max_tokens": 1900, "logprobs": None}
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        server = response.headers[ENGINE]
        lines = response.iter_lines()
        assert "token_ids" in next(lines)
        assert metric(client, "vllm:num_decoding_requests") == 1
    until(lambda: httpx.get(f"{server}/load").json()["running"] == 0)
    until(lambda: metric(client, "vllm:num_requests_running") == 0)
    assert metric(client, "llmpy:router_aborts_total") == 1
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body | {"n": 32}, timeout=0.05)
    until(lambda: all(httpx.get(f"{one.url}/load").json()["running"] == 0 for one in servers))


def test_refusals_are_passed_on(two):
    servers, client = two
    for path, body in (("/v1/completions", {"prompt": 7}), ("/v1/completions", {"prompt": "a", "max_tokens": 10**6})):
        own = httpx.post(f"{servers[0].url}{path}", json=body)
        made = client.post(path, json=body)
        assert made.status_code == own.status_code == 400 and made.json() == own.json()
    assert client.post("/v1/completions", content=b"{").status_code == 400
    made = client.post("/pause")
    assert made.status_code == 404 and "POST /pause" in made.json()["error"]["message"]
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
    assert client.post("/tokenize", json={"prompt": "hello"}).json()["count"] > 0


def test_a_killed_engine(engines, route):
    """Requests without a token go to the other engine; a stream with tokens ends with an error that names the engine."""
    servers = engines([], [])
    client = route(*(one.url for one in servers))
    by_url = {one.url: one for one in servers}
    body = BODY | {"prompt": [9] * 40, "max_tokens": 1900, "logprobs": None}
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        dead = by_url.pop(response.headers[ENGINE])
        dead.kill()
        left = [line for line in lines if line.startswith("data: ")]
    error = json.loads(left[-2].removeprefix("data: "))["error"]
    assert dead.url in error["message"] and "behind the first token" in error["message"] and left[-1] == "data: [DONE]"
    for i in range(4):
        made = client.post("/v1/completions", json=BODY | {"prompt": [60 + i] * 40})
        assert made.status_code == 200 and made.headers[ENGINE] in by_url
    assert client.get("/health").status_code == 200 and metric(client, "vllm:healthy_pods_total") == 1
    (last,) = by_url.values()
    last.kill()
    made = client.post("/v1/completions", json=BODY)
    assert made.status_code == 503 and last.url in made.json()["error"]["message"]
    assert client.get("/health").status_code == 503 and client.get("/ping").status_code == 200


def test_an_unstreamed_request_outlives_its_engine(engines, route):
    servers = engines(["--control"], ["--control"])
    client = route("--poll", "60", *(one.url for one in servers))
    for one in servers:
        assert httpx.post(f"{one.url}/pause?mode=keep").status_code == 200
    made = []
    thread = threading.Thread(target=lambda: made.append(client.post("/v1/completions", json=BODY)))
    thread.start()
    until(lambda: any(one["running"] for one in client.get("/load").json()["engines"]))
    busy = next(one["url"] for one in client.get("/load").json()["engines"] if one["running"])
    dead, other = sorted(servers, key=lambda one: one.url != busy)
    dead.kill()
    until(lambda: metric(client, "llmpy:router_retries_total") == 1)
    assert httpx.post(f"{other.url}/resume").status_code == 200
    thread.join()
    whole = httpx.post(f"{other.url}/v1/completions", json=BODY, timeout=60).json()["choices"]
    assert made[0].status_code == 200 and made[0].headers[ENGINE] == other.url and made[0].json()["choices"] == whole
