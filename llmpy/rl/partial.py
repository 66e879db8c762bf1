"""concat: a partial rollout and its continuation as one output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, overload

import numpy as np

from ..errors import InvalidRequestError
from ..logprobs import Logprobs, SampledLogprobs
from ..outputs import CompletionOutput, RequestMetrics, RequestOutput, SampleMetrics, VersionSpan, add_places, sum_in_order

if TYPE_CHECKING:
    from typing import NoReturn


@overload
def concat(a: RequestOutput, b: RequestOutput) -> RequestOutput: ...
@overload
def concat(a: CompletionOutput, b: CompletionOutput) -> CompletionOutput: ...
def concat(a: RequestOutput | CompletionOutput, b: RequestOutput | CompletionOutput) -> RequestOutput | CompletionOutput:
    """Joins an aborted output and its continuation.

    Args:
        a: Output from `abort`.
        b: Output for `{"prompt_token_ids": p, "output_token_ids": a.token_ids}` with the same parameters.

    Returns:
        One output as without the interruption: tokens, text, logprobs and version spans of both, and the finish reason of `b`.

    Raises:
        InvalidRequestError: `b` does not continue `a`.
    """
    if isinstance(a, CompletionOutput) and isinstance(b, CompletionOutput):
        return _join_samples(a, b)
    if not (isinstance(a, RequestOutput) and isinstance(b, RequestOutput)):
        raise TypeError(f"concat() takes two outputs of one kind, but has {type(a).__name__} and {type(b).__name__}")
    if not np.array_equal(a.prompt_token_ids_array, b.prompt_token_ids_array):
        _refuse("the prompts differ")
    if len(a.outputs) != len(b.outputs):
        _refuse(f"{len(a.outputs)} and {len(b.outputs)} samples")
    return replace(
        a,
        outputs=[_join_samples(first, second) for first, second in zip(a.outputs, b.outputs, strict=True)],
        finished=b.finished,
        weight_version=b.weight_version,
        metrics=_join_metrics(a.metrics, b.metrics),
        error=b.error,
    )


def _join_samples(a: CompletionOutput, b: CompletionOutput) -> CompletionOutput:
    count = len(a.token_ids_array)
    if b.num_prior_tokens != a.num_prior_tokens + count:
        _refuse(f"the second goes on from {b.num_prior_tokens} tokens, the first has {a.num_prior_tokens + count}")
    if (a.sampled is None) != (b.sampled is None):
        _refuse("one has logprobs")
    joined = replace(
        b,
        text=a.text + b.text,
        token_ids_array=np.concatenate([a.token_ids_array, b.token_ids_array]),
        weight_versions=_join_spans(a.weight_versions, b.weight_versions, count),
        num_prior_tokens=a.num_prior_tokens,
        metrics=_join_counts(a.metrics, b.metrics),
        _token_ids=None,
    )
    if a.sampled is not None and b.sampled is not None:
        assert a.token_logprobs is not None and b.token_logprobs is not None
        joined.sampled = SampledLogprobs(*(np.concatenate(pair) for pair in zip(a.sampled, b.sampled, strict=True)))
        joined.token_logprobs = np.concatenate([a.token_logprobs, b.token_logprobs])
        joined.cumulative_logprob = sum_in_order(joined.token_logprobs)
        joined.logprobs = _join_logprobs(a.logprobs, b.logprobs)
    return joined


def _join_spans(a: list[VersionSpan], b: list[VersionSpan], count: int) -> list[VersionSpan]:
    """The spans of `a`, then those of `b`; adjacent spans of the same weights are merged."""
    spans = list(a)
    for span in b:
        moved = span._replace(start=span.start + count, end=span.end + count)
        if spans and spans[-1].epoch == moved.epoch and spans[-1].version == moved.version:
            moved = moved._replace(start=spans.pop().start)
        spans.append(moved)
    return spans


def _join_logprobs(a: Logprobs | None, b: Logprobs | None) -> Logprobs | None:
    if a is None or b is None:
        return None
    if not len(a) or not len(b):
        return b if len(b) else a
    if a.ids.shape[1] != b.ids.shape[1]:
        _refuse(f"{a.ids.shape[1] - 1} and {b.ids.shape[1] - 1} alternatives per token")
    return a.followed_by(b)


def _join_metrics(a: RequestMetrics | None, b: RequestMetrics | None) -> RequestMetrics | None:
    if a is None or b is None:
        return b or a
    return replace(
        a,
        first_token_ts=a.first_token_ts if a.first_token_ts is not None else b.first_token_ts,
        last_token_ts=b.last_token_ts if b.last_token_ts is not None else a.last_token_ts,
        num_preemptions=a.num_preemptions + b.num_preemptions,
        num_generation_tokens=a.num_generation_tokens + b.num_generation_tokens,
        drafts=add_places(a.drafts, b.drafts),
        accepted_drafts=add_places(a.accepted_drafts, b.accepted_drafts),
    )


def _join_counts(a: SampleMetrics | None, b: SampleMetrics | None) -> SampleMetrics | None:
    if a is None or b is None:
        return b or a
    return SampleMetrics(add_places(a.drafts, b.drafts), add_places(a.accepted_drafts, b.accepted_drafts))


def _refuse(what: str) -> NoReturn:
    message = f"concat: wanted an output and its continuation, have others: {what}; pass output_token_ids=a.token_ids"
    raise InvalidRequestError(message, parameter="b")
