"""Helpers of the tests that run engines step by step."""

import asyncio
import time

from llmpy import SamplingParams

PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=5, logprobs=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, temperature=0.9, seed=5, ignore_eos=True)
ENDLESS = LONG.replace(max_tokens=4000)
"""A request long enough to be still running when a test looks at it."""
SECONDS = 120


def run(coroutine):
    async def limited():
        async with asyncio.timeout(SECONDS):
            return await coroutine

    return asyncio.run(limited())


def wait_until_free(engine):
    """Waits until no request holds anything."""
    deadline = time.monotonic() + SECONDS
    while (stats := engine.stats()).num_unfinished or stats.kv_blocks_free != stats.kv_blocks_total:
        assert time.monotonic() < deadline, stats
        time.sleep(0.002)
    engine.check()
    assert stats.num_running == stats.num_waiting == 0


def bits(sample):
    return sample.token_ids_array.tobytes(), sample.sampled.raw.tobytes(), sample.logprobs.values.tobytes(), sample.text


def drain(llm):
    """Runs the added requests to their end; returns outputs by request."""
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step() if output.finished}
    return outputs


async def read(stream):
    return [output async for output in stream]
