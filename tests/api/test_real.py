"""The public interface on the real core: a tiny random model, and typical user flows."""

import math
import os
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from fake_core import InterruptingBar

from llmpy import (
    LLM,
    ConfigError,
    DeviceMemoryError,
    EngineBusyError,
    EngineClosedError,
    GenerationInterrupted,
    InvalidRequestError,
    NoAllowedTokenError,
    NonFiniteLogitsError,
    SamplingParams,
)

PROMPTS = ["hello", "the quick brown fox", "a", "one two three four five six seven", "hello there"]
RANDOM = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, logprobs=4, seed=5, ignore_eos=True)


def bits(output):
    """All values that must not change, as bytes."""
    return [
        (s.text, s.token_ids_array.tobytes(), *(part.tobytes() for part in s.sampled), s.logprobs.values.tobytes())
        for s in output.outputs
    ]


def test_batch_order_stream_steps_and_samples_give_the_same(open_tiny):
    llm = open_tiny()
    params = [RANDOM.replace(seed=i) for i in range(len(PROMPTS))]
    alone = [bits(llm.generate(prompt, param)[0]) for prompt, param in zip(PROMPTS, params, strict=True)]
    assert [bits(out) for out in llm.generate(PROMPTS, params)] == alone
    assert [bits(out) for out in llm.generate(PROMPTS[::-1], params[::-1])] == alone[::-1]
    for prompt, param, wanted in zip(PROMPTS, params, alone, strict=True):
        chunks = list(llm.stream(prompt, param))
        assert bits(chunks[-1].output) == wanted and "".join(chunks) == wanted[0][0]
    names = [llm.add_request(prompt, param) for prompt, param in zip(PROMPTS, params, strict=True)]
    final = {}
    while llm.has_unfinished_requests():
        final |= {out.request_id: bits(out) for out in llm.step() if out.finished}
    assert [final[name] for name in names] == alone
    four = llm.generate("hello", RANDOM.replace(n=4))[0]
    assert bits(four) == [bits(llm.generate("hello", RANDOM.replace(sample_index=i))[0])[0] for i in range(4)]
    llm.check()


def test_logprob_views_are_consistent(open_tiny):
    llm = open_tiny()
    out = llm.generate("hello", RANDOM.replace(prompt_logprobs=3, temperature=0.7))[0]
    sample = out.outputs[0]
    for token, row, value in zip(sample.token_ids, sample.logprobs, sample.token_logprobs, strict=True):
        assert next(iter(row)) == token and row[token].logprob == value <= 0
        assert 4 <= len(row) <= 5 and row[token].decoded_token == llm.tokenizer.decode([token])
        ranked = sorted(row.values(), key=lambda entry: entry.rank)
        assert all(a.logprob >= b.logprob for a, b in pairwise(ranked))
    np.testing.assert_allclose(sample.sampled.processed, sample.sampled.full - np.log(sample.sampled.kept_mass), atol=1e-5)
    score = llm.score([out.prompt_token_ids + out.token_ids], temperature=0.7)[0]
    start = len(out.prompt_token_ids) - 1
    assert score.token_logprobs[start:].tobytes() == sample.sampled.full.tobytes()
    raw = llm.score(out.prompt_token_ids, logprobs=3)[0]
    assert raw.token_logprobs.tobytes() == out.prompt_token_logprobs[1:].tobytes()
    assert raw.top == out.prompt_logprobs[1:]
    assert all(len(row) in (3, 4) for row in raw.top)


def test_logprobs_of_a_prompt_of_one_token(open_tiny):
    for count in (0, 2):
        out = open_tiny().generate([5], prompt_logprobs=count, max_tokens=1)[0]
        assert list(out.prompt_logprobs) == [None] and np.isnan(out.prompt_token_logprobs).tolist() == [True]


def test_more_samples_than_slots(open_tiny):
    out = open_tiny(max_num_seqs=4).generate("hello", n=20, max_tokens=3)[0]
    assert len({tuple(sample.token_ids) for sample in out.outputs}) > 10 and all(s.finished() for s in out.outputs)


def test_seeds_replay(open_tiny):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = open_tiny().generate(PROMPTS, params)
    assert open_tiny().generate(PROMPTS, params).token_ids == first.token_ids
    llm = open_tiny(seed=3)
    assert llm.generate(PROMPTS, params).token_ids != first.token_ids
    for out in first:
        assert llm.generate(out.prompt, params.replace(seed=out.seed)).token_ids == [out.token_ids]


def test_stopping(open_tiny):
    llm = open_tiny()
    free = llm.generate("hello", RANDOM)[0].outputs[0]
    ids = free.token_ids

    def run(**fields):
        return llm.generate("hello", RANDOM.replace(**fields))[0].outputs[0]

    stopped = run(stop_token_ids=[ids[5], ids[9]])
    place = min(ids.index(ids[5]), ids.index(ids[9]))
    assert stopped.token_ids == ids[: place + 1] and stopped.stop_reason == ids[place] and stopped.finish_reason == "stop"
    assert free.text.startswith(stopped.text)
    banned = run(stop_token_ids=[ids[0]], min_tokens=10)
    assert ids[0] not in banned.token_ids[:9] and len(banned.token_ids) >= 10
    clean = [i for i in range(3, len(free.text) - 3) if "\ufffd" not in free.text[i : i + 2]]
    for i in clean[::3]:
        stop = free.text[i : i + 2]
        for include in (False, True):
            cut = run(stop=["never seen", stop], include_stop_str_in_output=include)
            assert cut.stop_reason == stop and cut.text == free.text[: free.text.index(stop) + 2 * include]
            assert ids[: len(cut.token_ids)] == cut.token_ids and len(cut.logprobs) == len(cut.token_ids)
            chunks = list(llm.stream("hello", RANDOM.replace(stop=[stop], include_stop_str_in_output=include)))
            assert "".join(chunks) == cut.text and chunks[-1].finish_reason == "stop"


def test_end_of_sequence(open_tiny):
    llm = open_tiny()
    assert set(llm.tokenizer.eos_token_ids) == {2, llm.tokenizer.eos_token_id}
    end = llm.tokenizer.eos_token_ids[0]
    out = llm.generate("hello", logit_bias={end: 100.0}, max_tokens=5)[0].outputs[0]
    assert out.token_ids == [end] and (out.finish_reason, out.stop_reason) == ("stop", None)
    out = llm.generate("hello", logit_bias={end: 100.0}, max_tokens=5, ignore_eos=True)[0].outputs[0]
    assert out.token_ids == [end] * 5 and out.finish_reason == "length"
    out = llm.generate("hello", logit_bias={end: 100.0}, max_tokens=5, ignore_eos=True, stop_token_ids=[end])[0].outputs[0]
    assert out.token_ids == [end] and out.stop_reason == end
    out = llm.generate("hello", logit_bias={end: 100.0}, max_tokens=5, min_tokens=3)[0].outputs[0]
    assert end not in out.token_ids[:3] and out.token_ids[3:] == [end]


@pytest.mark.parametrize("stops", ["eos", "stop_id", "stop_string"])
def test_none_of_the_first_tokens_ends_the_output(open_tiny, stops):
    """Sampled tokens and prior output: min_tokens has the same meaning for every rule."""
    llm = open_tiny()
    end, letter = llm.tokenizer.eos_token_ids[0], llm.tokenizer.encode("x", add_special_tokens=False)[-1]
    last = letter if stops == "stop_string" else end
    rule = {"eos": {}, "stop_id": {"ignore_eos": True, "stop_token_ids": [end]}, "stop_string": {"stop": ["x"]}}[stops]
    params = SamplingParams(logit_bias={last: 100.0}, max_tokens=6, skip_special_tokens=False, seed=1, **rule)
    for least in range(5):
        out = llm.generate("hello", params.replace(min_tokens=least))[0].outputs[0]
        assert (len(out.token_ids), out.finish_reason) == (least + 1, "stop") and out.token_ids[-1] == last
        prior = {"prompt_token_ids": [5, 6], "output_token_ids": [7, 7, last]}
        rest = llm.generate([prior], params.replace(min_tokens=least))[0].outputs[0]
        assert len(rest.token_ids) == (0 if least < 3 else least - 2)


@pytest.mark.parametrize(("stop", "is_found"), [("é", True), ("éx", True), ("aé", False)])
def test_a_character_that_the_prompt_opens_begins_the_text(open_tiny, stop, is_found):
    """Stop strings can begin there, too, because they match the shown text."""
    llm = open_tiny()
    a, x = (llm.tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ax")
    first, second = llm.tokenizer.convert_tokens_to_ids(["Ã", "©"])  # the bytes of é as byte-level tokenizers write them
    params = SamplingParams(max_tokens=3, stop=[stop], include_stop_str_in_output=True, allowed_token_ids=[x])
    whole = llm.generate([{"prompt_token_ids": [a, first], "output_token_ids": [second]}], params)[0].outputs[0]
    assert (whole.finish_reason == "stop") == is_found
    params = params.replace(allowed_token_ids=[second], max_tokens=1)
    drawn = llm.generate([[a, first]], params)[0].outputs[0]
    assert drawn.text == "é" and (drawn.stop_reason == stop) == (stop == "é")


def test_prompt_logprobs_come_although_prior_output_ends_the_request(open_tiny):
    llm = open_tiny()
    prompt, end = llm.tokenizer.encode("hello there"), llm.tokenizer.eos_token_ids[0]
    wanted = llm.generate([prompt], prompt_logprobs=2, max_tokens=1)[0]
    for prior, fields in (([7, end], {}), ([7, 8], {"max_tokens": 2})):
        params = SamplingParams(prompt_logprobs=2, **fields)
        out = llm.generate([{"prompt_token_ids": prompt, "output_token_ids": prior}], params)[0]
        assert out.outputs[0].token_ids == [] and out.finished
        assert out.prompt_token_logprobs.tobytes() == wanted.prompt_token_logprobs.tobytes()
        assert list(out.prompt_logprobs) == list(wanted.prompt_logprobs)


def test_no_parameter_makes_logits_infinite(open_tiny):
    """Both ends of every range, combined: no NonFiniteLogitsError, which is for errors of the model."""
    llm = open_tiny()
    some = range(llm.tokenizer.vocab_size // 2)
    for penalty in (1e-6, 1e6):
        for bias in (1e20, -1e20):
            for temperature in (0, 1e-5, 1e30):
                params = SamplingParams(
                    repetition_penalty=penalty, presence_penalty=-2, frequency_penalty=-2, temperature=temperature,
                    max_tokens=8, logit_bias=dict.fromkeys(some, bias), logprobs=2, ignore_eos=True,
                )  # fmt: skip
                sample = llm.generate("hello", params)[0].outputs[0]
                assert len(sample.token_ids) == 8 and not np.isnan(np.concatenate([part for part in sample.sampled])).any()
    assert len(llm.score("hello", temperature=1e-5)[0].token_logprobs)
    with pytest.raises(InvalidRequestError, match=r"temperature must be at least 1e-05 to score, got 1e-38\."):
        llm.score("hello", temperature=1e-38)
    assert llm.stats().nonfinite_rows == 0


def test_masks(open_tiny):
    llm = open_tiny()
    params = RANDOM.replace(max_tokens=40)
    allowed = llm.generate("hello", params.replace(allowed_token_ids=[70, 71, 72]))[0]
    assert set(allowed.token_ids) <= {70, 71, 72}
    free = llm.generate("hello", params)[0]
    word = llm.tokenizer.decode(free.token_ids[3:4])
    bad = llm.generate("hello", params.replace(bad_words=[word]))[0]
    assert free.token_ids[3] not in bad.token_ids
    pair = llm.generate("hello", params.replace(bad_token_ids=[free.token_ids[4:6]]))[0].token_ids
    assert pair[:5] == free.token_ids[:5] and pair[5] != free.token_ids[5]
    limited = open_tiny(vocab_limit=50, banned_token_ids=[3, 4]).generate("hello", params)[0]
    assert max(limited.token_ids) < 50 and not {3, 4} & set(limited.token_ids)
    assert max(free.token_ids) < 300, "ids behind the tokenizer's last one are never sampled"


def test_failures_end_one_request_alone(open_tiny, write_model, tmp_path):
    llm = open_tiny()
    wanted = llm.generate("hello", RANDOM).token_ids
    nothing = RANDOM.replace(allowed_token_ids=[70], logit_bias={70: -math.inf})
    outs = llm.generate(["hello", "hello"], [nothing, RANDOM], on_error="return")
    assert isinstance(outs[0].error, NoAllowedTokenError) and outs[0].error.fields == (
        "allowed_token_ids",
        "logit_bias",
    )
    assert outs[0].error.position == len(outs[0].prompt_token_ids) and outs.token_ids == [[], *wanted]
    broken = open_tiny(write_broken(tmp_path, write_model))
    outs = broken.generate([[70], [71]], max_tokens=3, on_error="return")
    assert isinstance(outs[0].error, NonFiniteLogitsError) and outs[0].finish_reason == "error"
    scores = broken.score([[70, 71, 72]], on_error="return")
    assert isinstance(scores[0].error, NonFiniteLogitsError)


def write_broken(path, write_model):
    """The tiny model with a NaN in its last norm."""
    from safetensors.numpy import load_file, save_file

    write_model(path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, path / "model.safetensors")
    return path


def test_continuation_goes_on_bit_for_bit(open_tiny):
    llm = open_tiny()
    params = RANDOM.replace(repetition_penalty=1.2, frequency_penalty=0.3)
    whole = llm.generate("hello", params)[0]
    for cut in (1, 8, 23):
        prompt = {"prompt_token_ids": whole.prompt_token_ids, "output_token_ids": whole.token_ids[:cut]}
        rest = llm.generate(prompt, params)[0].outputs[0]
        assert rest.token_ids == whole.token_ids[cut:] and rest.num_prior_tokens == cut
        assert rest.sampled.full.tobytes() == whole.outputs[0].sampled.full[cut:].tobytes()
        assert whole.text.endswith(rest.text) and rest.finish_reason == "length"
    done = llm.generate({"prompt_token_ids": [5], "output_token_ids": whole.token_ids}, params)[0].outputs[0]
    assert (done.token_ids, done.finish_reason, done.text) == ([], "length", "")
    end = llm.tokenizer.eos_token_ids[0]
    ended = llm.generate({"prompt_token_ids": [5], "output_token_ids": [7, end]}, max_tokens=9)[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason) == ([], "stop")


def test_cache_and_salt(open_tiny):
    llm = open_tiny()
    ids = list(range(3, 53))
    hits = [llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, max_tokens=1)[0] for salt in ("a", "a", "b")]
    assert [out.num_cached_tokens for out in hits] == [0, 48, 0]
    assert llm.reset_prefix_cache() and llm.stats().prefix_cache_hits == 48
    again = llm.generate({"prompt_token_ids": ids, "cache_salt": "a"}, max_tokens=1)[0]
    assert again.num_cached_tokens == 0
    off = open_tiny(enable_prefix_caching=False)
    assert [off.generate([ids], max_tokens=1)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_model_length(open_tiny):
    llm = open_tiny(max_model_len=32)
    out = llm.generate([5] * 30, max_tokens=None, ignore_eos=True)[0]
    assert len(out.token_ids) == 2 and out.finish_reason == "length"
    assert open_tiny().config.max_model_len == 256
    small = 2 * 16 * 2 * 2 * 16 * 4
    with pytest.warns(UserWarning, match="max_model_len is [0-9]+, not the model's 256"):
        fits = open_tiny(kv_cache_memory_bytes=9 * small).config.max_model_len
    assert 64 <= fits < 256
    assert open_tiny(kv_cache_memory_bytes=9 * small, max_model_len="auto").config.max_model_len == fits
    with pytest.raises(ConfigError, match=r"^max_model_len=200 needs .* of KV cache, .* available\. [0-9]+ tokens would fit"):
        open_tiny(kv_cache_memory_bytes=9 * small, max_model_len=200)
    with pytest.raises(ConfigError, match="max_model_len must be at most 256"):
        open_tiny(max_model_len=300)
    with pytest.raises(DeviceMemoryError, match=r"wanted \d+ bytes") as caught:
        open_tiny(kv_cache_memory_bytes="1000TiB")
    assert caught.value.wanted_bytes > caught.value.free_bytes > 0


def test_dummy_weights(open_tiny, write_model, tmp_path):
    path = write_model(tmp_path)
    (path / "model.safetensors").unlink()
    llm, other = open_tiny(path, load_format="dummy"), open_tiny(path, load_format="dummy", seed=4)
    outs = [engine.generate("hello", temperature=0, logprobs=0)[0] for engine in (llm, other)]
    assert llm.weight_version == "dummy" == outs[0].weight_version
    assert outs[0].outputs[0].sampled.raw.tobytes() != outs[1].outputs[0].sampled.raw.tobytes()
    assert open_tiny(path, load_format="dummy").generate("hello", temperature=0).token_ids == [outs[0].token_ids]
    with pytest.raises(ConfigError, match="load_format must be 'auto' or 'safetensors'"):
        open_tiny(load_format="gguf")


def test_config_is_resolved_and_builds_an_equal_engine(device, open_tiny):
    llm = open_tiny(max_num_seqs=4)
    config = llm.config
    assert (config.device, config.dtype, config.kv_cache_dtype, config.max_num_batched_tokens) == (
        device, "float32", "float32", 8192 if device.startswith("cuda") else 512,
    )  # fmt: skip
    assert config.kv_cache_memory_bytes == 16 << 20 and config.vocab_limit == 300
    with LLM.from_config(config) as other:
        assert other.config == config
        assert other.generate("hello", RANDOM).token_ids == llm.generate("hello", RANDOM).token_ids
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.7, max_tokens=256)
    assert open_tiny(generation_config="none").get_default_sampling_params() == SamplingParams(max_tokens=256)
    half = open_tiny(dtype="bfloat16")
    assert half.config.kv_cache_dtype == "bfloat16" and {info["dtype"] for info in half.weight_info("*proj*")} == {"bfloat16"}


def test_chat_and_introspection(open_tiny):
    llm = open_tiny()
    out = llm.chat([{"role": "user", "content": "hi"}], max_tokens=3)[0]
    assert out.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert open_tiny(chat_template="{{ messages[0].content }}?").chat("hi", max_tokens=1)[0].prompt == "hi?"
    names = [info["name"] for info in llm.weight_info()]
    assert "model.layers.0.self_attn.q_proj.weight" in names and len(llm.weight_info("*.mlp.*")) == 6
    assert llm.program() and llm.memory()["kv"] > 0 and llm.ranks()[0]["weights_bytes"] == llm.memory()["weights"]
    stats = llm.stats()
    assert stats.prompt_tokens > 0 and stats.num_unfinished == 0 and stats.kv_usage == 0


def test_statistics(open_tiny):
    llm = open_tiny()
    assert llm.step_log() == [] and sum(sum(h.counts) for h in llm.histograms().values()) == 0
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate([[5, 6, 7], [8] * 40], greedy)
    llm.generate([8] * 40, greedy.replace(max_tokens=3))
    steps, stats, histograms = llm.step_log(4096), llm.stats(), llm.histograms()
    assert [step.number for step in steps] == list(range(1, stats.num_steps + 1))
    assert all(s.rows == s.prompt_rows + s.decode_rows + s.redone_rows + s.wasted_rows + s.draft_rows for s in steps)
    assert sum(s.prompt_rows for s in steps) == 83 - stats.prefix_cache_hits and stats.prefix_cache_hits == 32
    assert sum(s.decode_rows for s in steps) == 4 + 4 + 2  # the last token is never computed
    assert sum(s.tokens for s in steps) == stats.generation_tokens == 13
    assert stats.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0} and stats.redone_rows == 0
    assert max(s.running for s in steps) == 2 and steps[0].admitted == 2 and steps[-1].device_us > 0
    assert llm.step_log(2) == steps[-2:] and llm.step_log(0) == []
    assert histograms["prompt_tokens"].sum == 83 and histograms["output_tokens"].sum == 13
    counts = {name: sum(h.counts) for name, h in histograms.items()}
    assert counts.pop("step_rows") == stats.num_steps and histograms["step_rows"].sum == sum(s.rows for s in steps)
    assert counts.pop("inter_token_s") == 13 - 3 and set(counts.values()) == {3}
    assert all(len(h.counts) == len(h.bounds) + 1 for h in histograms.values())
    assert histograms["samples"].sum == 3 and histograms["max_tokens"].sum == 5 + 5 + 3
    sums = {name: h.sum for name, h in histograms.items()}
    assert 0 < sums["time_to_first_token_s"] < sums["end_to_end_s"]
    assert sums["queue_s"] + sums["prefill_s"] == pytest.approx(sums["time_to_first_token_s"])
    assert sums["inter_token_s"] == pytest.approx(sums["decode_s"]) and sums["decode_s"] < sums["inference_s"]
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        llm.step_log(-1)


def test_ctrl_c(open_tiny):
    llm = open_tiny(max_num_seqs=2)
    with pytest.raises(GenerationInterrupted) as caught:
        llm.generate([[5, 6]] * 4000, max_tokens=200, ignore_eos=True, use_tqdm=InterruptingBar(llm, 500))
    reasons = [out.finish_reason for out in caught.value.partial]
    assert len(reasons) == 4000 and "abort" in reasons and llm.stats().num_unfinished == 0
    assert llm.generate("hello", RANDOM)[0].finished
    llm.check()


def wait_until_running(llm):
    deadline = time.monotonic() + 60
    while not llm.stats().num_running:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_driver(open_tiny):
    llm = open_tiny(max_num_seqs=1)

    def drive():
        with pytest.raises(EngineClosedError):
            llm.generate([[5, 6]] * 2000, max_tokens=200, ignore_eos=True)

    thread = threading.Thread(target=drive)
    thread.start()
    wait_until_running(llm)
    with pytest.raises(EngineBusyError, match="engine is in use by another thread"):
        llm.generate("hello")
    assert isinstance(llm.add_request("hello", max_tokens=1), str)
    llm.close()
    thread.join(60)
    assert not thread.is_alive()


def test_close_while_another_thread_drives(open_tiny):
    llm = open_tiny(max_num_seqs=1)
    caught = []

    def work():
        try:
            llm.generate([[5, 6]] * 2000, max_tokens=200, ignore_eos=True)
        except EngineClosedError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until_running(llm)
    llm.close()
    thread.join(60)
    assert caught == ["engine is closed"]


def test_fork_and_close(open_tiny):
    llm = open_tiny()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        message = "nothing"
        try:
            llm.generate("a")
        except EngineClosedError as error:
            message = str(error)
        llm.close()
        del llm
        os.write(write, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode().startswith(f"engine belongs to process {os.getpid()};")
    wanted = llm.generate("hello", RANDOM).token_ids
    llm.add_request("hello")
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate("hello")
    assert open_tiny().generate("hello", RANDOM).token_ids == wanted
