"""Helper threads: a job that fails in any way is told so, and the next one runs."""

import gc
import queue
import threading
import time
import weakref

import pytest

from llmpy import EngineClosedError
from llmpy._jobs import JobQueue

WAIT_S = 30


class PanicError(BaseException):
    """What a panic of a Rust library looks like: no Exception."""


ERRORS = [RuntimeError("r"), KeyError("k"), MemoryError(), StopIteration(1), PanicError("p"), SystemExit(3)]
ERRORS += [KeyboardInterrupt()]


class Note:
    """A job that tells what became of it."""

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
    assert jobs.oldest_seconds() == 0.0


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
    assert len(jobs) == 1 and jobs.oldest_seconds() > 0
    gate.set()
    assert told.get(timeout=WAIT_S) == "ran"
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
