"""AsyncEngine on the real core: streams, handles, back-pressure, event loops."""

import asyncio
import gc
import itertools
import random
import threading
import time

import numpy as np
import pytest
from async_help import LONG, PARAMS, SECONDS, bits, read, run, wait_until_free

from llmpy import LLM, InvalidRequestError, QueueFullError, RequestOutputKind, UnsupportedError, async_engine
from llmpy.engine import jobs
from llmpy.engine.feeds import Feed
from llmpy.text.tokenizer import Tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


# ---- outputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_the_three_kinds_give_what_llm_gives(open_async, open_long, n):
    params = PARAMS.replace(n=n, max_tokens=150)
    wanted = open_long().generate("hello there", params)[0]
    engine = open_async()

    async def main():
        return [await read(engine.generate("hello there", params.replace(output_kind=kind))) for kind in RequestOutputKind]

    cumulative, delta, final = run(main())
    for outputs in (cumulative, delta, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(final) == 1
    for i, sample in enumerate(wanted.outputs):
        assert bits(final[0].outputs[i]) == bits(cumulative[-1].outputs[i]) == bits(sample)
        parts = [part for output in delta for part in output.outputs if part.index == i]
        assert "".join(part.text for part in parts) == sample.text
        assert b"".join(part.token_ids_array.tobytes() for part in parts) == sample.token_ids_array.tobytes()
        assert b"".join(part.sampled.full.tobytes() for part in parts) == sample.sampled.full.tobytes()
        assert np.concatenate([part.logprobs.ids for part in parts]).tolist() == sample.logprobs.ids.tolist()
        assert [part.cumulative_logprob for part in parts][-1] == sample.cumulative_logprob
        spans = [span for part in parts for span in part.weight_versions]
        assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]] and spans[-1].end == 150
        assert {(span.version, span.epoch) for span in spans} == {(0, 0)}
        for earlier, later in itertools.pairwise(cumulative):
            assert later.outputs[i].text.startswith(earlier.outputs[i].text)
    wait_until_free(engine)


def test_many_at_once_give_what_each_gives_alone(open_async, open_long):
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(rng.randrange(1, 60))] for _ in range(40)]
    params = [PARAMS.replace(max_tokens=rng.randrange(1, 40), seed=i) for i in range(40)]
    wanted = open_long().generate(prompts, params)
    engine = open_async(max_num_seqs=8, max_num_batched_tokens=64)

    async def main():
        return await asyncio.gather(*[engine.generate(p, q) for p, q in zip(prompts, params, strict=True)])

    for output, expected in zip(run(main()), wanted, strict=True):
        assert bits(output.outputs[0]) == bits(expected.outputs[0])
    wait_until_free(engine)


def test_awaiting_a_stream_gives_the_whole_output_in_every_kind(open_async):
    engine = open_async()

    async def main():
        streams = [engine.generate("hello", PARAMS.replace(output_kind=kind)) for kind in RequestOutputKind]
        outputs = [await stream for stream in streams]
        assert len({bits(output.outputs[0]) for output in outputs}) == 1
        assert all(stream.finished for stream in streams)
        with pytest.raises(RuntimeError, match="was already read"):
            await streams[0]
        assert await read(streams[0]) == []

    run(main())


def test_a_stream_made_outside_a_loop_is_read_in_one(open_async):
    engine = open_async()
    stream = engine.generate("hello", PARAMS, "mine")
    assert stream.request_id == "mine" and repr(stream) == "RequestStream(mine, running)"
    wait_until_free(engine)
    assert run(read(stream))[-1].finished
    assert repr(stream) == "RequestStream(mine, finished)"


def test_text_and_tokens_are_made_only_when_asked_for(open_async):
    engine = open_async()
    output = run(main := engine.generate("hello", LONG.replace(detokenize=False, output_kind=DELTA))._final())
    assert main and output.text == "" and len(output.token_ids) == 500 and output.outputs[0].logprobs is None


def test_stop_strings_that_only_text_can_match(open_async, open_long):
    base = LONG.replace(skip_special_tokens=False, spaces_between_special_tokens=False)
    text = open_long().generate("hello", base)[0].text
    stop = next(text[i : i + 2] for i in range(100, len(text) - 2) if text[i : i + 2].isascii() and text[i : i + 2].isalpha())
    params = base.replace(stop=stop)
    wanted = open_long().generate("hello", params)[0].outputs[0]
    assert wanted.stop_reason == stop
    engine = open_async()

    async def main():
        awaited = await engine.generate("hello", params)
        outputs = await read(engine.generate("hello", params.replace(output_kind=DELTA)))
        assert awaited.text == wanted.text == "".join(output.text for output in outputs)
        assert awaited.token_ids == wanted.token_ids and outputs[-1].outputs[0].stop_reason == stop

    run(main())
    wait_until_free(engine)


def test_chat_and_score(open_async, open_long):
    llm, engine = open_long(), open_async()
    wanted, score = llm.chat("hi", PARAMS)[0], llm.score("hello world", logprobs=2)[0]

    async def main():
        output = await engine.chat("hi", PARAMS)
        assert output.prompt == wanted.prompt and bits(output.outputs[0]) == bits(wanted.outputs[0])
        pending = engine.score("hello world", logprobs=2)
        found = await pending
        assert found.token_logprobs.tobytes() == score.token_logprobs.tobytes()
        assert found.top.values.tobytes() == score.top.values.tobytes()
        pair = await engine.score("hello", " world")
        assert pair.start == llm.score("hello", " world")[0].start
        assert len((await engine.score([1, 2, 3], start=3)).token_logprobs) == 0
        with pytest.raises(InvalidRequestError, match="start must be in"):
            engine.score([1, 2, 3], start=4)

    run(main())
    wait_until_free(engine)


# ---- submission ---------------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_in_the_call(open_async):
    engine = open_async()

    async def main():
        with pytest.raises(InvalidRequestError, match="cannot be empty"):
            engine.generate("")
        with pytest.raises(InvalidRequestError, match="longer than the maximum model length"):
            engine.generate([1] * 5000)
        with pytest.raises(TypeError, match="one prompt"):
            engine.generate(["a", "b"])
        with pytest.raises(TypeError, match="sampling_params must be"):
            engine.generate("a", {"temperature": 0})
        with pytest.raises(InvalidRequestError, match="out of vocabulary"):
            engine.generate([1, 500])
        with pytest.raises(InvalidRequestError, match=r"^lora_request: .*enable_lora=True"):
            engine.generate("a", lora_request="a")
        await engine.pause("keep")
        stream = engine.generate("a", LONG, "same")
        with pytest.raises(InvalidRequestError, match="request_id same is already in use"):
            engine.generate("b", LONG, "same")
        await engine.resume()
        await stream
        await engine.generate("b", PARAMS, "same")
        await engine.generate("b", max_tokens=2)

    run(main())
    assert not engine._driver.named and not engine._driver.feeds
    wait_until_free(engine)


def test_an_id_is_free_once_its_request_has_ended_unread(open_async):
    engine = open_async()
    first = engine.generate("a", PARAMS, "same")
    wait_until_free(engine)
    second = engine.generate("a", PARAMS, "same")
    assert run(read(second))[-1].finished and run(read(first))[-1].finished


def test_long_text_fails_when_it_is_read(open_async):
    engine = open_async()

    async def main():
        streams = [engine.generate("hello " * 2000, PARAMS), engine.generate("hello", PARAMS), engine.generate("a b", PARAMS)]
        with pytest.raises(InvalidRequestError, match="longer than the maximum model length"):
            await anext(streams[0])
        outputs = [await stream for stream in streams[1:]]
        assert outputs[0].metrics.queued_ts < outputs[1].metrics.queued_ts
        dropped = engine.generate("hello " * 2000, PARAMS)
        dropped.close()
        with pytest.raises(InvalidRequestError, match="Requested sample logprobs of 100"):
            engine.generate("hello " * 2000, PARAMS.replace(logprobs=100))
        with pytest.raises(InvalidRequestError, match=r"bytes of text\) is longer than the maximum model length"):
            engine.generate("hello " * 100_000, PARAMS)  # at once: no number of tokens can be so few

    run(main())
    wait_until_free(engine)
    assert not engine._driver.named


@pytest.fixture
def held(monkeypatch):
    """Delays tokenising of texts that begin with "wait" until the event is set; long texts are those over 40 characters."""
    gate, encode = threading.Event(), Tokenizer.encode_batch

    def waiting(self, texts, add_special_tokens=True):
        if any(text.startswith("wait") for text in texts):
            assert gate.wait(60)
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", waiting)
    monkeypatch.setattr(async_engine, "LONG_TEXT_CHARS", 40)
    monkeypatch.setattr(jobs, "LONG_WORK", 100)
    yield gate
    gate.set()


@pytest.fixture
def many_threads(monkeypatch):
    """The number of helper threads for long texts on a machine with 16 processors."""
    monkeypatch.setattr(jobs.os, "cpu_count", lambda: 16)


def test_short_texts_pass_long_ones(open_async, held):
    """A text tokenised at once, and one tokenised on a thread, while the threads for longer texts are busy."""
    engine = open_async(fresh=True)

    async def main():
        long = [engine.generate("wait " * 30, PARAMS) for _ in range(8)]
        async with asyncio.timeout(60):
            await engine.generate("hello", PARAMS)
            await engine.generate("hello " * 10, PARAMS)
        assert len(engine._driver.untokenised) == 8
        held.set()
        outputs = [await stream for stream in long]
        assert len({output.outputs[0].token_ids_array.tobytes() for output in outputs}) == 1

    run(main())
    assert not engine._driver.untokenised


def test_output_that_comes_before_its_request_is_registered(open_async, monkeypatch):
    """A helper thread submits a long text, and the loop takes the notification of its end before the thread has gone on."""
    monkeypatch.setattr(async_engine, "LONG_TEXT_CHARS", 40)
    engine = open_async(fresh=True)

    class Late(dict):
        def __setitem__(self, number, feed):
            time.sleep(0.5)
            super().__setitem__(number, feed)

    engine._driver.feeds = Late()

    async def main():
        async with asyncio.timeout(30):
            output = await engine.generate("hello " * 10, max_tokens=1)
            assert output.finished

    run(main())


def test_texts_that_wait_take_places_until_their_reader_goes(open_async, held, many_threads, monkeypatch):
    """Also a text that a thread has begun to tokenise: it must not reach the core and take the place of an accepted request."""
    engine = open_async(max_queued_requests=3)
    submitted, submit = [], Feed.submit

    def watched(feed, core):
        submitted.append(feed)
        submit(feed, core)

    monkeypatch.setattr(Feed, "submit", watched)

    async def main():
        waiting = [engine.generate("wait " * 30, PARAMS) for _ in range(3)]
        with pytest.raises(QueueFullError, match="wanted fewer than 3 waiting requests, have 3"):
            engine.generate("wait " * 30, PARAMS)
        waiting[1].close()
        again = engine.generate("wait " * 30, PARAMS)
        waiting[2].abort()
        last = engine.generate("wait " * 30, PARAMS)
        with pytest.raises(QueueFullError):
            engine.generate("wait " * 30, PARAMS)
        held.set()
        reasons = [(await stream).outputs[0].finish_reason for stream in (waiting[0], waiting[2], again, last)]
        assert reasons[1] == "abort" and "abort" not in (reasons[0], *reasons[2:])

    run(main())
    assert not engine._driver.untokenised and len(submitted) == 3


def test_bad_words_of_much_text_are_tokenised_on_a_helper_thread(open_async, monkeypatch):
    engine, seen, encode = open_async(), [], Tokenizer.encode_batch

    def watched(self, texts, add_special_tokens=True):
        seen.append((len(texts), threading.current_thread() is threading.main_thread()))
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    words = [f"word{number}" for number in range(100)]
    few = run(read(engine.generate([1, 2, 3], PARAMS.replace(bad_words=words))))[-1]
    monkeypatch.setattr(async_engine, "LONG_TEXT_CHARS", 100)
    many = run(read(engine.generate([1, 2, 3], PARAMS.replace(bad_words=words))))[-1]
    assert seen == [(200, True), (200, False)]
    assert few.outputs[0].token_ids == many.outputs[0].token_ids


def test_long_text_runs(open_async, open_long, monkeypatch):
    monkeypatch.setattr(async_engine, "LONG_TEXT_CHARS", 100)
    text = "hello there " * 50
    wanted = open_long().generate(text, PARAMS)[0]
    output = run(read(open_async().generate(text, PARAMS)))[-1]
    assert bits(output.outputs[0]) == bits(wanted.outputs[0])


def test_equal_prompts_are_computed_once(open_async):
    engine = open_async(max_num_seqs=16)
    prompt = list(range(100))

    async def main():
        await engine.pause("keep")
        streams = [engine.generate(prompt, PARAMS.replace(sample_index=i)) for i in range(16)]
        await engine.resume()
        return [await stream for stream in streams]

    outputs = run(main())
    computed = [len(prompt) - output.num_cached_tokens for output in outputs]
    assert computed[0] == 100 and all(count == 100 - 96 for count in computed[1:])
    assert len({output.outputs[0].token_ids_array.tobytes() for output in outputs}) > 8


def test_the_queue_is_limited(open_async):
    engine = open_async(max_queued_requests=3)

    async def main():
        await engine.pause("keep")
        streams = [engine.generate("a", PARAMS) for _ in range(3)]
        with pytest.raises(QueueFullError, match="raise max_queued_requests") as raised:
            engine.generate("a", PARAMS)
        assert raised.value.num_waiting == 3
        with pytest.raises(QueueFullError):
            engine.generate("hello " * 2000, PARAMS)
        waiting = asyncio.ensure_future(engine.wait_for_capacity())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await engine.resume()
        await waiting
        await asyncio.gather(*streams)

    run(main())
    with pytest.raises(UnsupportedError, match="an option of AsyncEngine"):
        LLM("nowhere", max_queued_requests=3)


# ---- back-pressure ------------------------------------------------------------------------------------------------------


def test_a_slow_reader_gets_merged_outputs_and_delays_no_other_reader(open_async):
    """Twelve streams run to their end while one reader sleeps through its own."""
    engine = open_async()

    quick = LONG.replace(max_tokens=100, output_kind=DELTA, detokenize=False)

    async def timed(name):
        begin = time.perf_counter()
        await asyncio.gather(*[read(engine.generate(f"{name} {i}", quick)) for i in range(12)])
        return time.perf_counter() - begin

    async def main():
        times = []
        for i in range(20):
            slow = engine.generate(f"slow {i}", LONG.replace(max_tokens=1000, output_kind=DELTA))
            first = await anext(slow)
            if first.finished:
                continue
            with_slow = await timed(f"beside {i}")
            assert await engine.wait_for_requests_to_drain()
            rest = await read(slow)
            assert len(rest) == 1 and len(first.token_ids) + len(rest[0].token_ids) == 1000
            times.append((with_slow, await timed(f"alone {i}")))
            if times[-1][0] < 1.5 * times[-1][1]:
                return
        pytest.fail(f"times with and without a slow reader: {times}")

    run(main())


def test_the_engine_goes_on_while_python_is_busy(open_async):
    """The engine's thread needs no GIL: a whole request finishes during one long call that holds the GIL."""
    engine = open_async()
    for _ in range(5):
        handle = engine.add_request("hello", PARAMS)
        sum(range(20_000_000))
        output = handle.poll()
        if output is not None and output.finished:
            return
    pytest.fail("nothing finished while the GIL was held")


# ---- handles ------------------------------------------------------------------------------------------------------------


def test_handles_need_no_loop(open_async, open_long):
    wanted = open_long().generate("hello", PARAMS)[0].outputs[0]
    engine = open_async()
    handle = engine.add_request("hello", PARAMS)
    assert bits(handle.wait(SECONDS).outputs[0]) == bits(wanted) == bits(handle.wait().outputs[0])
    assert handle.poll() is None and handle.finished
    handle = engine.add_request("hello", PARAMS.replace(output_kind=DELTA))
    parts, ids = [], []
    while not handle.finished:
        output = handle.poll()
        if output is not None:
            parts.append(output.text)
            ids += output.token_ids
    assert "".join(parts) == wanted.text and ids == wanted.token_ids
    run(engine.pause("keep"))
    handle = engine.add_request("hello", LONG)
    with pytest.raises(TimeoutError, match="still runs"):
        handle.wait(0)
    run(engine.resume())
    handle.abort()
    assert handle.wait(SECONDS).finish_reason in ("abort", "length")
    del handle
    engine.add_request("dropped", LONG)
    gc.collect()
    wait_until_free(engine)


def test_threads_wait_side_by_side(open_async, open_long):
    wanted = open_long().generate([f"thread {i}" for i in range(8)], PARAMS)
    engine = open_async()
    found = {}

    def work(i):
        found[i] = engine.add_request(f"thread {i}", PARAMS).wait(SECONDS)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for i, output in enumerate(wanted):
        assert bits(found[i].outputs[0]) == bits(output.outputs[0])


# ---- loops --------------------------------------------------------------------------------------------------------------


def test_several_loops_in_several_threads(open_async, open_long):
    prompts = [f"loop {i}" for i in range(24)]
    wanted = open_long().generate(prompts, PARAMS)
    engine = open_async()
    found = {}

    async def main(mine):
        streams = {i: engine.generate(prompts[i], PARAMS.replace(output_kind=DELTA)) for i in mine}
        for i, outputs in zip(streams, await asyncio.gather(*map(read, streams.values())), strict=True):
            found[i] = [token for output in outputs for token in output.token_ids]

    threads = [threading.Thread(target=lambda start=start: run(main(range(start, 24, 3)))) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [found[i] for i in range(24)] == [output.token_ids for output in wanted]
    wait_until_free(engine)


def test_a_stream_moves_to_the_loop_that_reads_it(open_async):
    engine = open_async()

    async def begin():
        stream = engine.generate("hello", LONG.replace(max_tokens=2000))
        return stream, await anext(stream)

    for _ in range(10):
        stream, first = run(begin())
        if not first.finished:
            assert len(run(read(stream))[-1].token_ids) == 2000
            return
    pytest.fail("every request had finished before its first output was read")


def test_a_loop_that_is_closed_with_streams_open(open_async):
    engine = open_async()

    async def leave():
        return [engine.generate("hello", LONG) for _ in range(5)]

    for _ in range(3):
        loop = asyncio.new_event_loop()
        streams = loop.run_until_complete(leave())
        loop.close()
        del streams
    gc.collect()
    wait_until_free(engine)
    assert run(read(engine.generate("hello", PARAMS)))[-1].finished
    del loop
    gc.collect()
    assert len(engine._driver._links) <= 2


def test_who_gives_up_waiting_is_forgotten(open_async):
    engine = open_async()

    async def main():
        await engine.pause("keep")
        stream = engine.generate("hello", PARAMS)
        for _ in range(3):
            assert not await engine.wait_for_requests_to_drain(timeout=0.01)
        waiting = asyncio.ensure_future(engine.wait_for_requests_to_drain())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not engine._driver.link(asyncio.get_running_loop())._waiting
        await engine.resume()
        await stream

    run(main())
    gc.collect()
    assert not [loop for loop in engine._driver._links if loop.is_closed()]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_deltas_of_tokens_alone_are_the_whole(open_async, open_long, logprobs):
    """Deltas without text use a shorter code path than deltas with text."""
    params = LONG.replace(detokenize=False, logprobs=logprobs, max_tokens=90)
    wanted = open_long().generate("hello there", params)[0]
    engine = open_async()

    async def main():
        outputs = await read(engine.generate("hello there", params.replace(output_kind=DELTA)))
        samples = [output.outputs[0] for output in outputs]
        assert [token for sample in samples for token in sample.token_ids] == wanted.token_ids
        assert [(o.finished, s.finish_reason, s.text) for o, s in zip(outputs[:-1], samples, strict=False)] == [
            (False, None, "")
        ] * (len(outputs) - 1)
        assert outputs[-1].finished and samples[-1].finish_reason == "length"
        ends = np.cumsum([len(sample.token_ids) for sample in samples]).tolist()
        assert [span.end for sample in samples for span in sample.weight_versions] == ends
        assert [output.metrics.num_generation_tokens for output in outputs] == ends
        assert all(output.num_cached_tokens == outputs[0].num_cached_tokens for output in outputs)
        assert all(output.prompt_token_ids == wanted.prompt_token_ids and output.seed == wanted.seed for output in outputs)
        if logprobs is None:
            return
        whole = wanted.outputs[0]
        for name in ("raw", "full", "processed", "kept_mass", "rank"):
            assert b"".join(getattr(s.sampled, name).tobytes() for s in samples) == getattr(whole.sampled, name).tobytes()
        assert np.concatenate([s.logprobs.values for s in samples]).tobytes() == whole.logprobs.values.tobytes()
        assert samples[-1].cumulative_logprob == whole.cumulative_logprob

    run(main())


def test_an_end_without_tokens_has_the_shape_of_its_logprobs(open_async):
    engine = open_async()

    async def main():
        await engine.pause("keep")
        stream = engine.generate("hello", PARAMS.replace(output_kind=DELTA))
        stream.abort()
        return (await stream).outputs[0]

    sample = run(main())
    run(engine.resume())
    assert sample.logprobs.ids.shape == sample.logprobs.values.shape == (0, PARAMS.logprobs + 1)
    assert len(sample.logprobs) == 0
