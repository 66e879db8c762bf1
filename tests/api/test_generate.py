"""generate, chat and score over a stand-in for the core: order, parameters, failures, interruption, life."""

import gc
import os
import pickle
import threading
import time
import weakref

import fake_core
import numpy as np
import pytest

from llmpy import (
    LLM,
    ChatTemplateError,
    EngineBusyError,
    EngineClosedError,
    GenerationInterrupted,
    InvalidRequestError,
    NoAllowedTokenError,
    NonFiniteLogitsError,
    RequestFailedError,
    SamplingParams,
    UnsupportedError,
)

PROMPTS = [[5, 6], [7], [8, 9, 10], [11]]


def expected(prompt, count, sample=0, prior=()):
    """The stand-in's output."""
    ids = []
    for _ in range(count):
        ids.append(fake_core.next_token([*prompt, *prior, *ids, sample]))
    return ids


def test_outputs_come_in_the_order_of_the_prompts(fake_llm):
    llm = fake_llm()
    lengths = [9, 2, 5, 1]
    outs = llm.generate(PROMPTS, [SamplingParams(max_tokens=n) for n in lengths])
    assert outs.token_ids == [expected(p, n) for p, n in zip(PROMPTS, lengths, strict=True)]
    assert [out.index for out in outs] == [0, 1, 2, 3] and all(out.finished for out in outs)
    assert outs.num_prompt_tokens == 7 and outs.num_generation_tokens == 17 and outs.elapsed > 0
    assert isinstance(outs[1:], type(outs)) and outs[1:].texts == outs.texts[1:]


def test_default_parameters(fake_llm):
    llm = fake_llm(max_model_len=1000)
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=256)
    assert len(llm.generate([5]).token_ids[0]) <= 256
    llm = fake_llm(defaults={"temperature": 0.6, "max_new_tokens": 7}, override_generation_config={"top_p": 0.5})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.5, max_tokens=7)
    out = llm.generate([5], top_k=3)[0]
    assert out.sampling_params == SamplingParams(temperature=0.6, top_p=0.5, max_tokens=7, top_k=3)
    assert len(out.token_ids) == 7
    assert llm.generate([5], SamplingParams())[0].sampling_params == SamplingParams()


def test_parameters_of_each(fake_llm):
    llm = fake_llm()
    params = SamplingParams(max_tokens=2)
    before = params.to_dict()
    llm.generate(PROMPTS, params)
    assert params.to_dict() == before
    with pytest.raises(ValueError, match=r"^The lengths of prompts \(4\) and params \(2\) must be the same\."):
        llm.generate(PROMPTS, [params] * 2)
    with pytest.raises(ValueError, match=r"^The lengths of prompts \(4\) and priority \(1\) must be the same\."):
        llm.generate(PROMPTS, params, priority=[0])
    with pytest.raises(ValueError, match=r"^The lengths of prompts \(4\) and lora_request \(1\) must be the same\."):
        llm.generate(PROMPTS, params, lora_request=[None])
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest or a name"):
        llm.generate(PROMPTS, params, lora_request=object())
    with pytest.raises(ValueError, match=r"^lora_request: .*enable_lora=True"):
        llm.generate(PROMPTS, params, lora_request="a")
    with pytest.raises(TypeError, match="not both"):
        llm.generate(PROMPTS, params, temperature=0)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate(PROMPTS, {"temperature": 0})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_new_tokens'.*max_tokens"):
        llm.generate(PROMPTS, max_new_tokens=3)
    with pytest.raises(TypeError, match=r"'prompt_token_ids'.*pass token ids, or lists of them, as prompts"):
        llm.generate(PROMPTS, prompt_token_ids=[[1]])
    with pytest.raises(InvalidRequestError, match="on_error must be 'raise' or 'return', got 'skip'"):
        llm.generate(PROMPTS, params, on_error="skip")


def test_samples(fake_llm):
    out = fake_llm().generate([5, 6], n=3, max_tokens=4)[0]
    assert [sample.token_ids for sample in out.outputs] == [expected([5, 6], 4, sample) for sample in range(3)]
    assert [sample.index for sample in out.outputs] == [0, 1, 2]


def test_seeds(fake_llm):
    seeds = [[out.seed for out in fake_llm(seed=seed).generate(PROMPTS, max_tokens=1)] for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2] and len(set(seeds[0])) == 4
    llm = fake_llm()
    first = llm.generate(PROMPTS, max_tokens=1)
    assert [out.seed for out in first] != [out.seed for out in llm.generate(PROMPTS, max_tokens=1)]
    assert llm.generate([5], seed=77, max_tokens=1)[0].seed == 77 == llm.fake.submitted[-1][1]["seed"]
    assert fake_llm(seed=None).seed != fake_llm(seed=None).seed


def test_nothing_runs_when_one_prompt_is_bad(fake_llm):
    llm = fake_llm()
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[5], [400], [6]])
    assert caught.value.index == 1 and not llm.fake.submitted
    outs = llm.generate([[5], [400], [6]], max_tokens=2, on_error="return")
    assert [out.finish_reason for out in outs] == ["length", "error", "length"]
    assert outs[1].error.index == 1 and outs[1].token_ids == [] and outs[1].finished


@pytest.mark.parametrize(("status", "cause"), [(1, NonFiniteLogitsError), (2, NoAllowedTokenError)])
def test_a_failure_while_running_ends_that_request_alone(fake_llm, status, cause):
    llm = fake_llm()
    llm.fake.fail_at = {1: (3, status)}
    params = SamplingParams(max_tokens=5, logit_bias={3: -float("inf")}, allowed_token_ids=[3])
    with pytest.raises(RequestFailedError) as caught:
        llm.generate(PROMPTS, params)
    error = caught.value
    assert isinstance(error.__cause__, cause) and error.__cause__.position == 4
    assert [out.finish_reason for out in error.outputs] == ["length", "error", "length", "length"]
    assert error.outputs[1].token_ids == expected([7], 3) and error.output is error.outputs[1]
    if cause is NoAllowedTokenError:
        assert error.__cause__.fields == ("allowed_token_ids", "logit_bias") and "logit_bias" in str(error.__cause__)
    llm.fake.fail_at = {5: (3, status)}
    outs = llm.generate(PROMPTS, params, on_error="return")
    assert isinstance(outs[1].error, cause) and outs[0].error is None
    pickle.loads(pickle.dumps(error))


def test_finish_and_stop_reasons(fake_llm):
    llm = fake_llm()
    ids = expected([5, 6], 6)
    out = llm.generate([5, 6], max_tokens=6, stop_token_ids=[ids[2]])[0].outputs[0]
    assert (out.finish_reason, out.stop_reason, out.token_ids) == ("stop", ids[2], ids[:3])
    assert out.finished()
    out = llm.generate([5, 6], max_tokens=6)[0].outputs[0]
    assert (out.finish_reason, out.stop_reason) == ("length", None)


def test_ctrl_c_keeps_what_there_is_and_the_engine(fake_llm):
    llm = fake_llm(step_s=0.005, max_model_len=100_000)
    llm.generate(PROMPTS, max_tokens=2)
    params = [SamplingParams(max_tokens=n) for n in (3, 50000, 50000, 50000)]
    with pytest.raises(GenerationInterrupted) as caught:
        llm.generate(PROMPTS, params, use_tqdm=fake_core.InterruptingBar(llm, 60))
    partial = caught.value.partial
    assert [out.finish_reason for out in partial] == ["length", "abort", "abort", "abort"]
    assert partial[1].token_ids == expected([7], len(partial[1].token_ids)) and 5 < len(partial[1].token_ids) < 50000
    assert not llm.fake.sequences and not llm._driver._requests
    assert llm.generate([5], max_tokens=2).token_ids == [expected([5], 2)]


def test_a_second_thread_gets_busy_at_once(fake_llm):
    llm = fake_llm()
    step, begun, goes_on = llm.fake.step, threading.Event(), threading.Event()

    def held():
        begun.set()
        return goes_on.wait(60) and step()

    llm.fake.step = held
    thread = threading.Thread(target=llm.generate, args=([5],), kwargs={"max_tokens": 6})
    thread.start()
    assert begun.wait(60)
    for call in (lambda: llm.generate("a"), lambda: llm.score("ab"), lambda: next(llm.stream("a")), llm.step):
        with pytest.raises(EngineBusyError, match=r"^engine is in use by another thread"):
            call()
    llm.stats()
    goes_on.set()
    thread.join()
    llm.generate([5], max_tokens=1)


def test_close(fake_llm):
    llm = fake_llm()
    stream = llm.stream("a")
    next(stream)
    with llm as same:
        assert same is llm and not llm.closed
    assert llm.closed and llm.fake.closed
    llm.close()
    calls = [lambda: llm.generate("a"), lambda: next(stream), llm.step, llm.stats, llm.memory, llm.program]
    for call in [*calls, lambda: llm.add_request("a"), lambda: llm.__enter__(), llm.reset_prefix_cache]:
        with pytest.raises(EngineClosedError, match=r"^engine is closed"):
            call()
    assert repr(llm) == "LLM(Fake, closed)"


def test_close_interrupts_the_thread_that_drives(fake_llm):
    llm = fake_llm(step_s=0.01, max_model_len=100_000)
    caught = []

    def work():
        try:
            llm.generate([5], max_tokens=90_000)
        except EngineClosedError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while not llm.fake.steps:
        time.sleep(0.001)
    llm.close()
    assert llm.fake.closed
    thread.join(60)
    assert caught == ["engine is closed"]


def test_close_within_a_callback(fake_llm):
    llm = fake_llm(step_s=0.005, max_model_len=1000)

    class Bar:
        def __init__(self, **options):
            pass

        def update(self, n):
            llm.close()

        def close(self):
            pass

    with pytest.raises(EngineClosedError):
        llm.generate([[5], [6]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=500)], use_tqdm=Bar)
    assert llm.fake.closed


def test_del_frees_at_once(fake_llm):
    llm = fake_llm()
    llm.generate(PROMPTS, max_tokens=2, logprobs=1)
    list(llm.stream("a", max_tokens=2))
    with pytest.raises(InvalidRequestError):
        llm.generate("a", temperature=-1)
    fake, reference = llm.fake, weakref.ref(llm)
    gc.disable()
    try:
        finished = llm._driver
        del llm
        # the fixture keeps one reference; take it away
        for holder in gc.get_referrers(reference()):
            if isinstance(holder, list) and reference() in holder:
                holder.remove(reference())
        assert reference() is None and fake.closed and finished.closed
    finally:
        gc.enable()


def test_a_child_process_is_told(fake_llm):
    llm = fake_llm()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("a")
        except EngineClosedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == f"engine belongs to process {os.getpid()}; create one in this process"
    assert llm.generate([5], max_tokens=1)[0].finished


def test_pickling_is_refused_with_advice(fake_llm):
    llm = fake_llm()
    with pytest.raises(TypeError, match=r"pickle llm\.config"):
        pickle.dumps(llm)
    config = pickle.loads(pickle.dumps(llm.config))
    assert LLM.from_config(config).config == llm.config


def test_chat(fake_llm):
    llm = fake_llm()
    user = {"role": "user", "content": "hi"}
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    one = llm.chat([user], max_tokens=2)
    assert one[0].prompt == text and one[0].prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert llm.chat("hi", max_tokens=2).token_ids == one.token_ids
    assert [out.prompt for out in llm.chat([[user], "hi", [user, user]], max_tokens=1)][:2] == [text, text]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "a\nb" in llm.chat(parts, max_tokens=1)[0].prompt
    with pytest.raises(UnsupportedError, match="content part of type 'image_url'"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat([user], continue_final_message=True)
    assert str(caught.value).startswith("Cannot set both `add_generation_prompt` and `continue_final_message` to True.")
    go_on = [user, {"role": "assistant", "content": "Well,"}]
    out = llm.chat(go_on, add_generation_prompt=False, continue_final_message=True, max_tokens=1)
    assert out[0].prompt.endswith("assistant\nWell,")
    assert llm.chat([user], chat_template="{{ extra }}!", chat_template_kwargs={"extra": "x"}, max_tokens=1)[0].prompt == "x!"
    with pytest.raises(TypeError, match="messages must be"):
        llm.chat(3)


def test_chat_without_a_template(fake_llm):
    with pytest.raises(ChatTemplateError):
        fake_llm(template=None).chat("hi")
    raising = "{{ raise_exception('no') }}"
    outs = fake_llm(template=raising).chat(["hi"], on_error="return")
    assert isinstance(outs[0].error, ChatTemplateError) and outs[0].finish_reason == "error"


ONLY_HI = "{% if messages[0].content != 'hi' %}BAD{% endif %}{{ messages[0].content }}"
BAD_ONES = ["{{ 'aaaa'|truncate(1) }}", "{{ cycler().next() }}", "{{ 'a' * 10 ** 12 }}", "{{ '\\ud800' }}", "{{ 1 / 0 }}"]


@pytest.mark.parametrize("bad", BAD_ONES)
def test_one_bad_conversation_fails_alone(fake_llm, bad):
    """Any exception of a template, and a lone surrogate in the rendered text."""
    outs = fake_llm(template=ONLY_HI.replace("BAD", bad)).chat(["hi", "no", "hi"], on_error="return", max_tokens=1)
    assert [out.error is None for out in outs] == [True, False, True]
    assert isinstance(outs[1].error, InvalidRequestError) and outs[1].error.parameter == "messages"


def test_score_forms(fake_llm):
    llm = fake_llm()
    out = llm.score([5, 6, 7, 8], logprobs=2)[0]
    assert out.start == 1 and out.token_ids == [5, 6, 7, 8]
    np.testing.assert_allclose(out.token_logprobs, [-0.06, -0.07, -0.08], rtol=1e-6)
    assert out.top.ids.shape == (3, 3) and out.top.ids[:, 0].tolist() == [6, 7, 8] and out.ranks.tolist() == [3, 3, 3]
    assert out.perplexity == pytest.approx(np.exp(0.07)) and out.sum_logprob == pytest.approx(-0.21)
    assert [len(item.token_logprobs) for item in llm.score([[5, 6, 7], [5, 6, 7]], start=[1, 2])] == [2, 1]
    assert llm.score([5, 6, 7])[0].top is None
    assert len(llm.score([5])[0].token_logprobs) == 0 and np.isnan(llm.score([5])[0].perplexity)
    assert llm.score([1] * 64)[0].start == 1
    pair = llm.score([5, 6], [7, 8])[0]
    assert pair.start == 2 and pair.token_ids == [5, 6, 7, 8]
    text = llm.score("hello", " you")[0]
    assert text.token_ids == llm.tokenizer.encode("hello you") and text.start == len(llm.tokenizer.encode("hello"))
    merged = llm.score("a h", "ello")[0]  # "he" is one token, which counts for the completion
    assert merged.token_ids == llm.tokenizer.encode("a hello") and merged.start == len(llm.tokenizer.encode("a "))
    assert llm.score([5, 6], "he")[0].start == 2
    assert [item.token_ids for item in llm.score([5, 6], [[7], [8, 9]])] == [[5, 6, 7], [5, 6, 8, 9]]
    texts = [item.token_ids for item in llm.score("hello", [" you", " me"])]
    assert texts == [llm.tokenizer.encode("hello you"), llm.tokenizer.encode("hello me")]
    assert llm.fake.submitted[0][1]["score_start"] == 1


def test_score_refusals(fake_llm):
    llm = fake_llm()
    for start in (0, 4):
        with pytest.raises(InvalidRequestError, match=rf"start must be in \[1, 3\].*got {start}\."):
            llm.score([5, 6, 7], start=start)
    for temperature in (0, -1, float("nan")):
        with pytest.raises(InvalidRequestError, match="temperature must be a finite number greater than zero"):
            llm.score([5, 6], temperature=temperature)
    with pytest.raises(InvalidRequestError, match="Requested prompt logprobs of 21, which is greater than max allowed: 20"):
        llm.score([5, 6], logprobs=21)
    with pytest.raises(UnsupportedError, match="sampling_params"):
        llm.score([5, 6], sampling_params=SamplingParams())
    with pytest.raises(InvalidRequestError, match=r"^The lengths of prompts \(2\) and completions \(1\)"):
        llm.score(["a", "b"], ["c"])
    with pytest.raises(TypeError, match="start cannot be given with completions"):
        llm.score("a", "b", start=1)
    with pytest.raises(InvalidRequestError, match=r"length 65\) is longer") as caught:
        llm.score([[5, 6], [1] * 65])
    assert caught.value.index == 1
    back = llm.score([[5, 6], [1] * 65], on_error="return")
    assert back[0].error is None and back[1].error is not None and len(back[1].token_logprobs) == 0


def test_a_completion_needs_a_token_before_it(fake_llm):
    llm = fake_llm()
    for prompt, completion in (("", "hello"), ("h", "ello"), ([], [5, 6]), ([], "hello")):
        with pytest.raises(InvalidRequestError, match=r"completion begins in token 0.*Give a prompt") as caught:
            llm.score([prompt], [completion])
        assert (caught.value.parameter, caught.value.value, caught.value.index) == ("start", 0, 0)
    for prompt, completion in (("hello", ""), ([5, 6], [[]]), ("", ""), ([5], "")):
        with pytest.raises(InvalidRequestError, match="no token behind the prompt"):
            llm.score(prompt, completion)
    back = llm.score(["", "a"], ["b", " b"], on_error="return")
    assert [item.error is None for item in back] == [False, True] and np.isnan(back[0].perplexity)


def test_a_beginning_of_sequence_token_stands_before_a_completion(fake_llm):
    from tokenizers.processors import TemplateProcessing

    llm = fake_llm()
    backend = llm.tokenizer.backend
    end = backend.token_to_id("<|end|>")
    backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    out = llm.score("", "hello")[0]
    assert out.token_ids[0] == end and out.start == 1 and len(out.token_logprobs) == len(out.token_ids) - 1


def test_introspection(fake_llm):
    llm = fake_llm()
    assert llm.stats().kv_usage == 0.25 and llm.memory()["weights"] == 98_000_000
    assert llm.ranks()[0]["device"] == "cpu" and llm.get_world_size() == 1
    assert llm.weight_info("*.weight") == llm.weight_info() and llm.weight_info("lm_head*") == []
    assert llm.program() == ["embed", "logits"] and llm.reset_prefix_cache(True) is True and llm.fake.was_reset is True
    assert llm.weight_version == 0 and llm.is_sleeping() is False
    with pytest.raises(UnsupportedError, match=r"^apply_model\(\): there is no module tree; call program\(\)"):
        llm.apply_model(lambda model: model)


def test_works_inside_a_running_loop(fake_llm):
    import asyncio

    async def main():
        return fake_llm().generate([5], max_tokens=2).token_ids

    assert asyncio.run(main()) == [expected([5], 2)]
