"""concat: an aborted request and its continuation equal the uninterrupted run."""

from collections.abc import Callable

import pytest

from llmpy import LLM, InvalidRequestError, RequestOutput, SamplingParams
from llmpy.outputs import VersionSpan
from llmpy.rl import concat

PROMPT = [5, 9, 3]
PARAMS = SamplingParams(temperature=1.0, seed=11, max_tokens=24, logprobs=2, ignore_eos=True)


def interrupted(llm: LLM, params: SamplingParams, steps: int) -> RequestOutput:
    """The output of a request that is aborted after some steps."""
    name = llm.add_request(PROMPT, params)
    for _ in range(steps):
        llm.step()
    llm.abort_request(name)
    return next(output for output in llm.step() if output.finished)


def plain(output: RequestOutput) -> list[dict[str, object]]:
    return [sample.to_dict() for sample in output.outputs]


def test_joined_is_whole(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    whole = llm.generate([PROMPT], PARAMS)[0]
    first = interrupted(llm, PARAMS, 7)
    assert first.finish_reason == "abort" and 0 < len(first.token_ids) < 24
    rest = llm.generate([{"prompt_token_ids": PROMPT, "output_token_ids": first.token_ids}], PARAMS)[0]
    joined = concat(first, rest)
    assert plain(joined) == plain(whole)
    assert joined.outputs[0].logprobs == whole.outputs[0].logprobs
    assert joined.finished and joined.seed == 11 and joined.metrics.num_generation_tokens == 24
    assert plain(RequestOutput(**{**vars_of(first), "outputs": [concat(first.outputs[0], rest.outputs[0])]})) == plain(whole)


def vars_of(output: RequestOutput) -> dict[str, object]:
    return {name: getattr(output, name) for name in RequestOutput.__slots__ if name[0] != "_"}


def test_three_parts(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    whole = llm.generate([PROMPT], PARAMS)[0]
    parts = interrupted(llm, PARAMS, 4)
    for limit in (12, 24):
        ids = parts.outputs[0].token_ids
        rest = llm.generate([{"prompt_token_ids": PROMPT, "output_token_ids": ids}], PARAMS.replace(max_tokens=limit))[0]
        parts = concat(parts, rest)
    assert plain(parts) == plain(whole)


def test_spans_of_unlike_weights(open_llm: Callable[..., LLM]) -> None:
    """Spans of different epochs stay separate; spans of one epoch are merged."""
    llm = open_llm()
    first = interrupted(llm, PARAMS, 7)
    count = len(first.token_ids)
    rest = llm.generate([{"prompt_token_ids": PROMPT, "output_token_ids": first.token_ids}], PARAMS)[0]
    left = 24 - count
    rest.outputs[0].weight_versions = [VersionSpan(0, 2, 0, 0), VersionSpan(2, left, "new", 1)]
    spans = concat(first, rest).outputs[0].weight_versions
    assert spans == [VersionSpan(0, count + 2, 0, 0), VersionSpan(count + 2, 24, "new", 1)]


def test_refusals(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    first = interrupted(llm, PARAMS, 7)
    with pytest.raises(InvalidRequestError, match="goes on from 0 tokens, the first has"):
        concat(first, llm.generate([PROMPT], PARAMS)[0])
    other = llm.generate([{"prompt_token_ids": [4, 4], "output_token_ids": first.token_ids}], PARAMS)[0]
    with pytest.raises(InvalidRequestError, match="the prompts differ"):
        concat(first, other)
    bare = {"prompt_token_ids": PROMPT, "output_token_ids": first.token_ids}
    with pytest.raises(InvalidRequestError, match="one has logprobs"):
        concat(first, llm.generate([bare], PARAMS.replace(logprobs=None))[0])
    with pytest.raises(InvalidRequestError, match="2 and 1 alternatives"):
        concat(first, llm.generate([bare], PARAMS.replace(logprobs=1))[0])
    with pytest.raises(TypeError, match="two outputs of one kind"):
        concat(first, first.outputs[0])
