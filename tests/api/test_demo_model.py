"""The demo model through the public interface: real text, real templates, real stop strings."""

import asyncio
import gc
import hashlib
import resource
import time
from pathlib import Path

import pytest

from llmpy import LLM, AsyncEngine, BeamSearchParams, RequestFailedError, SamplingParams

TEXTS = ["The capital of France is", "日本の首都は", "def add(a, b):\n    return", "Привет, как", "😀😀😀 means", "A list:\n1."]


@pytest.fixture(scope="module")
def llm(demo_model, device):
    with LLM(demo_model, device=device, max_model_len=2048, kv_cache_memory_bytes="256MiB") as llm:
        yield llm


def test_deltas_join_to_the_text_and_to_one_decode(llm):
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=3, ignore_eos=True, logit_bias={3: 3.0})
    for skip in (True, False):
        wanted = llm.generate(TEXTS, params.replace(skip_special_tokens=skip))
        for text, out in zip(TEXTS, wanted, strict=True):
            chunks = list(llm.stream(text, params.replace(skip_special_tokens=skip)))
            assert "".join(chunks) == out.text and not any("\ufffd" in chunk for chunk in chunks if "\ufffd" not in out.text)
            decode = llm.tokenizer.decode
            whole = decode(out.prompt_token_ids + out.token_ids, skip_special_tokens=skip)
            assert whole == decode(out.prompt_token_ids, skip_special_tokens=skip) + out.text


def test_stop_strings_across_tokens(llm):
    free = llm.generate("Once upon a time", temperature=0, max_tokens=24)[0]
    for start in range(3, len(free.text) - 9, 19):
        stop = free.text[start : start + 6]
        out = llm.generate("Once upon a time", temperature=0, max_tokens=24, stop=stop)[0].outputs[0]
        assert out.text == free.text[: free.text.index(stop)] and out.stop_reason == stop
        assert out.token_ids == free.token_ids[: len(out.token_ids)]
        assert stop not in llm.tokenizer.decode(out.token_ids[:-1])


def test_chat_ends_where_the_model_ends(llm):
    out = llm.chat("What is the capital of Italy?", temperature=0, max_tokens=200)[0]
    assert "Ital" in out.text and out.finish_reason == "stop" and "<|im_end|>" not in out.text
    assert out.token_ids[-1] in llm.tokenizer.eos_token_ids
    assert "".join(llm.stream_chat("What is the capital of Italy?", temperature=0, max_tokens=200)) == out.text
    shown = llm.chat(
        "What is the capital of Italy?", temperature=0, max_tokens=200, include_stop_str_in_output=True,
        skip_special_tokens=False,
    )[0]  # fmt: skip
    assert shown.text == out.text + "<|im_end|>"


def test_score_prefers_the_truth(llm):
    scores = llm.score(["The capital of France is"] * 3, [" Paris", " Berlin", " banana"])
    assert scores[0].sum_logprob > scores[1].sum_logprob > scores[2].sum_logprob
    assert all(score.start == len(llm.tokenizer.encode("The capital of France is")) for score in scores)


@pytest.mark.parametrize("arguments", [(), ("demo",)])
def test_it_is_the_default(demo_model, arguments):
    with LLM(*arguments, device="cpu", max_model_len=64, kv_cache_memory_bytes="8MiB") as llm:
        assert (llm.config.model, llm.name) == ("demo", demo_model.stem)
        assert llm.generate("The capital of France is", temperature=0, max_tokens=1).texts == [" Paris"]


def test_ready_soon_and_gone_with_its_last_name(demo_model: Path):
    start = time.process_time()
    llm = LLM(demo_model, device="cpu")
    loaded = time.process_time()
    hashlib.sha256(demo_model.read_bytes())
    assert loaded - start < 100 * (time.process_time() - loaded), "the processor's time, and that of reading the file's bytes"
    llm.generate("Hi", max_tokens=2)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    gc.disable()
    try:
        del llm
        freed = (before - int(Path("/proc/self/statm").read_text().split()[1])) * resource.getpagesize()
    finally:
        gc.enable()
    assert freed > 90e6


def test_beams_keep_to_stop_strings_and_grammars(llm):
    prompt, width = "The capital of France is", 4

    def search(**fields):
        return llm.beam_search([prompt], BeamSearchParams(width, 10, **fields))[0].sequences

    stopped = search(stop=".")
    assert (stopped[0].text, stopped[0].stop_reason) == (" Paris", ".") and all("." not in one.text for one in stopped)
    assert search(stop=".", include_stop_str_in_output=True)[0].text == " Paris."
    choice = search(structured_outputs={"choice": ["x", "y"]})
    assert [one.text for one in choice] in (["x", "y"], ["y", "x"])  # no other text is possible
    for one in [*stopped, *choice]:  # a candidate keeps its logprob among all ids
        scored = llm.score([one.tokens], start=len(one.tokens) - len(one.token_ids))[0]
        assert one.cum_logprob == pytest.approx(scored.sum_logprob, abs=1e-4)
        assert one.score == one.cum_logprob / len(one.token_ids)
    llm.check()
    assert llm.stats().allocations_since_warmup == 0


def test_beams_of_an_async_engine(demo_model, device):
    async def run():
        async with AsyncEngine.create(demo_model, device=device, max_model_len=512) as engine:
            params = BeamSearchParams(3, 6)
            found = await asyncio.gather(*(engine.beam_search(text, params) for text in TEXTS[:2]), engine.generate("Hi"))
            pending = engine.beam_search(TEXTS[0], BeamSearchParams(3, 400, ignore_eos=True), "long")
            await asyncio.sleep(0.1)
            await engine.abort("long")
            with pytest.raises(RequestFailedError, match="aborted"):
                await pending
            engine.check()
            return [output.sequences for output in found[:2]]

    with LLM(demo_model, device=device, max_model_len=512) as llm:
        wanted = llm.beam_search(TEXTS[:2], BeamSearchParams(3, 6))
    assert [[one.tokens for one in sequences] for sequences in asyncio.run(run())] == [
        [one.tokens for one in output.sequences] for output in wanted
    ]
