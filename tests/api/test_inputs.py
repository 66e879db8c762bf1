"""Every form of a prompt, and every refusal with its text."""

from collections import UserDict

import numpy as np
import pytest

from llmpy import InvalidRequestError, SamplingParams, TextPrompt, TokensPrompt, UnsupportedError

ONE = SamplingParams(max_tokens=1)


def ids_of(llm, prompts):
    return [output.prompt_token_ids for output in llm.generate(prompts, ONE)]


def test_forms_of_one_prompt(fake_llm):
    llm = fake_llm()
    text = llm.tokenizer.encode("hello")
    assert ids_of(llm, "hello") == [text]
    assert ids_of(llm, TextPrompt(prompt="hello")) == [text]
    assert ids_of(llm, TokensPrompt(prompt_token_ids=[5, 6], prompt="echo")) == [[5, 6]]
    for form in ([5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint8), [np.int64(5), np.int32(6)], range(5, 7)):
        assert ids_of(llm, form) == [[5, 6]]
    torch = pytest.importorskip("torch")
    assert ids_of(llm, torch.tensor([5, 6])) == [[5, 6]]
    assert llm.generate({"prompt_token_ids": [5], "prompt": "echo"}, ONE)[0].prompt == "echo"
    assert llm.generate([5], ONE)[0].prompt is None


def test_batches(fake_llm):
    llm = fake_llm()
    assert ids_of(llm, [[5, 6], [7]]) == [[5, 6], [7]]
    mixed = ["a", [5], {"prompt": "b"}, np.array([9]), {"prompt_token_ids": [3], "cache_salt": "s"}]
    encode = llm.tokenizer.encode
    assert ids_of(llm, mixed) == [encode("a"), [5], encode("b"), [9], [3]]
    assert ids_of(llm, tuple(["a", "b"])) == [encode("a"), encode("b")]
    assert llm.generate([]) == [] and ids_of(llm, []) == []
    assert [params.get("salt") for _, params in llm.fake.submitted][-3:] != []


def test_salt_and_prior_reach_the_core(fake_llm):
    llm = fake_llm()
    out = llm.generate({"prompt_token_ids": [3, 4], "output_token_ids": [5, 6], "cache_salt": "sä"}, max_tokens=4)[0]
    params = llm.fake.submitted[-1][1]
    assert params["salt"] == "sä".encode() and params["prior"] == np.array([5, 6], np.int32).tobytes()
    assert out.outputs[0].num_prior_tokens == 2 and len(out.token_ids) == 2
    with pytest.raises(InvalidRequestError, match=r"^n must be 1 with output_token_ids, got 2\."):
        llm.generate({"prompt_token_ids": [3], "output_token_ids": [5]}, n=2)


INVALID = [
    ("", "The prompt cannot be empty"),
    ([[]], "The prompt cannot be empty"),
    (np.array([], np.int64), "The prompt cannot be empty"),
    ([1] * 65, "The prompt (length 65) is longer than the maximum model length of 64."),
    (
        [1] * 64,
        "The prompt (length 64) plus the number of requested output tokens (at least 1) is longer than the "
        "maximum model length of 64.",
    ),
    ([1, -1], "Token id -1 is out of vocabulary"),
    ([1, 300], "Token id 300 is out of vocabulary"),
    ([1, 2**31], f"Token id {2**31} is out of vocabulary"),
    ([1, 2**70], f"Token id {2**70} is out of vocabulary"),
    (np.array([1, 2**64 - 1], np.uint64), f"Token id {2**64 - 1} is out of vocabulary"),
    ({"prompt_token_ids": [1], "output_token_ids": [300]}, "Token id 300 is out of vocabulary"),
    ("a\ud800b", "prompt: wanted Unicode text, have a lone surrogate at 1"),
]


@pytest.mark.parametrize(("prompt", "text"), INVALID, ids=[text[:40] for _, text in INVALID])
def test_invalid(fake_llm, prompt, text):
    llm = fake_llm()
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt)
    assert str(caught.value).startswith(text) and caught.value.index == 0
    beginning = prompt if isinstance(prompt, str) else None
    single = [] if text.endswith("empty") else prompt
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[1], single])
    assert caught.value.index == 1 and not llm.fake.submitted
    label = f"prompt 1 ({beginning!r}): " if beginning and not text.startswith("prompt:") else "prompt 1: "
    assert str(caught.value).startswith(label + text)
    back = llm.generate([[1], single], on_error="return")
    assert [output.finish_reason for output in back] == ["length", "error"]
    assert str(back[1].error).startswith(text) and back.errors == [back[1].error]


WRONG = [
    ([1, True], "a token id must be an int, but is of type bool"),
    ([True], "a token id must be an int"),
    ([1.0, 2], "a token id must be an int, but is of type float"),
    (np.array([1.0]), "token ids must be integers"),
    (np.array([True]), "token ids must be integers"),
    (np.zeros((2, 3), np.int64), "an array of 2 dimensions would include padding; pass a list of unpadded lists"),
    ([np.zeros((2, 3), np.int64)], "an array of 2 dimensions would include padding"),
    (UserDict(input_ids=[[1]], attention_mask=[[1]]), "input_ids holds several prompts"),
    (UserDict(prompt_token_ids=[1], attention_mask=[1]), "a dict with 'attention_mask' would include padding; pass a list"),
    ({"prompt": "a", "promt": 1}, "unknown key 'promt' in a prompt"),
    ({"cache_salt": "x"}, "a prompt dict must have"),
    ({"prompt": 3}, "prompt must be a str"),
    ({"prompt": "a", "cache_salt": 3}, "cache_salt must be a str"),
    ([None], "a prompt is text"),
    ([["a"]], "a prompt is a list of ints"),
    (3, "prompts must be text"),
    (None, "prompts must be text"),
]


@pytest.mark.parametrize(("prompt", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_wrong_type(fake_llm, prompt, text):
    with pytest.raises(TypeError) as caught:
        fake_llm().generate(prompt)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("key", ["prompt_embeds", "encoder_prompt"])
def test_unsupported_keys(fake_llm, key):
    llm = fake_llm()
    with pytest.raises(UnsupportedError, match=key):
        llm.generate({"prompt": "a", key: 1})
    assert isinstance(llm.generate([{"prompt": "a", key: 1}], on_error="return")[0].error, UnsupportedError)


def test_any_iterable_of_prompts_is_a_batch(fake_llm):
    pandas = pytest.importorskip("pandas")
    llm = fake_llm()
    texts = ["a", "hello"]
    wanted = ids_of(llm, texts)
    frame = pandas.DataFrame({"prompt": texts, "other": [1, 2]}, index=[7, 3])
    forms = [
        (text for text in texts), dict.fromkeys(texts), dict.fromkeys(texts).keys(), {1: "a", 2: "hello"}.values(), iter(texts),
        frame["prompt"], frame["prompt"].astype("string"), frame["prompt"].astype("category"), np.array(texts),
        np.array(texts, object), np.array([{"prompt": text} for text in texts]),
    ]  # fmt: skip
    for form in forms[:1] + forms[2:]:
        assert ids_of(llm, form) == wanted
    assert ids_of(llm, (number for number in [5, 6])) == [[5, 6]]
    assert ids_of(llm, frame["other"]) == [[1, 2]]
    assert [out.prompt for out in llm.generate(np.array(texts), ONE)] == texts
    assert type(llm.generate(np.array(texts), ONE)[0].prompt) is str
    assert [len(out.token_ids) for out in llm.score(text for text in texts)] == [len(ids) for ids in wanted]
    assert [out.prompt for out in llm.chat(frame["prompt"], ONE)] == [out.prompt for out in llm.chat(texts, ONE)]
    talks = [[{"role": "user", "content": text}] for text in texts]
    for form in (iter(talks), pandas.Series(talks), [np.array(talk) for talk in talks]):
        assert [out.prompt for out in llm.chat(form, ONE)] == [out.prompt for out in llm.chat(texts, ONE)]


def test_columns_of_arrow(fake_llm):
    arrow = pytest.importorskip("pyarrow")
    llm, texts = fake_llm(), ["a b", "c"]
    wanted = ids_of(llm, texts)
    talks = [[{"role": "user", "content": text}] for text in texts]
    table = arrow.table({"prompt": texts, "ids": [[5, 6], [7]], "talk": talks})
    for column in (table["prompt"], table["prompt"].combine_chunks()):
        assert ids_of(llm, column) == wanted
    assert ids_of(llm, table["ids"]) == [[5, 6], [7]] and ids_of(llm, arrow.array([5, 6])) == [[5, 6]]
    assert [len(out.token_ids) for out in llm.score(table["prompt"])] == [len(ids) for ids in wanted]
    assert [out.prompt for out in llm.chat(table["talk"], ONE)] == [out.prompt for out in llm.chat(texts, ONE)]


def test_what_is_no_batch_says_what_to_pass(fake_llm):
    pandas = pytest.importorskip("pandas")
    llm = fake_llm()
    talk = [{"role": "user", "content": "hi"}]
    wrong = [
        (pandas.DataFrame({"a": ["x"]}), r"must be one column, but is a DataFrame; pass table\["),
        ({"a", "b"}, "must have an order"),
        (talk, r"call chat\(\) for messages"),
        ([talk, talk], r"^prompt 0: .*call chat\(\) for messages"),
        (pandas.Series(["a", None]), "^prompt 1: a prompt is text, .* is of type"),
        ({"input_ids": [[5], [6]]}, r"pass encoding\['input_ids'\]"),
        ({"input_ids": [5, 6], "attention_mask": [0, 1]}, "attention_mask with zeros would include padding"),
        ([b"ab"], "^a prompt is text, .* is of type bytes"),
    ]
    for prompts, message in wrong:
        with pytest.raises(TypeError, match=message):
            llm.generate(prompts)


def test_an_encoding_of_transformers_is_a_prompt(fake_llm):
    llm = fake_llm()
    encoding = UserDict(input_ids=[5, 6], attention_mask=[1, 1], token_type_ids=[0, 0])
    assert ids_of(llm, encoding) == ids_of(llm, [encoding]) == [[5, 6]]
    assert "token_type_ids" not in llm.fake.submitted[-1][1]


def test_an_error_of_a_batch_names_the_prompt(fake_llm):
    llm = fake_llm()
    with pytest.raises(InvalidRequestError, match=r"^prompt 1 \(''\): The prompt cannot be empty"):
        llm.generate(["a", ""])
    with pytest.raises(InvalidRequestError, match=r"^prompt 1 \('ab{28}\.\.\.'\): The prompt \(length \d+\) is longer"):
        llm.generate(["a", "a" + "b" * 200])
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: .*no text"):
        template = "{{ messages[0]['content'] or raise_exception('no text') }}"
        llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": ""}]], chat_template=template)


def test_text_needs_a_tokenizer(fake_llm):
    llm = fake_llm(tokenizer=False)
    assert llm.generate([5], ONE)[0].text == ""
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init is True") as caught:
        llm.generate([[5], "a"])
    assert caught.value.index == 1
    with pytest.raises(InvalidRequestError, match=r"^stop needs a tokenizer; skip_tokenizer_init is True"):
        llm.generate([5], stop="x")
    with pytest.raises(InvalidRequestError, match=r"^bad_words needs a tokenizer; skip_tokenizer_init is True"):
        llm.generate([5], bad_words=["x"])
    with pytest.raises(UnsupportedError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_tokenization_kwargs(fake_llm):
    llm = fake_llm()
    assert ids_of(llm, "a") == [llm.tokenizer.encode("a")]
    llm.generate("a", ONE, tokenization_kwargs={"add_special_tokens": False})
    with pytest.raises(UnsupportedError, match="truncate_prompt_tokens"):
        llm.generate("a", tokenization_kwargs={"truncate_prompt_tokens": 3})
    with pytest.raises(TypeError, match="unknown key 'padding'"):
        llm.generate("a", tokenization_kwargs={"padding": True})


def test_double_bos_is_kept_and_warned_of_once(fake_llm):
    from tokenizers.processors import TemplateProcessing

    llm = fake_llm()
    backend = llm.tokenizer.backend
    end = backend.token_to_id("<|end|>")
    backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    llm.tokenizer._named["bos_token"] = "<|end|>"
    with pytest.warns(UserWarning, match="the prompt begins with <|end|>"):
        assert ids_of(llm, "<|end|>a")[0][:2] == [end, end]
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids_of(llm, "<|end|>a")


MODEL_CHECKS = [
    ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
    ({"prompt_logprobs": 21}, "Requested prompt logprobs of 21, which is greater than max allowed: 20"),
    (
        {"logit_bias": {299: 1, 300: 1, -1: 2}},
        "token_id(s) [300, -1] in logit_bias contain out-of-vocab token ids. Vocabulary size: 300",
    ),
    ({"allowed_token_ids": [3, 300]}, "allowed_token_ids contains out-of-vocab token id!"),
]


@pytest.mark.parametrize(("fields", "text"), MODEL_CHECKS)
def test_checks_that_need_the_model(fake_llm, fields, text):
    llm = fake_llm()
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("a", **fields)
    assert str(caught.value).startswith(text) and caught.value.parameter in fields


def test_logprobs_of_a_prompt_are_bounded(fake_llm, monkeypatch):
    monkeypatch.setattr("llmpy.engine.frontend.MAX_PROMPT_LOGPROBS_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs=20 for 10 tokens would take 2520 bytes"):
        fake_llm().generate([1] * 10, prompt_logprobs=20)


def test_stop_ids_outside_the_vocabulary_cannot_occur(fake_llm):
    llm = fake_llm()
    llm.generate("a", stop_token_ids=[5, 100000, -3], max_tokens=1)
    assert llm.fake.submitted[-1][1]["stop_token_ids"] == [5]


def test_priority_needs_its_policy(fake_llm):
    llm = fake_llm()
    with pytest.raises(InvalidRequestError, match=r"^priority is 3 but scheduling_policy is 'fcfs'"):
        llm.generate("a", priority=3)
    llm = fake_llm(scheduling_policy="priority")
    llm.generate(["a", "b"], priority=[3, -1], max_tokens=1)
    assert [params.get("priority") for _, params in llm.fake.submitted] == [3, -1]


def test_bad_words_are_tokenised_bare_and_with_a_space(fake_llm):
    llm = fake_llm()
    llm.generate("a", bad_words=["x", " yz"], bad_token_ids=[[7, 8], [400]], max_tokens=1)
    encode = llm.tokenizer.encode
    assert llm.fake.submitted[-1][1]["bad_words"] == [[7, 8], encode("x"), encode("yz")]


def test_bad_words_are_not_kept(fake_llm):
    """The engine keeps no bad words after a request, however many different ones there are."""
    llm = fake_llm()
    translator = llm._frontend.translator
    before = {name: id(value) for name, value in vars(translator).items()}
    for number in range(20):
        llm.generate("a", bad_words=[f"word {number}"], max_tokens=1)
    held = [value for value in vars(translator).values() if isinstance(value, dict | list | set)]
    assert {name: id(value) for name, value in vars(translator).items()} == before and not held


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(fake_llm, monkeypatch):
    llm = fake_llm()  # takes 64 tokens
    text, most = "x" * 10_000, llm.tokenizer.max_token_bytes
    message = r"^The prompt \(100\d\d bytes of text\) is longer than the maximum model length of 64\."
    assert most == len("<|im_start|>") and len(text) > 64 * most
    monkeypatch.setattr(type(llm.tokenizer), "_encodings", None)
    calls = [lambda: llm.generate(text), lambda: llm.score(["a"], [text]), lambda: llm.score([text])]
    for call in [*calls, lambda: llm.chat([{"role": "user", "content": text}]), lambda: llm.add_request(text)]:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            call()
        assert caught.value.parameter == "prompt"
    assert not llm.fake.submitted


def test_one_text_of_many_cannot_fit(fake_llm):
    llm = fake_llm()
    outputs = llm.generate(["a", "x" * 10_000, "b"], max_tokens=1, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].error.index == 1
