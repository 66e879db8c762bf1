"""Completions: frames join to the whole answer, and both equal the engine's output."""

import pytest

from llmpy import LLM

PATH = "/v1/completions"
ASK = {"prompt": "hello", "max_tokens": 12, "temperature": 0.8, "seed": 3, "ignore_eos": True}


def post(client, **body):
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_answer_is_the_engines(client, engine):
    answer = post(client, **ASK, logprobs=2, return_token_ids=True)
    choice = answer["choices"][0]
    with LLM(engine.config.model, device="cpu", max_model_len=256, kv_cache_memory_bytes="8MiB") as llm:
        output = llm.generate("hello", temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)[0]
    assert choice["text"] == output.text and choice["token_ids"] == output.token_ids
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(output.outputs[0].token_logprobs.tolist(), abs=0)
    assert choice["finish_reason"] == "length" and choice["weight_versions"] == [[0, 12, 0, 0]]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"]) == len(output.prompt_token_ids)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "tiny"


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"echo": True}, {"prompt": ["a b", "c", "d e f"], "n": 2}, {"stop": ["e"]}])
def test_frames_join_to_the_whole(client, frames, extra):
    ask = {**ASK, "logprobs": 1, "return_token_ids": True, **extra}
    whole = post(client, **ask)
    chunks = frames(PATH, **ask, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [token for c in own for token in c["token_ids"]] == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] and all(c["finish_reason"] is None for c in own[:-1])
        for name, values in choice["logprobs"].items():
            assert [v for c in own if c["logprobs"] for v in c["logprobs"][name]] == values


def test_echo_with_logprobs_covers_prompt_and_completion(client):
    choice = post(client, **ASK, echo=True, logprobs=2, return_token_ids=True)["choices"][0]
    lists = choice["logprobs"]
    n = len(choice["prompt_token_ids"]) + len(choice["token_ids"])
    assert [len(values) for values in lists.values()] == [n] * 4
    assert lists["token_logprobs"][0] is None and all(value < 0 for value in lists["token_logprobs"][1:])
    assert lists["text_offset"][0] == 0 and lists["text_offset"] == sorted(lists["text_offset"])


def test_nothing_is_generated_where_only_the_prompt_is_scored(client, frames):
    ask = {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
    answer = post(client, **ask)
    choice = answer["choices"][0]
    assert choice["text"] == "hello" and answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_token_ids"])
    streamed = frames(PATH, **ask)
    assert "".join(c["text"] for chunk in streamed for c in chunk["choices"]) == "hello"
    assert sum(len((c["logprobs"] or {"tokens": []})["tokens"]) for chunk in streamed for c in chunk["choices"]) == len(
        choice["prompt_token_ids"]
    )


def test_ids_as_prompts(client):
    text = post(client, **ASK, return_token_ids=True)["choices"][0]
    ids = text["prompt_token_ids"]
    assert post(client, **{**ASK, "prompt": ids})["choices"][0]["text"] == text["text"]
    both = post(client, **{**ASK, "prompt": [ids, ids]})["choices"]
    assert [choice["text"] for choice in both] == [text["text"]] * 2 and [choice["index"] for choice in both] == [0, 1]


def test_sixteen_tokens_unless_asked(client):
    assert post(client, prompt="x", ignore_eos=True)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "n": 1000}, "n"),
        ({"prompt": "a", "best_of": 4}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "guided_regex": "b"}, "guided_regex"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": 1e39}}, "logit_bias"),
        ({"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a " * 20000}, "prompt"),
        ({"prompt": [99999]}, "prompt_token_ids"),
        ({}, None),
    ],
)
def test_bad_fields_are_named(client, body, param):
    response = client.post(PATH, json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] in (None, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param and error["message"]
