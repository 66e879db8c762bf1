"""LLM.as_completed over a stand-in for the core."""

import fake_core
import pytest

from llmpy import GenerationInterrupted, InvalidRequestError, RequestFailedError, SamplingParams


def test_as_completed_gives_outputs_as_they_finish(fake_llm):
    llm = fake_llm()
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in (9, 2, 5, 2)]
    together = llm.generate([[5], [6], [7], [8]], params)
    outputs = llm.as_completed([[5], [6], [7], [8]], params)
    first = next(outputs)
    assert first.index == 1 and llm.has_unfinished_requests() is False and llm.fake.sequences
    assert llm.generate([5], max_tokens=20, ignore_eos=True)[0].finished  # others go on meanwhile
    found = [first, *outputs]
    assert [one.index for one in found] == [1, 3, 0, 2]
    assert [one.token_ids for one in sorted(found, key=lambda one: one.index)] == together.token_ids
    assert list(llm.as_completed([])) == []


def test_as_completed_checks_in_the_call_and_fails_at_the_end(fake_llm):
    llm = fake_llm()
    with pytest.raises(InvalidRequestError, match="out of vocabulary") as caught:
        llm.as_completed([[5], [400]])
    assert caught.value.index == 1 and not llm.fake.submitted
    with pytest.raises(InvalidRequestError, match="on_error must be"):
        llm.as_completed([[5]], on_error="ignore")
    back = list(llm.as_completed([[5], [400]], on_error="return", max_tokens=2))
    assert [(one.index, one.error is None) for one in back] == [(1, False), (0, True)]
    llm.fake.fail_at = {llm.fake.next: (1, 3)}
    found = []
    with pytest.raises(RequestFailedError) as failed:
        found.extend(llm.as_completed([[5], [6]], max_tokens=3, ignore_eos=True))
    assert [one.index for one in found] == [1]
    assert [one.error is None for one in failed.value.outputs] == [False, True]


def test_as_completed_aborts_what_nobody_reads(fake_llm):
    llm = fake_llm(step_s=0.002, max_model_len=100_000)
    outputs = llm.as_completed([[5], [6]], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 60)])
    assert next(outputs).index == 0
    outputs.close()
    assert all(seq.finish == "abort" for seq in llm.fake.sequences) and not llm._driver._requests
    with pytest.raises(GenerationInterrupted) as caught:
        list(llm.as_completed([[5], [6]], max_tokens=50_000, use_tqdm=fake_core.InterruptingBar(llm, 20)))
    assert [one.finish_reason for one in caught.value.partial] == ["abort", "abort"]
    assert all(one.token_ids for one in caught.value.partial) and llm.generate([5], max_tokens=1)[0].finished
