"""A failure outside the core fails one request: its reader gets the error, and the next request is served."""

import asyncio
import os
import threading

import pytest
from async_help import run
from failures import PanicError, failing

from llmpy import SamplingParams, async_engine
from llmpy.engine import jobs
from llmpy.engine.feeds import Feed
from llmpy.engine.thread import Link

LONG_TEXT = "hello " * 100
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


ERRORS = [RuntimeError, KeyError, MemoryError, StopIteration, StopAsyncIteration, Exception, PanicError, SystemExit]
ERRORS += [asyncio.CancelledError]


@pytest.fixture(autouse=True)
def short_texts_are_long(monkeypatch):
    """The helper thread tokenises texts that fit into a tiny model."""
    monkeypatch.setattr(async_engine, "LONG_TEXT_CHARS", 100)


async def serves(engine):
    """Whether a short and a long request are served."""
    async with asyncio.timeout(60):
        assert len((await engine.generate("hello", SHORT)).outputs[0].token_ids) == 2
        assert len((await engine.generate(LONG_TEXT, SHORT)).outputs[0].token_ids) == 2
        while engine._driver.jobs:
            await asyncio.sleep(0.001)
    engine.check_health()
    return True


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_while_text_is_tokenised(open_async, monkeypatch, error):
    engine = open_async(fresh=True)
    cause = error("told")

    async def main():
        left = failing(monkeypatch, engine._frontend.tokenizer, "encode_batch", cause)
        with pytest.raises(Exception) as caught:  # never a BaseException, which would end the reader's loop
            async with asyncio.timeout(60):
                await engine.generate(LONG_TEXT, SHORT)
        assert left == [0]
        assert caught.value is cause or caught.value.__cause__ is cause, caught.value
        assert await serves(engine)
        await engine.shutdown("drain", 60)

    run(main())


@pytest.mark.parametrize("error", [RuntimeError, KeyError, MemoryError, PanicError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("place", ["before", "after"])
def test_an_error_while_output_are_told(open_async, monkeypatch, error, place):
    """Output that the loop's callback took but could not deliver are delivered in the next round."""
    engine, left = open_async(fresh=True), [3]

    def break_some(name):
        real = getattr(Link, name)

        def tell(link):
            if left[0]:
                left[0] -= 1
                if place == "after":
                    link.notifier.take()
                raise error("told")
            real(link)

        monkeypatch.setattr(Link, name, tell)

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await engine.pause("keep")
        readers = [asyncio.create_task(engine.generate("hello", SHORT)._final()) for _ in range(3)]
        await asyncio.sleep(0.01)  # they wait for output from here on
        break_some("_tell_output")
        break_some("_look_everywhere")
        await engine.resume()
        async with asyncio.timeout(60):
            assert [len((await reader).outputs[0].token_ids) for reader in readers] == [2] * 3
            await engine.pause("keep")
            await engine.resume()
        assert left == [0] and await serves(engine)

    run(main())


@pytest.mark.parametrize("error", [RuntimeError, KeyError, MemoryError, PanicError], ids=lambda error: error.__name__)
def test_an_error_while_a_reader_is_woken(open_async, monkeypatch, error):
    engine = open_async(fresh=True)

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        failing(monkeypatch, engine._frontend.tokenizer, "encode_batch", ValueError("first"))
        left = failing(monkeypatch, Feed, "wake", error("told"), times=3)
        with pytest.raises(ValueError, match="first"):
            async with asyncio.timeout(60):
                await engine.generate(LONG_TEXT, SHORT)
        assert left == [0] and await serves(engine)

    run(main())


@pytest.mark.parametrize("place", ["append", "write"])
def test_a_lack_of_memory_while_a_reader_is_woken(open_async, monkeypatch, place):
    engine = open_async(fresh=True)

    async def main():
        failing(monkeypatch, engine._frontend.tokenizer, "encode_batch", ValueError("first"))
        owner, name = (Link, "wake") if place == "append" else (os, "eventfd_write")
        left = failing(monkeypatch, owner, name, MemoryError(), times=3)
        with pytest.raises(ValueError, match="first"):
            async with asyncio.timeout(60):
                await engine.generate(LONG_TEXT, SHORT)
        assert left == [0] and await serves(engine)

    run(main())


def test_a_request_that_fails_once_its_engine_is_closed(open_async, monkeypatch):
    """The loop has removed its reader by then; the failure is delivered in another way."""
    engine, begun, goes_on = open_async(fresh=True), threading.Event(), threading.Event()

    def encode(*args):
        begun.set()
        goes_on.wait(60)
        raise ValueError("late")

    async def main():
        monkeypatch.setattr(engine._frontend.tokenizer, "encode_batch", encode)
        stream = engine.generate(LONG_TEXT, SHORT)
        reader = asyncio.create_task(stream._final())
        await asyncio.sleep(0)
        assert begun.wait(60)
        await engine.shutdown("abort")
        goes_on.set()
        async with asyncio.timeout(60):
            with pytest.raises(ValueError, match="late"):
                await reader

    run(main())


def test_threads_that_cannot_start(open_async, monkeypatch):
    """An engine has its thread from the start; a request that needs another thread fails alone."""
    engine = open_async(fresh=True)

    def fail(self):
        raise RuntimeError("can't start new thread")

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            patch.setattr(jobs, "_shared", None)
            assert await serves(engine)
            for call in (engine.sleep, engine.weight_checksum):
                with pytest.raises(RuntimeError, match="wanted a helper thread"):
                    await call()
            with pytest.raises(RuntimeError, match="wanted a helper thread"):
                engine.begin_update()
            with pytest.raises(RuntimeError, match="wanted a helper thread"):
                open_async(fresh=True)
        assert await serves(engine)
        assert await engine.weight_checksum()
        await engine.sleep()
        await engine.wake_up()
        assert await serves(engine)

    run(main())
