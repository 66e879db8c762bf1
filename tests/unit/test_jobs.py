"""Helper threads: a job that fails in any way gets its error, and the next job runs."""

import ast
import asyncio
import contextlib
import contextvars
import gc
import os
import queue
import threading
import time
import weakref
from pathlib import Path

import pytest
from failures import PanicError

from llmpy import EngineClosedError
from llmpy.engine.jobs import JobQueue, beside

WAIT_S = 30
PACKAGE = Path(__file__).parents[2] / "llmpy"


ERRORS = [RuntimeError("r"), KeyError("k"), MemoryError(), StopIteration(1), PanicError("p"), SystemExit(3)]
ERRORS += [KeyboardInterrupt()]


class Note:
    """A job that records its result."""

    def __init__(self, told, error=None, fail_errors=(), gate=None):
        self.told, self.error, self.fail_errors, self.gate = told, error, list(fail_errors), gate

    def run(self):
        if self.gate is not None:
            self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.told.put("ran")

    def fail(self, error):
        if self.fail_errors:
            raise self.fail_errors.pop()
        self.told.put(error)


@pytest.fixture
def jobs():
    made = JobQueue("test-jobs")
    yield made
    made.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_job_that_raises_is_told_and_the_next_one_runs(jobs, error):
    told = queue.SimpleQueue()
    jobs.put(Note(told, error))
    jobs.put(Note(told))
    assert [told.get(timeout=WAIT_S), told.get(timeout=WAIT_S)] == [error, "ran"]
    settle(jobs)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_job_that_cannot_be_told_does_not_stop_the_next_one(jobs, error):
    told = queue.SimpleQueue()
    jobs.put(Note(told, RuntimeError("first"), [error]))
    jobs.put(Note(told))
    if isinstance(error, MemoryError):  # it is told again once there is memory
        assert str(told.get(timeout=WAIT_S)) == "first"
    assert told.get(timeout=WAIT_S) == "ran"
    settle(jobs)


def settle(jobs):
    deadline = time.monotonic() + WAIT_S
    while jobs:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert jobs.stuck_seconds() == 0.0


def test_threads_that_cannot_start_cost_no_job(monkeypatch):
    told, gate = queue.SimpleQueue(), threading.Event()
    jobs = JobQueue("test-jobs", max_threads=3)

    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match=r"wanted a helper thread.*ulimit -u"):
            JobQueue("more-jobs")
        jobs.put(Note(told, gate=gate))
        jobs.put(Note(told, gate=gate))
        assert len(jobs) == 2
        gate.set()
        assert [told.get(timeout=WAIT_S) for _ in range(2)] == ["ran"] * 2
        settle(jobs)
    gate.clear()
    jobs.put(Note(told, gate=gate))
    jobs.put(Note(told))  # a second thread passes the first one
    assert told.get(timeout=WAIT_S) == "ran"
    assert len(jobs) == 1 and jobs.stuck_seconds() == 0.0
    for _ in range(2):
        jobs.put(Note(told, gate=gate))
    deadline = time.monotonic() + WAIT_S
    while not jobs.stuck_seconds():
        assert time.monotonic() < deadline
    gate.set()
    assert [told.get(timeout=WAIT_S) for _ in range(3)] == ["ran"] * 3
    settle(jobs)
    jobs.close()


def test_a_job_that_cannot_be_queued_is_not_queued(jobs, monkeypatch):
    class Full:
        def put(self, job):
            raise MemoryError

    told = queue.SimpleQueue()
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_queue", Full())
        with pytest.raises(MemoryError):
            jobs.put(Note(told))
    assert not jobs
    jobs.put(Note(told))
    assert told.get(timeout=WAIT_S) == "ran"


def test_closing_runs_what_is_queued_and_ends_the_thread(jobs):
    told = queue.SimpleQueue()
    jobs.put(Note(told))
    thread = jobs._threads[0]
    jobs.close()
    jobs.close()
    with pytest.raises(EngineClosedError):
        jobs.put(Note(told))
    thread.join(WAIT_S)
    assert not thread.is_alive() and told.get(timeout=WAIT_S) == "ran"


def test_a_queue_that_is_dropped_ends_its_thread_and_keeps_no_job():
    jobs, told = JobQueue("test-jobs"), queue.SimpleQueue()
    job = Note(told)
    jobs.put(job)
    assert told.get(timeout=WAIT_S) == "ran"
    settle(jobs)
    thread, seen = jobs._threads[0], weakref.ref(job)
    del job, jobs
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive() and seen() is None


# ---- functions whose results an event loop waits for ---------------------------------------------------------------------


def call(function, *args):
    async def main():
        async with asyncio.timeout(WAIT_S):
            return await beside(function, *args)

    return asyncio.run(main())


def test_a_function_beside_the_loop():
    name = contextvars.ContextVar("name", default="none")

    async def main():
        name.set("mine")
        found = await beside(lambda: (name.get(), threading.current_thread().name))
        assert found == ("mine", "llmpy-helper")
        cancelled, ran = asyncio.create_task(beside(time.sleep, 0.2)), asyncio.Event()
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await beside(asyncio.get_running_loop().call_soon_threadsafe, ran.set)
        await ran.wait()

    asyncio.run(main())


ASYNC_ERRORS = [*ERRORS, StopAsyncIteration(), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ASYNC_ERRORS, ids=lambda error: type(error).__name__)
def test_a_function_that_raises(error):
    def fail():
        raise error

    with pytest.raises(Exception) as caught:
        call(fail)
    is_itself = isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration)
    assert (caught.value if is_itself else caught.value.__cause__) is error
    assert call(len, "abc") == 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_queue_of_an_object_goes_with_it(fails):
    """Also after an error with a traceback that holds frames: no thread stays, even without the cyclic collector."""

    class Owner:
        def __init__(self):
            self.jobs = JobQueue("test-owner")

        def work(self):
            if fails:
                raise ValueError("told")

    async def main():
        owner = Owner()
        if fails:
            with contextlib.suppress(ValueError):
                await owner.jobs.call(owner.work)
        else:
            await owner.jobs.call(owner.work)
        return owner.jobs._threads[0]

    gc.collect()
    gc.disable()
    try:
        thread = asyncio.run(main())
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_a_result_is_told_again_once_there_is_memory(monkeypatch):
    left = [3]

    async def main():
        loop = asyncio.get_running_loop()
        real = loop.call_soon_threadsafe

        def fail(*args):
            if left[0]:
                left[0] -= 1
                raise MemoryError
            return real(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", fail)
        async with asyncio.timeout(WAIT_S):
            assert await beside(len, "ab") == 2

    asyncio.run(main())
    assert left == [0]


def test_a_process_without_threads_fails_one_call(monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("llmpy.engine.jobs._shared", None)
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="wanted a helper thread"):
            call(len, "a")
        patch.undo()
        assert call(len, "a") == 1


def test_a_child_process_has_threads_of_its_own():
    assert call(len, "a") == 1
    child = os.fork()
    if child == 0:
        os._exit(0 if call(len, "abc") == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0


# ---- the whole package ---------------------------------------------------------------------------------------------------

SERVED_BESIDE = {
    "engine/jobs.py:_start_thread": "tests/unit/test_jobs.py::test_threads_that_cannot_start_cost_no_job",
    "engine/handover.py:save_prompt": "the caller gets the error of the thread",
    "engine/handover.py:begin_prefill": "tests/engine/test_early_handover.py::test_each_side_may_fail_halfway",
    "engine/handover.py:add_done_callback": "tests/engine/test_early_handover.py::test_each_side_may_fail_halfway",
    "engine/handover.py:decode": "tests/engine/test_early_handover.py::test_each_side_may_fail_halfway",
    "engine/frontend.py:_add_images": "tests/api/test_images.py::test_a_bad_image_fails_its_prompt_alone",
    "engine/jobs.py:_tell": "tests/unit/test_jobs.py::test_a_result_is_told_again_once_there_is_memory",
    "engine/thread.py:__init__": "tests/api/test_live.py::test_an_error_while_output_are_told",
    "engine/thread.py:_on_output": "tests/api/test_live.py::test_an_error_while_output_are_told",
    "engine/thread.py:wake": "tests/api/test_live.py::test_a_request_that_fails_once_its_engine_is_closed",
    "weights/tcp_store.py:__init__": "tests/unit/test_helper_threads.py::test_the_store_goes_on",
    "weights/tcp_store.py:_admit": "tests/unit/test_helper_threads.py::test_the_store_goes_on",
    "rl/_loop.py:__init__": "tests/unit/test_helper_threads.py::test_a_loop_thread_goes_on",
    "rl/_loop.py:close": "tests/unit/test_helper_threads.py::test_a_loop_thread_goes_on",
    "rl/_rpc.py:_connected": "tests/unit/test_helper_threads.py::test_calls_over_a_socket_go_on",
    "rl/_rpc.py:call": "tests/unit/test_helper_threads.py::test_calls_over_a_socket_go_on",
    "rl/_trl_worker.py:_run": "tests/unit/test_helper_threads.py::test_a_rollout_worker_tells_what_it_failed_of",
    "server/kv_events.py:__init__": "tests/server/test_live.py::test_events_go_on",
    "engine/lending.py:__init__": "tests/engine/test_device_copies.py::test_an_error_in_the_thread_that_lends",
    "server/images.py:load_images": "tests/server/test_images.py::test_other_sources_are_refused",
    "server/completions.py:merged": "tests/server/test_live.py::test_an_error_in_one_of_two_prompts",
    "server/responses.py:responses": "tests/server/test_live.py::test_an_error_in_a_background_response",
    "server/frames.py:attended": "tests/server/test_live.py::test_an_error_in_an_answer",
    "server/frames.py:__call__": "tests/server/test_live.py::test_an_error_in_an_answer",
    "server/frames.py:_tend_later": "tests/server/test_live.py::test_an_error_in_a_timer",
    "server/frames.py:_tend": "tests/server/test_live.py::test_an_error_in_a_timer",
    "server/connections.py:connection_made": "tests/server/test_live.py::test_an_error_in_a_sweep",
    "server/handshakes.py:connection_made": "tests/server/test_tls.py::test_an_error_in_a_handshake",
    "server/connections.py:bounded": "tests/server/test_live.py::test_an_error_in_a_sweep",
    "server/connections.py:_sweep": "tests/server/test_live.py::test_an_error_in_a_sweep",
    "server/batch.py:run_batch": "a batch ends with the error of its task",
    "export/leaves.py:_mask": "tests/export/test_skeleton.py::test_an_error_in_a_rule_of_masks",
    "distributed/_data.py:__call__": "Ray Data gets the error of the task",
    "distributed/_serve.py:answer": "tests/distributed/test_ray.py::test_a_replica_tells_of_any_error",
    "convert/k_quants.py:quantise": "a conversion ends with the error of a chunk",
    "cli/bench_serve.py:measure": "a benchmark ends with the error of its task",
    "cli/http_server.py:serve": "the command ends with the error of its server",
    "router/proxy.py:lifespan": "tests/router/test_engines.py::test_an_error_in_a_poll",
}
"""Every place that gives work to a thread, a task or a callback -> the test that makes the work fail there."""
STARTERS = {"Thread", "ThreadPoolExecutor", "run_in_executor", "to_thread", "call_soon", "call_soon_threadsafe", "add_reader"}
STARTERS |= {"create_task", "ensure_future", "call_later", "call_at", "start_new_thread", "Timer", "add_done_callback"}


def test_every_thread_task_and_callback_has_a_test_that_makes_it_fail():
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {getattr(one, "attr", getattr(one, "id", "")) for one in calls}
                if names & STARTERS:
                    found.add(f"{path.relative_to(PACKAGE)}:{function.name}")
    assert found == set(SERVED_BESIDE)
    for test in SERVED_BESIDE.values():
        if "::" in test:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (PACKAGE.parent / path).read_text(), test
