"""Beam search over HTTP: the texts of `LLM.beam_search`, streamed or not; what it excludes is refused by name."""

import pytest

from llmpy import LLM, BeamSearchParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "hello"}]
ASK = {"prompt": "hello", "max_tokens": 9, "n": 3, "use_beam_search": True, "return_token_ids": True}


def post(client, path=COMPLETIONS, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def llm(engine):
    with LLM(engine.config.model, device="cpu", max_model_len=256, kv_cache_memory_bytes="8MiB") as llm:
        yield llm


def search(llm, prompt, **params):
    return llm.beam_search([prompt], BeamSearchParams(**{"beam_width": 3, "max_tokens": 9, **params}))[0].sequences


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, {}),
        ({"n": 1, "ignore_eos": True}, {"beam_width": 1, "ignore_eos": True}),
        ({"length_penalty": -2.0, "early_stopping": True}, {"length_penalty": -2.0, "early_stopping": True}),
        ({"temperature": 0.5, "top_p": 1, "top_k": -1, "seed": 7, "presence_penalty": 0}, {"temperature": 0.5}),
        ({"stop": ["e", "a"], "include_stop_str_in_output": True}, {"stop": ["e", "a"], "include_stop_str_in_output": True}),
        ({"structured_outputs": {"choice": ["ab", "ba", "b"]}}, {"structured_outputs": {"choice": ["ab", "ba", "b"]}}),
    ],
)
def test_the_texts_are_those_of_python(client, llm, body, params):
    answer = post(client, **{**ASK, **body})
    wanted = search(llm, "hello", **params)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(wanted)))
    for choice, one in zip(choices, wanted, strict=True):
        assert choice["token_ids"] == one.token_ids and choice["text"] == one.text and choice["logprobs"] is None
        assert choice["finish_reason"] == one.finish_reason and choice["stop_reason"] == one.stop_reason
    assert answer["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in wanted)


@pytest.mark.parametrize("top", [0, 2, 6])
def test_logprobs_are_the_candidates(client, llm, top):
    choices = post(client, **ASK, logprobs=top, return_tokens_as_token_ids=True)["choices"]
    for choice, one in zip(choices, search(llm, "hello"), strict=True):
        rows = one.logprobs.to_list()
        lists = choice["logprobs"]
        assert lists["token_logprobs"] == [row[token].logprob for token, row in zip(one.token_ids, rows, strict=True)]
        for tops, row in zip(lists["top_logprobs"], rows, strict=True):
            best = sorted((value.logprob for value in row.values()), reverse=True)[:top]
            assert (tops is None) if top == 0 else ([*tops.values()] == best)


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"echo": True}, {"prompt": ["a b", "c"]}])
def test_a_stream_has_the_whole_at_its_end(client, frames, extra):
    ask = {**ASK, **extra}
    whole = post(client, **ask)
    assert len(whole["choices"]) == 3 * (2 if "prompt" in extra else 1)
    chunks = frames(COMPLETIONS, **ask, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    streamed = {choice["index"]: choice for chunk in chunks for choice in chunk["choices"]}
    for choice in whole["choices"]:
        own = streamed.pop(choice["index"])
        assert all(own[name] == choice[name] for name in ("text", "logprobs", "finish_reason", "token_ids"))
    assert not streamed


def test_chats(client, frames, llm):
    ask = {**ASK, "messages": TALK, "logprobs": True, "top_logprobs": 1}
    del ask["prompt"]
    answer = post(client, CHAT, **ask)
    wanted = search(llm, {"prompt_token_ids": answer["prompt_token_ids"]})
    assert [choice["message"]["content"] for choice in answer["choices"]] == [one.text for one in wanted]
    content = answer["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [
        row[token].logprob for token, row in zip(wanted[0].token_ids, wanted[0].logprobs, strict=True)
    ]
    assert all(len(token["top_logprobs"]) == 1 for token in content)
    streamed = [choice for chunk in frames(CHAT, **ask) for choice in chunk["choices"]]
    assert [choice["delta"]["content"] for choice in streamed] == [one.text for one in wanted]


def test_a_chat_without_a_limit_ends_with_its_texts(client, llm):
    """The limit of the search is the context."""
    grammar = {"structured_outputs": {"choice": ["ab", "ba", "b"]}}
    choices = post(client, CHAT, messages=TALK, n=3, use_beam_search=True, **grammar)["choices"]
    assert len(choices) == 3 and all(choice["message"]["content"] in ("ab", "ba", "b") for choice in choices)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (COMPLETIONS, {"n": 65}, "n", "1 to 64"),
        (COMPLETIONS, {"n": 0}, "n", "1 to 64"),
        (COMPLETIONS, {"best_of": 4}, "best_of", "wanted n"),
        (COMPLETIONS, {"top_p": 0.5}, "top_p", "not supported with use_beam_search"),
        (CHAT, {"top_k": 5}, "top_k", "not supported with use_beam_search"),
        (COMPLETIONS, {"presence_penalty": 0.1}, "presence_penalty", "not supported with use_beam_search"),
        (CHAT, {"repetition_penalty": 1.1}, "repetition_penalty", "not supported with use_beam_search"),
        (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias", "not supported with use_beam_search"),
        (COMPLETIONS, {"min_tokens": 2}, "min_tokens", "not supported with use_beam_search"),
        (COMPLETIONS, {"stop_token_ids": [5]}, "stop_token_ids", "not supported with use_beam_search"),
        (COMPLETIONS, {"bad_words": ["a"]}, "bad_words", "not supported with use_beam_search"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs", "not supported with use_beam_search"),
        (COMPLETIONS, {"logprobs": 7}, "logprobs", "at most 2 * n (6)"),
        (CHAT, {"logprobs": True, "top_logprobs": 7}, "top_logprobs", "at most 2 * n (6)"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo", "not supported with use_beam_search"),
        (COMPLETIONS, {"echo": True, "max_tokens": 0}, "echo", "not supported with use_beam_search"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (COMPLETIONS, {"length_penalty": 1e999}, None, "JSON"),
        (COMPLETIONS, {"early_stopping": "soon"}, "early_stopping", "soon"),
        (COMPLETIONS, {"use_beam_search": False, "length_penalty": 2}, "length_penalty", "only allowed with use_beam_search"),
        (CHAT, {"use_beam_search": None, "early_stopping": True}, "early_stopping", "only allowed with use_beam_search"),
        ("/v1/completions/render", {}, "use_beam_search", "use /v1/completions"),
        ("/v1/chat/completions/render", {}, "use_beam_search", "use /v1/chat/completions"),
    ],
)
def test_wrong_combinations_are_named(client, path, body, param, says):
    given = {"messages": TALK} if "chat" in path else {"prompt": "hello"}
    given |= {"max_tokens": 9, "n": 3, "use_beam_search": True, **body}
    if "length_penalty" in body and param is None:
        response = client.post(path, content=b'{"prompt": "a", "use_beam_search": true, "length_penalty": Infinity}')
    else:
        response = client.post(path, json=given)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and says in error["message"]
