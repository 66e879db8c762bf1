"""AsyncEngine on the real core: cancels, aborts, pauses, shutdown, death, processes that end."""

import asyncio
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from async_help import ENDLESS, LONG, PARAMS, SECONDS, read, run, wait_until_free

from llmpy import (
    AsyncEngine,
    DeviceError,
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    RequestOutputKind,
)

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


# ---- ending early -------------------------------------------------------------------------------------------------------


def test_cancelling_closing_and_dropping_free_the_blocks(open_async):
    engine = open_async()

    async def fail_in_the_middle(stream):
        async for _ in stream:
            raise ValueError("reader")

    async def main():
        streams = [engine.generate("a", LONG) for _ in range(4)]
        tasks = [asyncio.ensure_future(read(stream)) for stream in streams[:2]]
        tasks.append(asyncio.ensure_future(_await(engine.generate("b", LONG))))
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(isinstance(result, Exception) for result in results)  # cancelled, or read to the end before
        streams[2].close()
        assert await read(streams[2]) == []
        await streams[3].aclose()
        engine.generate("dropped at once", LONG)
        with pytest.raises(ValueError, match="reader"):
            await fail_in_the_middle(engine.generate("c", LONG))
        aborted = engine.generate("d", LONG)
        await anext(aborted)
        aborted.abort()
        aborted.abort()
        outputs = await read(aborted)
        assert not outputs or outputs[-1].finish_reason in ("abort", "length")

    run(main())
    gc.collect()
    wait_until_free(engine)
    assert not engine._driver.named and not engine._driver.feeds


async def _await(stream):
    return await stream


def test_closing_a_stream_ends_its_reader(open_async):
    engine = open_async()

    async def main():
        await engine.pause("keep")
        stream = engine.generate("a", LONG)
        reader = asyncio.ensure_future(read(stream))
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="another task is reading"):
            await anext(stream)
        stream.close()
        assert await reader == []
        await engine.resume()

    run(main())
    wait_until_free(engine)


def test_abort_returns_partial_outputs_that_continue_bit_for_bit(open_async):
    engine = open_async()
    params = LONG.replace(logprobs=2, presence_penalty=0.5)

    async def main():
        whole = await engine.generate("hello there", params)
        streams = [engine.generate("hello there", params, f"r{i}") for i in range(3)]
        kept = engine.generate("hello there", params, "kept")
        async for output in streams[0]:
            if len(output.token_ids) > 20:
                break
        partial = await engine.abort(["r0", "r1", "r2", "unknown"])
        assert {output.request_id for output in partial} <= {"r0", "r1", "r2"}
        for stream in streams:
            last = await read(stream)
            assert all(o.token_ids == last[-1].token_ids for o in partial if last and o.request_id == stream.request_id)
        for output in partial:
            sample = output.outputs[0]
            assert sample.finish_reason == "abort" and len(sample.token_ids) == len(sample.sampled.raw)
            assert [span.end for span in sample.weight_versions] == ([len(sample.token_ids)] if sample.token_ids else [])
            prompt = {"prompt_token_ids": output.prompt_token_ids, "output_token_ids": sample.token_ids}
            rest = (await engine.generate(prompt, params)).outputs[0]
            assert rest.num_prior_tokens == len(sample.token_ids)
            assert sample.token_ids + rest.token_ids == whole.token_ids
            joined = np.concatenate([sample.sampled.raw, rest.sampled.raw])
            assert joined.tobytes() == whole.outputs[0].sampled.raw.tobytes()
        assert (await kept).token_ids == whole.token_ids
        assert await engine.abort("kept") == [] == await engine.abort()

    run(main())
    wait_until_free(engine)


def test_abort_of_everything_from_another_loop_wakes_the_readers(open_async):
    engine = open_async()
    started = threading.Event()
    outputs = []

    async def reads():
        streams = [engine.generate("hello", LONG) for _ in range(6)]
        await anext(streams[0])
        started.set()
        outputs.extend(await asyncio.gather(*streams))

    thread = threading.Thread(target=lambda: run(reads()))
    thread.start()
    assert started.wait(SECONDS)
    partial = run(engine.abort())
    thread.join(SECONDS)
    assert len(outputs) == 6 and sum(output.finish_reason == "abort" for output in outputs) == len(partial)
    wait_until_free(engine)


# ---- pauses -------------------------------------------------------------------------------------------------------------


def test_keep_freezes_and_changes_nothing(open_async):
    engine = open_async()
    params = LONG.replace(logprobs=0)

    async def main():
        whole = await engine.generate("hello", params)
        earlier = engine.stats().generation_tokens
        stream = engine.generate("hello", params.replace(output_kind=DELTA))
        parts = [await anext(stream)]
        for _ in range(5):
            await engine.pause("keep", clear_cache=True)
            assert engine.is_paused and engine.stats().paused
            before = engine.stats().generation_tokens
            if sum(len(part.token_ids) for part in parts) < before - earlier:
                parts.append(await anext(stream))
            await asyncio.sleep(0.005)
            assert engine.stats().generation_tokens == before
            await engine.pause_generation("wait")
            await engine.resume()
            await engine.resume()
            if not parts[-1].finished:
                parts.append(await anext(stream))
        parts += await read(stream)
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        raw = b"".join(part.outputs[0].sampled.raw.tobytes() for part in parts if part.outputs)
        assert raw == whole.outputs[0].sampled.raw.tobytes()
        assert not engine.is_paused

    run(main())


def test_wait_finishes_and_holds_new_requests(open_async):
    engine = open_async()

    async def main():
        old = [engine.generate(f"old {i}", LONG) for i in range(3)]
        pause = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        new = engine.generate("new", PARAMS)
        await pause
        assert all([(await stream).finish_reason == "length" for stream in old])
        assert engine.stats().num_unfinished == engine.stats().num_held == 1
        held = engine.generate("held", PARAMS)
        held.abort()
        assert (await held).finish_reason == "abort"
        await engine.resume()
        assert (await new).finished

    run(main())
    wait_until_free(engine)


def test_wait_may_run_out_of_time_and_be_tightened(open_async):
    engine = open_async()

    async def main():
        streams = [engine.generate("a", ENDLESS) for _ in range(40)]
        with pytest.raises(TimeoutError):
            await engine.pause("wait", timeout=0.001)
        assert engine.is_paused
        late = engine.generate("late", PARAMS)
        await engine.pause("abort")
        ends = [(await stream).finish_reason for stream in streams]
        assert "abort" in ends and (await late).finish_reason == "abort"
        queued = engine.generate("queued", PARAMS)
        await engine.resume()
        assert (await queued).finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="mode must be"):
            await engine.pause("often")

    run(main())
    wait_until_free(engine)


def test_random_storm(open_async):
    """Loops, threads, cancels, aborts, pauses and resets at random moments; afterwards nothing is held."""
    engine = open_async(max_num_seqs=8, kv_cache_memory_bytes="2MiB", max_model_len=256)
    deadline = time.monotonic() + 2
    failures = []

    async def one(rng, i):
        kind = rng.choice(list(RequestOutputKind))
        params = LONG.replace(max_tokens=rng.randrange(1, 60), n=rng.choice([1, 1, 3]), output_kind=kind, seed=i)
        stream = engine.generate([rng.randrange(300)] * rng.randrange(1, 50), params)
        count, how = 0, rng.randrange(5)
        if how == 0:
            return await stream
        async for last in stream:
            output = last
            count += 1
            if how == 1 and count == 2:
                return None
            if how == 2 and count == 3:
                stream.abort()
            if rng.random() < 0.1:
                await asyncio.sleep(0.002)
        assert output.finished
        for sample in output.outputs:
            assert kind is DELTA or sample.finish_reason != "length" or len(sample.token_ids) == params.max_tokens

    async def loop_of(seed):
        rng, i = random.Random(seed), 0
        tasks = set()
        while time.monotonic() < deadline:
            i += 1
            task = asyncio.ensure_future(one(rng, i))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(rng.random() * 0.004)
            if rng.random() < 0.1 and tasks:
                rng.choice(list(tasks)).cancel()
            if rng.random() < 0.03:
                await engine.abort()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                failures.append(result)

    async def pauses():
        rng = random.Random(9)
        while time.monotonic() < deadline:
            await engine.pause(rng.choice(["keep", "keep", "wait", "abort"]), clear_cache=rng.random() < 0.5)
            await engine.resume()
            await asyncio.sleep(0.02)

    threads = [threading.Thread(target=lambda s=s: run(loop_of(s))) for s in range(3)]
    threads.append(threading.Thread(target=lambda: run(pauses())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failures
    gc.collect()
    wait_until_free(engine)
    assert not engine._driver.named and not engine._driver.feeds


# ---- health, life -------------------------------------------------------------------------------------------------------


def test_drain_and_statistics(open_async):
    engine = open_async(fresh=True)

    async def main():
        assert await engine.wait_for_requests_to_drain()
        await engine.pause("keep")
        streams = [engine.generate("a", LONG) for _ in range(4)]
        assert not await engine.wait_for_requests_to_drain(timeout=0)
        await engine.resume()
        assert await engine.wait_for_requests_to_drain(timeout=SECONDS)
        assert engine.stats().num_unfinished == 0
        assert all([(await stream).finished for stream in streams])
        assert await engine.reset_prefix_cache(True)
        assert (await engine.generate("a", PARAMS)).num_cached_tokens == 0

    run(main())
    assert engine.stats().finished["length"] == 5 and engine.stats().generation_tokens == 4 * 500 + 24
    assert engine.histograms()["output_tokens"] and engine.step_log(3) and engine.memory()["kv"] and engine.program()
    assert engine.get_world_size() == 1 and engine.weight_version == 0 and engine.is_running and not engine.errored
    assert repr(engine).startswith("AsyncEngine(") and engine._repr_html_()
    engine.check_health()
    with pytest.raises(EngineBusyError):
        engine._driver.engine.step()


def test_shutdown_drains_or_aborts(open_async):
    for mode, params in (("drain", LONG), ("abort", ENDLESS)):
        engine = open_async(fresh=True)

        async def main(engine=engine, mode=mode, params=params):
            streams = [engine.generate(f"a {i}", params) for i in range(6)]
            ending = asyncio.ensure_future(engine.shutdown(mode))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(EngineClosedError, match="engine is closed"):
                engine.generate("late", PARAMS)
            reasons = [(await stream).finish_reason for stream in streams]
            await ending
            assert set(reasons) == {"length"} if mode == "drain" else "abort" in reasons
            await engine.shutdown()

        run(main())
        assert engine.closed and not engine.is_running
        engine.close()
        with pytest.raises(EngineClosedError):
            engine.stats()
        with pytest.raises(EngineClosedError):
            engine.generate("late", PARAMS)
        with pytest.raises(EngineClosedError):
            engine.check_health()


def test_shutdown_of_a_paused_engine_does_not_hang(open_async):
    engine = open_async(fresh=True)

    async def main():
        await engine.pause("keep")
        stream = engine.generate("a", LONG)
        await engine.shutdown("drain", timeout=SECONDS)
        assert (await stream).finish_reason == "length"

    run(main())


def test_close_leaves_partial_outputs(open_async):
    engine = open_async(fresh=True)

    async def main():
        stream = engine.generate("a", ENDLESS)
        first = await anext(stream)
        waiting = asyncio.ensure_future(read(engine.generate("b", ENDLESS)))
        await asyncio.sleep(0)
        engine.close()
        rest = await read(stream)
        assert rest[-1].finished and rest[-1].token_ids[: len(first.token_ids)] == first.token_ids
        assert (await waiting)[-1].finished

    run(main())


def test_async_with_and_create(tiny_model, device):
    async def main():
        async with await AsyncEngine.create(str(tiny_model), device=device, kv_cache_memory_bytes="16MiB") as engine:
            assert (await engine.generate("a", PARAMS)).finished
        assert engine.closed
        async with AsyncEngine.create(str(tiny_model), device=device, kv_cache_memory_bytes="16MiB") as engine:
            assert (await engine.generate("a", PARAMS)).finished
        assert engine.closed
        task = asyncio.create_task(AsyncEngine.create(str(tiny_model), device=device, kv_cache_memory_bytes="16MiB"))
        with await task as engine:
            assert (await engine.generate("a", PARAMS)).finished
        assert engine.closed
        with pytest.raises(EngineClosedError), engine:
            pass
        stream = AsyncEngine(tiny_model, device=device, kv_cache_memory_bytes="16MiB").generate("a", LONG)
        gc.collect()
        assert (await stream).finish_reason == "length"  # the stream keeps its engine
        with pytest.raises(TypeError, match=r"pickle engine\.config"):
            pickle.dumps(engine)
        again = AsyncEngine.from_config(engine.config)
        again.close()

    run(main())


class Broken:
    """A thread and mails in their state after a device fault: every request has ended with an error."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def state(self):
        return self.inner.state() | 8

    def raise_fault(self):
        raise DeviceError("launch failed", operation="linear", code=700)

    def take(self):
        return [item | {"finish": item["finish"] and "error", "status": 0} for item in self.inner.take()]


def test_death_reaches_every_waiter(open_async):
    engine = open_async(fresh=True)

    async def main():
        await engine.pause("keep")
        streams = [engine.generate("a", LONG) for _ in range(3)]
        handle = engine.add_request("a", LONG)
        readers = [asyncio.ensure_future(read(stream)) for stream in streams[:2]]
        readers.append(asyncio.ensure_future(_await(streams[2])))
        await asyncio.sleep(0.01)
        driver = engine._driver
        for feed in driver.named.values():
            feed.subscription = Broken(feed.subscription)
        driver.thread.abort_all()
        driver.thread = Broken(driver.thread)
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and isinstance(result.__cause__, DeviceError)
            assert result.operation == "linear" and result.code == 700
        with pytest.raises(EngineDeadError, match="launch failed"):
            handle.wait(SECONDS)
        for call in (engine.check_health, lambda: engine.generate("a"), lambda: engine.add_request("a")):
            with pytest.raises(EngineDeadError):
                call()
        for coroutine in (engine.pause(), engine.resume(), engine.abort(), engine.wait_for_requests_to_drain()):
            with pytest.raises(EngineDeadError):
                await coroutine
        assert engine.errored and not engine.is_running and "launch failed" in str(engine.dead_error)
        assert engine.stats().num_unfinished == 0
        driver.thread = driver.thread.inner
        await engine.shutdown()

    run(main())


def test_a_request_fails_alone(open_async):
    """A request with a mask that allows no token ends with an error; a concurrent request is not affected."""
    engine = open_async(banned_token_ids=[7])

    async def main():
        bad = engine.generate("a", PARAMS.replace(allowed_token_ids=[7]))
        good = engine.generate("a", PARAMS)
        with pytest.raises(RequestFailedError, match="no token is allowed") as raised:
            await bad
        assert raised.value.output.finish_reason == "error" and raised.value.output.finished
        assert (await good).finish_reason == "length"

    run(main())
    wait_until_free(engine)


SCRIPT = """
import asyncio, os, sys
from llmpy import AsyncEngine, EngineClosedError, SamplingParams
engine = AsyncEngine(sys.argv[1], kv_cache_memory_bytes="16MiB", device="cpu")
params = SamplingParams(max_tokens=200, ignore_eos=True)
handles = [engine.add_request(f"hello {i}", params) for i in range(20)]
"""
EXIT = "streams = [engine.generate('a', params) for _ in range(3)]\nprint('bye')"
FORK = """
handles[0].wait()
pid = os.fork()
if pid == 0:
    for call in (engine.stats, handles[1].poll, lambda: engine.generate("a")):
        try:
            call()
        except EngineClosedError as error:
            assert "belongs to process" in str(error)
        else:
            os._exit(1)
    engine.close()
    handles.clear()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert all(handle.wait(60).finished for handle in handles[1:])
print('bye')
"""
LOOP_AT_EXIT = """
async def main():
    await anext(engine.generate("a", params))
    asyncio.get_running_loop().stop()
    await asyncio.sleep(60)
try:
    asyncio.run(main())
except RuntimeError:
    print('bye')
"""


@pytest.mark.parametrize("rest", [EXIT, FORK, LOOP_AT_EXIT], ids=["exit", "fork", "loop"])
def test_processes_end_as_they_should(tiny_model, rest):
    command = [sys.executable, "-c", SCRIPT + rest, str(tiny_model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=os.environ)
    assert (result.returncode, result.stdout, result.stderr) == (0, "bye\n", ""), result.stderr
