"""A sample and the core's output: tokens count once, and tokens after a stop string found by Python are dropped."""

import numpy as np
from fake_core import make_tokenizer

from llmpy import SamplingParams
from llmpy.results.samples import Sample
from llmpy.text.sample_text import SampleText


def output(first, ids, finish=None, epochs=None):
    """Output as from the core, with logprobs that identify the tokens."""
    columns = tuple((np.arange(first, first + len(ids)) + 100 * column).astype(np.float32).tobytes() for column in range(4))
    return {
        "first": first, "ids": np.array(ids, np.int32).tobytes(), "epochs": epochs or [(len(ids), 1)], "finish": finish,
        "stop": None, "logprobs": (*columns, np.arange(first, first + len(ids), dtype=np.int32).tobytes()), "top": None,
    }  # fmt: skip


def ids_of(sample):
    return np.frombuffer(sample.columns()[0], np.int32).tolist()


def test_output_that_come_twice_count_once():
    sample, params = Sample(), SamplingParams()
    for first, ids in ((0, [5, 6]), (0, [5, 6]), (2, [7]), (0, [5, 6]), (3, [8, 9]), (3, [8, 9])):
        sample.add(output(first, ids), params)
    assert ids_of(sample) == [5, 6, 7, 8, 9]
    assert sample.num_tokens == 5
    assert sample.epochs == [(0, 1)]


def test_nothing_follows_the_end():
    sample, params = Sample(), SamplingParams()
    sample.add(output(0, [5, 6], "length"), params)
    sample.add(output(2, [7]), params)
    assert (ids_of(sample), sample.finish) == ([5, 6], "length")


def test_tokens_behind_a_stop_string_are_dropped():
    """Ten tokens come at once; the string is complete with the sixth. All columns are cut alike."""
    params = SamplingParams(stop=["56"], logprobs=0)
    tokenizer = make_tokenizer(texts=False)
    ids = tokenizer.encode("1234567890")
    assert len(ids) == 10
    for cut in range(10):
        sample = Sample()
        sample.text = SampleText(tokenizer, [], params)
        for first, part in ((0, ids[:cut]), (cut, ids[cut:])):
            sample.add(output(first, part), params)
            sample.match_stops(params)
        assert (sample.finish, sample.stop, sample.num_tokens) == ("stop_string", "56", 6)
        assert ids_of(sample) == ids[:6]
        assert [len(column) for column in sample.columns()] == [24] * 6
        assert sample.total(0) == sum(range(6))
        assert sample.text.shown == "1234"


def test_the_total_goes_on_from_part_to_part():
    sample, params = Sample(), SamplingParams(logprobs=0)
    seen = 0.0
    for first in range(0, 60, 3):
        sample.add(output(first, [4, 5, 6]), params)
        seen += first + first + 1 + first + 2
        assert sample.total(0) == seen
