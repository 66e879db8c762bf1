"""What fails beside the core fails one request: its reader hears of it, and the next request is served."""

import asyncio

import pytest
from async_help import run

from llmpy import SamplingParams, async_engine

LONG_TEXT = "hello " * 100
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


class PanicError(BaseException):
    """What a panic of a Rust library looks like: no Exception."""


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


def failing(monkeypatch, owner, name, error, times=1):
    """Makes a function raise so many times, then work again."""
    real, left = getattr(owner, name), [times]

    def call(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return left


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
