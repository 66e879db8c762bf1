"""stream, stream_chat, and the step interface for servers."""

import gc

import pytest

from llmpy import (
    EngineClosedError,
    InvalidRequestError,
    NonFiniteLogitsError,
    RequestFailedError,
    RequestOutputKind,
    SamplingParams,
)


def run_steps(llm):
    """Steps until no request is left; returns the outputs of each step."""
    steps = []
    while llm.has_unfinished_requests():
        steps.append(llm.step())
    return steps


def test_chunks_join_to_the_text(fake_llm):
    llm = fake_llm()
    params = SamplingParams(max_tokens=20, logprobs=1)
    whole = llm.generate("hello", params)[0]
    chunks = list(llm.stream("hello", params))
    assert "".join(chunks) == whole.text == chunks[-1].output.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert all(len(chunk.token_logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert isinstance(chunks[0], str) and len(chunks) == 20
    assert next(llm.stream("hello", max_tokens=3)).token_logprobs is None


def test_the_engine_advances_only_inside_next(fake_llm):
    llm = fake_llm()
    stream = llm.stream("hello", max_tokens=5)
    assert llm.fake.steps == 0 and not llm.fake.submitted
    next(stream)
    assert llm.fake.steps == 1
    next(stream)
    assert llm.fake.steps == 2


@pytest.mark.parametrize("how", ["close", "drop"])
def test_closing_or_dropping_aborts(fake_llm, how):
    llm = fake_llm()
    stream = llm.stream("hello", max_tokens=50)
    next(stream)
    assert llm.stats().num_running == 1
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert llm.stats().num_running == 0 and not llm._driver._requests
    assert llm.generate([5], max_tokens=1)[0].finished


def test_streams_and_batches_side_by_side(fake_llm):
    llm = fake_llm()
    alone = "".join(llm.stream("hello", max_tokens=12))
    first, second = llm.stream("hello", max_tokens=12), llm.stream("hello", max_tokens=12)
    a, b = [next(first)], [next(second)]
    a += [next(first)]
    outs = llm.generate(["hello"] * 2, max_tokens=30)
    assert outs[0].text.startswith(alone)
    assert "".join([*a, *first]) == "".join([*b, *second]) == alone


def test_stream_takes_one_prompt_and_one_sample(fake_llm):
    llm = fake_llm()
    with pytest.raises(TypeError, match="one prompt"):
        llm.stream(["a", "b"])
    with pytest.raises(InvalidRequestError, match=r"n must be 1 in a stream, got 2\."):
        llm.stream("a", n=2)
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        llm.stream([400])
    with pytest.raises(TypeError, match="one conversation"):
        llm.stream_chat([[{"role": "user", "content": "a"}]] * 2)


def test_a_stream_that_fails(fake_llm):
    llm = fake_llm()
    llm.fake.fail_at = {0: (3, 1)}
    seen = []
    with pytest.raises(RequestFailedError) as caught:
        for chunk in llm.stream([5], max_tokens=9):
            seen += chunk.token_ids
    assert len(seen) == 3 and isinstance(caught.value.__cause__, NonFiniteLogitsError)
    assert caught.value.output.token_ids == seen


def test_stream_chat(fake_llm):
    llm = fake_llm()
    assert "".join(llm.stream_chat("hi", max_tokens=9)) == llm.chat("hi", max_tokens=9)[0].text


def test_steps(fake_llm):
    llm = fake_llm()
    assert llm.step() == [] and not llm.has_unfinished_requests()
    whole = llm.generate(["hello", "you"], [SamplingParams(max_tokens=n) for n in (3, 5)])
    first = llm.add_request("hello", SamplingParams(max_tokens=3))
    assert llm.add_request("you", SamplingParams(max_tokens=5), "mine") == "mine" != first
    steps = run_steps(llm)
    assert len(steps) == 5 and [len(outs) for outs in steps] == [2, 2, 2, 1, 1]
    final = {out.request_id: out for outs in steps for out in outs if out.finished}
    assert final[first].token_ids == whole[0].token_ids and final["mine"].text == whole[1].text
    assert sum(out.finished for outs in steps for out in outs) == 2
    lengths = [len(out.token_ids) for outs in steps for out in outs if out.request_id == "mine"]
    assert lengths == [1, 2, 3, 4, 5]


def test_delta_steps(fake_llm):
    llm = fake_llm()
    params = SamplingParams(max_tokens=12, n=2, logprobs=1, output_kind=RequestOutputKind.DELTA)
    whole = llm.generate("hello", params)[0]
    llm.add_request("hello", params)
    outs = [out for step in run_steps(llm) for out in step]
    for index, sample in enumerate(whole.outputs):
        mine = [item for out in outs for item in out.outputs if item.index == index]
        assert "".join(item.text for item in mine) == sample.text
        assert [token for item in mine for token in item.token_ids] == sample.token_ids
        assert all(len(item.token_ids) == len(item.logprobs) == len(item.token_logprobs) for item in mine)
        assert mine[-1].cumulative_logprob == sample.cumulative_logprob
        assert [(item.weight_versions[0].start, item.weight_versions[0].end) for item in mine] == [
            (i, i + 1) for i in range(12)
        ]


def test_final_steps(fake_llm):
    llm = fake_llm()
    llm.add_request("hello", SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY))
    steps = run_steps(llm)
    assert [len(outs) for outs in steps] == [0, 0, 0, 1] and len(steps[-1][0].token_ids) == 4


def test_abort_request(fake_llm):
    llm = fake_llm()
    name = llm.add_request("hello", max_tokens=40)
    other = llm.add_request("you", max_tokens=3)
    llm.step()
    llm.abort_request([name, "unknown"])
    final = {out.request_id: out for outs in run_steps(llm) for out in outs if out.finished}
    assert final[name].finish_reason == "abort" and len(final[name].token_ids) == 1
    assert final[other].finish_reason == "length" and len(final[other].token_ids) == 3
    llm.abort_request(name)
    llm.abort_request(other)


def test_request_ids(fake_llm):
    llm = fake_llm()
    llm.add_request("hello", request_id="x", max_tokens=2)
    with pytest.raises(InvalidRequestError, match=r"^request_id x is already in use"):
        llm.add_request("hello", request_id="x")
    run_steps(llm)
    llm.add_request("hello", request_id="x", max_tokens=2)
    with pytest.raises(TypeError, match="request_id must be a str"):
        llm.add_request("hello", request_id=3)
    with pytest.raises(TypeError, match="one prompt"):
        llm.add_request(["a", "b"])
    with pytest.raises(InvalidRequestError):
        llm.add_request("", request_id="y")
    llm.add_request("hello", request_id="y", max_tokens=2)


def test_what_a_batch_finished_is_still_handed_out(fake_llm):
    llm = fake_llm()
    name = llm.add_request("hello", max_tokens=3)
    llm.generate(["you"] * 2, max_tokens=30)
    assert llm.has_unfinished_requests()
    outs = llm.step()
    assert [(out.request_id, len(out.token_ids), out.finished) for out in outs] == [(name, 3, True)]
    assert not llm.has_unfinished_requests()


def test_failures_come_as_outputs(fake_llm):
    llm = fake_llm()
    llm.fake.fail_at = {0: (2, 2)}
    llm.add_request([5], max_tokens=9)
    out = run_steps(llm)[-1][0]
    assert out.finished and out.finish_reason == "error" and "no token is allowed" in str(out.error)


def test_steps_after_close(fake_llm):
    llm = fake_llm()
    llm.add_request("hello")
    llm.close()
    for call in (llm.step, llm.has_unfinished_requests, lambda: llm.abort_request("0")):
        with pytest.raises(EngineClosedError):
            call()


def test_an_abort_within_the_prompt_leaves_its_logprobs_out(open_tiny):
    llm = open_tiny(max_num_batched_tokens=16, max_num_seqs=4)
    name = llm.add_request(list(range(3, 103)), SamplingParams(max_tokens=4, prompt_logprobs=2))
    llm.step()
    llm.step()
    llm.abort_request(name)
    [last] = [out for step in run_steps(llm) for out in step if out.finished]
    assert last.finish_reason == "abort" and last.prompt_logprobs is None and last.prompt_token_logprobs is None
