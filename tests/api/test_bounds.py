"""SamplingParams at the bounds: each bound is accepted or refused as the message says."""

import math

import numpy as np
import pytest

from llmpy import InvalidRequestError, SamplingParams

ACCEPTED = [
    {"n": 1}, {"n": 16384}, {"presence_penalty": -2}, {"presence_penalty": 2.0}, {"frequency_penalty": -2.0},
    {"frequency_penalty": 2}, {"repetition_penalty": 1e-6}, {"repetition_penalty": 1e6}, {"temperature": 0}, {"top_p": 1},
    {"top_p": 5e-324}, {"top_k": -1}, {"top_k": 0}, {"min_p": 0}, {"min_p": 1}, {"max_tokens": 1},
    {"max_tokens": 5, "min_tokens": 5}, {"max_tokens": None, "min_tokens": 10**6}, {"seed": 0}, {"seed": 2**64 - 1},
    {"sample_index": 0}, {"sample_index": 2**31}, {"logprobs": 0}, {"prompt_logprobs": 0},
    {"logit_bias": {3: -math.inf}}, {"logit_bias": {3: -1e20}},
]  # fmt: skip
REFUSED = [
    {"n": 0}, {"n": 16385}, {"presence_penalty": np.nextafter(2, 3)}, {"presence_penalty": np.nextafter(-2, -3)},
    {"frequency_penalty": np.nextafter(2, 3)}, {"frequency_penalty": np.nextafter(-2, -3)}, {"repetition_penalty": 0},
    {"temperature": -5e-324}, {"top_p": 0}, {"top_p": np.nextafter(1, 2)}, {"top_k": -2}, {"min_p": -5e-324},
    {"min_p": np.nextafter(1, 2)}, {"max_tokens": 0}, {"max_tokens": 5, "min_tokens": 6}, {"seed": 2**64},
    {"sample_index": 2**31 + 1}, {"logit_bias": {3: math.inf}},
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_the_bound_is_accepted(fields):
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_what_lies_beyond_is_refused(fields):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.parameter in fields


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (9.99e-6, True), (1e-5, False), (1.01e-5, False)])
def test_a_temperature_below_the_threshold_is_greedy(temperature, is_greedy):
    assert SamplingParams(temperature=temperature).is_greedy == is_greedy
