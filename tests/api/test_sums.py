"""Sums, times and JSON of outputs, each against its definition."""

import json
import math

import numpy as np
import pytest

from llmpy.outputs import RequestMetrics, ScoreOutput, sum_in_order, to_plain


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_sums_run_in_order_in_float64(count):
    """The bits of a plain loop, whole or in two parts, for short lists and long ones."""
    values = (-10 * np.random.default_rng(count).random(count)).astype(np.float32)
    total = 0.5
    for value in values.tolist():
        total += value
    assert sum_in_order(values, 0.5) == total
    for cut in {0, count // 3, count}:
        assert sum_in_order(values[cut:], sum_in_order(values[:cut], 0.5)) == total


def test_times_of_a_request():
    metrics = RequestMetrics(
        arrival_time=0, queued_ts=1, scheduled_ts=3, first_token_ts=7, last_token_ts=22, num_generation_tokens=6
    )
    assert (metrics.queue_time, metrics.prefill_time, metrics.first_token_latency) == (2, 4, 6)
    assert (metrics.decode_time, metrics.time_per_output_token, metrics.e2e_time) == (15, 3, 21)
    one = RequestMetrics(arrival_time=0, first_token_ts=7, last_token_ts=7, num_generation_tokens=1)
    assert (one.time_per_output_token, one.queue_time) == (0, None)


def test_perplexity():
    values = np.log(np.array([0.5, 0.25, 0.125], np.float32))
    scored = ScoreOutput(index=0, token_ids_array=np.arange(4, dtype=np.int32), start=1, token_logprobs=values, ranks=values)
    assert scored.sum_logprob == pytest.approx(6 * math.log(0.5))
    assert scored.perplexity == pytest.approx(4)


def test_json_has_no_numbers_that_are_not_finite():
    given = {"a": [1.5, math.nan, -math.inf], "b": np.array([[1.0, np.inf]], np.float32), 3: None}
    assert json.loads(json.dumps(to_plain(given), allow_nan=False)) == {"a": [1.5, None, None], "b": [[1.0, None]], "3": None}
