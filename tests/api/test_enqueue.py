"""LLM.enqueue, enqueue_chat and wait_for_completion over a stand-in for the core."""

import pytest

from llmpy import EngineAsleepError, InvalidRequestError, RequestFailedError, SamplingParams


def test_what_was_queued_gives_the_outputs_of_generate(fake_llm):
    llm = fake_llm()
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in (9, 2, 5)]
    together = llm.generate([[5], [6], [7]], params)
    steps = llm.fake.steps
    ids = llm.enqueue([[5], [6]], params[:2], use_tqdm=False) + llm.enqueue([7], params[2])
    assert len(set(ids)) == 3 and llm.fake.steps == steps
    assert not llm.has_unfinished_requests() and llm.step() == []
    assert llm.generate([5], max_tokens=2).token_ids[0] == together.token_ids[0][:2]  # queued ones stay queued
    outputs = llm.wait_for_completion()
    assert outputs.token_ids == together.token_ids and outputs.elapsed > 0
    assert [one.index for one in outputs] == [0, 1, 2] and [one.request_id for one in outputs] == ids
    assert llm.wait_for_completion() == [] and not llm.fake.sequences


def test_a_bad_prompt_queues_nothing(fake_llm):
    llm = fake_llm()
    llm.enqueue([5], max_tokens=2)
    with pytest.raises(InvalidRequestError, match="out of vocabulary") as caught:
        llm.enqueue([[5], [400]])
    assert caught.value.index == 1 and len(llm.fake.submitted) == 1
    with pytest.raises(InvalidRequestError, match="on_error must be"):
        llm.wait_for_completion(on_error="ignore")
    assert len(llm.wait_for_completion()) == 1


def test_a_failed_request_fails_alone(fake_llm):
    llm = fake_llm()
    for on_error in ("return", "raise"):
        llm.fake.fail_at = {llm.fake.next: (1, 3)}
        llm.enqueue([[5], [6]], max_tokens=3, ignore_eos=True)
        if on_error == "return":
            outputs = llm.wait_for_completion(on_error=on_error)
        else:
            with pytest.raises(RequestFailedError) as failed:
                llm.wait_for_completion()
            outputs = failed.value.outputs
        assert [one.error is None for one in outputs] == [False, True]
    assert llm.wait_for_completion() == []


def test_queued_requests_can_be_aborted(fake_llm):
    llm = fake_llm()
    first, second, _ = llm.enqueue([[5], [6], [7]], max_tokens=3, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="already in use"):
        llm.add_request([5], request_id=first)
    llm.abort_request(first)
    assert [one.request_id for one in llm.abort(second)] == [second]
    reasons = [one.outputs[0].finish_reason for one in llm.wait_for_completion()]
    assert reasons == ["abort", "abort", "length"]


def test_a_paused_engine_keeps_what_is_queued(fake_llm):
    llm = fake_llm()
    llm.pause("keep")
    llm.enqueue([5], max_tokens=2)
    with pytest.raises(EngineAsleepError):
        llm.wait_for_completion()
    llm.resume()
    assert len(llm.wait_for_completion()) == 1


def test_conversations_are_queued_as_chat_sends_them(fake_llm):
    llm = fake_llm()
    template = "{{ messages[0].role }} {{ messages[0].content }}"
    expected = llm.chat("hello", temperature=0, max_tokens=3, chat_template=template)
    assert len(llm.enqueue_chat("hello", temperature=0, max_tokens=3, chat_template=template)) == 1
    assert llm.wait_for_completion().token_ids == expected.token_ids
