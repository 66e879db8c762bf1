"""Token ids in, token ids out; and rendering with and without an engine."""

import asyncio

import httpx
import pytest

from llmpy.server import Renderer, build_app

PATH = "/inference/v1/generate"
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0.9, "seed": 3, "ignore_eos": True}


def post(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_what_is_rendered_runs_as_the_chat_would(client):
    ask = {**TALK, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.5}, "return_token_ids": True}
    chat = post(client, "/v1/chat/completions", **ask)
    rendered = post(client, "/v1/chat/completions/render", **ask)
    assert rendered["token_ids"] == chat["prompt_token_ids"] and rendered["features"] is None
    made = post(client, PATH, **rendered)
    assert made["request_id"] == rendered["request_id"]
    assert made["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    logprobs = made["choices"][0]["logprobs"]["content"]
    expected = chat["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in logprobs] == [item["logprob"] for item in expected]
    assert logprobs[0]["token"] == f"token_id:{made['choices'][0]['token_ids'][0]}" and len(logprobs[0]["top_logprobs"]) == 2


def test_completions_render_one_object_a_prompt(client):
    rendered = post(client, "/v1/completions/render", prompt=["hello", "you"], max_tokens=3)
    tokens = [post(client, "/tokenize", prompt=text)["tokens"] for text in ("hello", "you")]
    assert [one["token_ids"] for one in rendered] == tokens and rendered[0]["sampling_params"]["max_tokens"] == 3


def test_frames_join_to_the_whole_and_an_answer_goes_on(client, frames):
    params = {"max_tokens": 8, "seed": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 0, "ignore_eos": True, "min_tokens": None}
    ask = {"token_ids": [1, 2, 3], "sampling_params": params}
    whole = post(client, PATH, **ask)
    chunks = frames(PATH, **ask, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 16
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
        assert [t for c in own for t in c["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert whole["prompt_logprobs"][0] is None and len(whole["prompt_logprobs"]) == 3
    params = {**params, "n": 1, "prompt_logprobs": None}
    full = post(client, PATH, **{**ask, "sampling_params": params})["choices"][0]["token_ids"]
    rest = post(client, PATH, **{**ask, "sampling_params": params}, output_token_ids=full[:5])
    assert rest["choices"][0]["token_ids"] == full[5:]


def test_refusals(client):
    for body, why in (
        ({"token_ids": []}, "empty"),
        ({"token_ids": [1], "sampling_params": {"n": 1000}}, "sampling_params.n: wanted at most 128 samples, have 1000"),
        ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"token_ids": [1], "features": {}}, "features: wanted image_urls"),
        ({"token_ids": [1], "features": {"image_urls": ["data:image/png;base64,"]}}, "no tower for images"),
        ({"token_ids": "hello"}, "token_ids"),
    ):
        response = client.post(PATH, json=body)
        assert response.status_code == 400 and why in response.json()["error"]["message"], response.text
    response = client.post(PATH, json={"token_ids": [1], "sampling_params": {"colour": "red", "max_tokens": 1}})
    assert response.status_code == 200 and response.headers["x-llmpy-ignored"] == "sampling_params.colour"


def test_a_server_that_only_renders(client, engine, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).symlink_to(f"{engine.config.model}/{name}")
    app = build_app(Renderer(tmp_path), served_model_name=("tiny",))

    async def answers():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
            rendered = await http.post("/v1/chat/completions/render", json=TALK)
            models, health = await http.get("/v1/models"), await http.get("/health")
            return rendered.json(), models.json(), health.status_code, await http.post("/v1/completions", json={"prompt": "a"})

    rendered, models, health, refused = asyncio.run(answers())
    assert health == 200 and models["data"][0]["max_model_len"] == engine.config.max_model_len
    theirs = post(client, "/v1/chat/completions/render", **TALK)
    assert {**rendered, "request_id": None} == {**theirs, "request_id": None}
    assert refused.status_code == 501 and "--render-only" in refused.json()["error"]["message"]
    with pytest.raises(FileNotFoundError):
        (tmp_path / "model.safetensors").open()


def test_the_demo_model_answers_to_demo(demo_model):
    """The command line turns the word "demo" into the file's path."""
    app = build_app(Renderer(demo_model))

    async def statuses():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
            told = [entry["id"] for entry in (await http.get("/v1/models")).json()["data"]]
            asked = {name: {**TALK, "model": name} for name in ("demo", demo_model.stem, "other")}
            answers = {name: await http.post("/v1/chat/completions/render", json=body) for name, body in asked.items()}
            return told, {name: answer.status_code for name, answer in answers.items()}

    assert asyncio.run(statuses()) == ([demo_model.stem], {"demo": 200, demo_model.stem: 200, "other": 404})
