"""SamplingParams: the text of every check, the order of the checks, and the accepted forms."""

import dataclasses
import inspect
import math
import pickle
import re

import numpy as np
import pytest

import llmpy
from llmpy import InvalidRequestError, RequestOutputKind, SamplingParams, UnsupportedError
from llmpy.sampling_params import FLAGS, GENERATION_KEYS, ROWS

NAN, INF = math.nan, math.inf
BIASES = "-inf, which bans the token, or in [-1e+20, 1e+20]"

INVALID = [
    ({"n": 0}, "n must be at least 1, got 0."),
    ({"n": 16385}, "n must be at most 16384, got 16385."),
    ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1."),
    ({"presence_penalty": NAN}, "presence_penalty must be in [-2, 2], got nan."),
    ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5."),
    ({"repetition_penalty": INF}, "repetition_penalty must be a finite number, got inf."),
    ({"repetition_penalty": NAN}, "repetition_penalty must be a finite number, got nan."),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
    ({"repetition_penalty": 1e-300}, "repetition_penalty must be in [1e-06, 1e+06], got 1e-300."),
    ({"repetition_penalty": 2e6}, "repetition_penalty must be in [1e-06, 1e+06], got 2000000.0."),
    ({"temperature": INF}, "temperature must be a finite number, got inf."),
    ({"temperature": NAN}, "temperature must be a finite number, got nan."),
    ({"temperature": -0.1}, "temperature must be non-negative, got -0.1."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
    ({"top_p": 1.1}, "top_p must be in (0, 1], got 1.1."),
    ({"top_p": NAN}, "top_p must be in (0, 1], got nan."),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
    ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1."),
    ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1."),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
    ({"min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16, got 17."),
    ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
    ({"prompt_logprobs": -2}, "prompt_logprobs must be non-negative or -1, got -2."),
    (
        {"logprobs": 3, "logprob_token_ids": [1]},
        "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids).",
    ),
    (
        {"logprobs_mode": "raw"},
        "logprobs_mode must be one of raw_logprobs, full_logprobs, processed_logprobs, got raw.",
    ),
    ({"stop_token_ids": [1, "x"]}, "stop_token_ids must contain only integers, got 'x'."),
    ({"stop_token_ids": [1, True]}, "stop_token_ids must contain only integers, got True."),
    ({"allowed_token_ids": [1.0]}, "allowed_token_ids must contain only integers, got 1.0."),
    ({"bad_token_ids": [[1], [None]]}, "bad_token_ids must contain only integers, got None."),
    ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
    ({"stop": ""}, "stop cannot contain an empty string."),
    (
        {"stop": "a", "detokenize": False},
        "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
    ),
    ({"bad_words": ["a", ""]}, "bad_words cannot contain an empty string. Got bad_words=['a', '']"),
    (
        {"logit_bias": {"a": 1, 2: 3}},
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['a']",
    ),
    ({"logit_bias": {2: INF}}, "logit_bias values must be finite or -inf, got inf for token 2."),
    ({"logit_bias": {2: NAN}}, "logit_bias values must be finite or -inf, got nan for token 2."),
    ({"logit_bias": {2: 1e39}}, f"logit_bias values must be {BIASES}, got 1e+39 for token 2."),
    ({"logit_bias": {2: -1e39}}, f"logit_bias values must be {BIASES}, got -1e+39 for token 2."),
    ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
    ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
    ({"seed": -2}, "seed must be in [0, 2**64), got -2."),
    ({"seed": 2**64}, f"seed must be in [0, 2**64), got {2**64}."),
    ({"sample_index": -1}, "sample_index must be at least 0, got -1."),
]


@pytest.mark.parametrize(("fields", "text"), INVALID, ids=[str(fields) for fields, _ in INVALID])
def test_bad_value(fields, text):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(text)
    assert caught.value.parameter in fields


WRONG_TYPES = [
    ({"n": "2"}, "n must be an int, but is of type str"),
    ({"n": 2.0}, "n must be an int, but is of type float"),
    ({"n": True}, "n must be an int, but is of type bool"),
    ({"top_k": 1.5}, "top_k must be an integer, got float"),
    ({"temperature": "1"}, "temperature must be a number"),
    ({"temperature": True}, "temperature must be a number"),
    ({"top_p": None}, "top_p must be a number"),
    ({"max_tokens": 2.5}, "max_tokens must be an int"),
    ({"min_tokens": None}, "min_tokens must be an int"),
    ({"logprobs": False}, "logprobs must be an int"),
    ({"seed": "x"}, "seed must be an int"),
    ({"ignore_eos": 1}, "ignore_eos must be a bool"),
    ({"stop": 3}, "stop must be a list of strings"),
    ({"stop": [3]}, "stop must contain only strings"),
    ({"bad_words": "word"}, "bad_words must be a list of strings"),
    ({"stop_token_ids": 3}, "stop_token_ids must be a list of ints"),
    ({"logit_bias": [1]}, "logit_bias must be a dict"),
    ({"logit_bias": {1: "x"}}, "logit_bias values must be numbers"),
    ({"output_kind": "ALL"}, "output_kind must be a RequestOutputKind"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG_TYPES, ids=[str(fields) for fields, _ in WRONG_TYPES])
def test_wrong_type(fields, text):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"n": 0, "temperature": "hot"}, "temperature must be a number"),
        ({"n": 0, "presence_penalty": 9}, "n must be at least 1"),
        ({"presence_penalty": 9, "temperature": -1}, "presence_penalty"),
        ({"temperature": -1, "top_p": 7}, "temperature"),
        ({"min_p": 7, "max_tokens": 0}, "min_p"),
        ({"min_tokens": -3, "logprobs": -7}, "min_tokens"),
        ({"logprobs": -7, "stop_token_ids": ["x"]}, "logprobs"),
        ({"stop_token_ids": ["x"], "stop": ""}, "stop_token_ids"),
        ({"stop": "", "logit_bias": {"x": 1}}, "stop cannot"),
        ({"allowed_token_ids": [], "n": 2, "temperature": 0}, "allowed_token_ids is not None"),
        ({"n": 2, "temperature": 0, "seed": -5}, "n must be 1 when"),
        ({"seed": -5, "sample_index": -1}, "seed"),
    ],
)
def test_order_of_checks(fields, first):
    with pytest.raises((InvalidRequestError, TypeError)) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(first)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"prompt_logprobs_start": 2},
        {"logprobs_mode": "raw_logits"},
        {"logprob_token_ids": [1]},
        {"stream_interval": 2},
        {"routed_experts": True},
        {"repetition_detection": {}},
        {"thinking_token_budget": 3},
        {"extra_args": {}},
    ],
    ids=str,
)
def test_what_comes_later(fields):
    with pytest.raises(UnsupportedError) as caught:
        SamplingParams(**fields)
    assert next(iter(fields)) in str(caught.value)


def test_unknown_names():
    for name, hint in {
        "max_new_tokens": "max_tokens",
        "tempature": "temperature",
        "do_sample": "temperature=0",
    }.items():
        with pytest.raises(TypeError) as caught:
            SamplingParams(**{name: 1})
        assert str(caught.value).startswith(f"SamplingParams() got an unexpected keyword argument '{name}'.")
        assert hint in str(caught.value)
    with pytest.raises(TypeError, match="keyword arguments only"):
        SamplingParams(0.8)


def test_frozen_with_advice():
    params = SamplingParams()
    with pytest.raises(AttributeError, match=r"params\.replace\(temperature=\.\.\.\)"):
        params.temperature = 0.5
    with pytest.raises(AttributeError):
        del params.n
    assert dataclasses.is_dataclass(params) and SamplingParams.__dataclass_params__.frozen


def test_forms():
    params = SamplingParams(
        n=np.int64(2), temperature=1, top_p=np.float32(0.5), stop="x", logprobs=True, logit_bias={"12": -3}, seed=-1
    )
    assert (params.n, params.temperature, params.top_p) == (2, 1.0, 0.5)
    assert type(params.n) is int and type(params.temperature) is float
    assert params.stop == ("x",) and params.logprobs == 1 and params.logit_bias == {12: -3.0} and params.seed is None
    assert SamplingParams(logit_bias={3: -INF}).logit_bias == {3: -INF}
    assert SamplingParams(temperature=1e30, seed=2**64 - 1, top_k=-1).temperature == 1e30
    assert SamplingParams(output_kind="DELTA").output_kind is RequestOutputKind.DELTA


def test_is_greedy():
    assert SamplingParams(temperature=0).is_greedy and SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_replace_clone_to_dict_pickle():
    params = SamplingParams(temperature=0.5, stop=["a"], bad_token_ids=[[1, 2]], output_kind=RequestOutputKind.DELTA)
    changed = params.replace(max_tokens=3)
    assert (changed.max_tokens, changed.temperature, params.max_tokens) == (3, 0.5, 16)
    assert params.clone() == params and params.clone() is not params
    assert SamplingParams(**params.to_dict()) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2).n == 2
    with pytest.raises(InvalidRequestError):
        params.replace(top_p=0)
    assert repr(params.replace(output_kind="CUMULATIVE", bad_token_ids=())) == ("SamplingParams(temperature=0.5, stop=('a',))")


def test_from_generation_config():
    config = {
        "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 99, "min_new_tokens": 2,
        "repetition_penalty": 1.1, "eos_token_id": [1, 2], "transformers_version": "5",
    }  # fmt: skip
    params = SamplingParams.from_generation_config(config)
    assert params == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=99, min_tokens=2, repetition_penalty=1.1)
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert SamplingParams.from_generation_config({}) == SamplingParams()


def test_signature_names_every_field():
    names = list(inspect.signature(SamplingParams).parameters)
    assert names == [field.name for field in dataclasses.fields(SamplingParams)]
    assert llmpy.SamplingParams.__doc__


def documented():
    """Field -> its text in the class's documentation."""
    arguments = SamplingParams.__doc__.partition("Args:")[2].partition("Raises:")[0]
    found = re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", arguments, re.MULTILINE)
    return {name: text for names, text in found for name in names.split(", ")}


def test_documentation_has_every_field_with_its_default():
    texts = documented()
    assert texts.keys() == ROWS.keys()
    for field in dataclasses.fields(SamplingParams):
        text = texts[field.name]
        if "Not supported yet" in text:
            assert len(ROWS[field.name].rules) == 1
            continue
        default = {(): "none"}.get(field.default, str(field.default).removesuffix(".0"))
        assert re.search(rf"(?<![\w.-]){default}(?![\w]|\.\d)", text), (field.name, default)
        assert "default" in text.lower(), field.name


def test_flags_and_keys_are_fields():
    assert FLAGS.keys() <= ROWS.keys()
    assert set(GENERATION_KEYS) == {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens",
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.off])
def test_an_effect_that_is_off_changes_nothing(name):
    assert SamplingParams.__dataclass_fields__[name].default in ROWS[name].off
    for value in ROWS[name].off:
        SamplingParams(**{name: value})
