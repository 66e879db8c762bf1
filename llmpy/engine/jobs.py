"""Helper threads. Every queued job is run or gets an error, even if a thread or memory is lacking."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ..errors import EngineClosedError

Result = TypeVar("Result")
logger = logging.getLogger("llmpy")

RETRY_S = 0.02
"""Seconds before a step that failed for lack of memory is tried again."""
MAX_SHARED_THREADS = 32
SHORT_THREADS = 2
LONG_WORK = 256 << 10
"""Work on more characters than this counts as long: about 50 ms or more."""


class Job(Protocol):
    """Work for a helper thread. The thread calls `run`; `fail` is called if that raises or the job cannot run."""

    def run(self) -> None:
        """Does the work; an exception of any kind leads to `fail`."""

    def fail(self, error: BaseException) -> None:
        """Tells the caller that the job failed. It may be called again after a MemoryError, so a second call must be safe."""


class JobQueue:
    """Jobs that helper threads run in the order of arrival. Any thread may call any method.

    The first thread starts with the object and lives until `close`, so a later lack of threads or memory cannot leave a job
    without a thread. More threads start when jobs wait.

    Args:
        name: Name of the threads.
        max_threads: Most threads.

    Raises:
        RuntimeError: The first thread could not be started.
    """

    def __init__(self, name: str, max_threads: int = 1) -> None:
        self._name, self._max_threads = name, max_threads
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._unfinished: dict[int, float | None] = {}
        """Start time of each unfinished job by id; None while the job waits."""
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._start_thread()

    def __len__(self) -> int:
        """Number of jobs that wait or run."""
        return len(self._unfinished)

    def stuck_seconds(self) -> float:
        """Seconds since a thread was last free; 0 if one is free or the next job may start one."""
        unfinished = list(self._unfinished.copy().values())
        begun = [since for since in unfinished if since is not None]
        is_busy = len(begun) >= len(self._threads) and (len(unfinished) > len(begun) or len(begun) >= self._max_threads)
        return time.monotonic() - max(begun) if begun and is_busy else 0.0

    def put(self, job: Job) -> None:
        """Queues a job. After an exception the job is not queued and neither method is called.

        Raises:
            EngineClosedError: The queue is closed.
        """
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("engine is closed")
            if len(self._threads) <= len(self._unfinished) and len(self._threads) < self._max_threads:
                self._try_start()
            self._unfinished[id(job)] = None
            try:
                self._queue.put(job)
            except BaseException:
                self._unfinished.pop(id(job), None)
                raise

    async def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Runs a function on a helper thread and returns its result. If the caller is cancelled, a function that has begun runs
        to its end, and a function that waits is not run.

        Raises:
            Exception: The function's exception; a BaseException becomes the cause of a RuntimeError.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        try:
            self.put(_Call(loop, future, function, args))
            return await future
        finally:
            del future  # break the cycle: the error's traceback holds this frame

    def close(self) -> None:
        """Ends the threads after the queued jobs have run; does not wait. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._queue.put(None)

    def _try_start(self) -> None:
        """Starts another thread; on failure the existing threads go on."""
        try:
            self._start_thread()
        except (RuntimeError, MemoryError) as error:
            logger.warning("%s; %d go on", error, len(self._threads))

    def _start_thread(self) -> None:
        arguments = (self._queue, self._unfinished)  # not self, so that a dropped JobQueue can be collected
        thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            message = f"{self._name}: wanted a helper thread, have none ({error}); raise ulimit -u or the limit of pids"
            raise RuntimeError(message) from error
        self._threads.append(thread)

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):
            self.close()


def _serve(queue: SimpleQueue[Job | None], unfinished: dict[int, float | None]) -> None:
    """The loop of a helper thread. Only the end of the queue ends it."""
    while True:
        job = None
        try:
            job = queue.get()
            if job is None:
                return
            unfinished[id(job)] = time.monotonic()
            _end(job)
        except BaseException:
            _log("a helper thread goes on after an error")
        finally:
            unfinished.pop(id(job), None)


def _end(job: Job) -> None:
    """Runs a job; if that raises, calls the job's `fail`."""
    try:
        job.run()
    except BaseException as error:
        _fail(job, error)


def _fail(job: Job, cause: BaseException) -> None:
    try:
        insist(lambda: job.fail(cause))
    except BaseException:
        _log("a failed job could not be told its error")


def insist(step: Callable[[], None]) -> None:
    """Repeats a step until it no longer raises MemoryError. The step must be repeatable. Blocks: only for helper threads."""
    while True:
        try:
            step()
            return
        except MemoryError:
            time.sleep(RETRY_S)


def _log(message: str) -> None:
    try:
        logger.exception(message)
    except BaseException:
        return


class Lanes:
    """Separate helper threads for short and for long work, so that short work does not wait behind long work.

    Args:
        name: Name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._short = JobQueue(name, SHORT_THREADS)
        self._long = JobQueue(f"{name}-long", max(1, (os.cpu_count() or 1) // 2))

    def __len__(self) -> int:
        """Number of jobs that wait or run."""
        return len(self._short) + len(self._long)

    def of(self, size: int) -> JobQueue:
        """The queue for work on `size` characters."""
        return self._long if size > LONG_WORK else self._short

    def stuck_seconds(self) -> float:
        """The longer `stuck_seconds` of the two queues."""
        return max(self._short.stuck_seconds(), self._long.stuck_seconds())

    def close(self) -> None:
        """Like JobQueue.close, for both queues."""
        self._short.close()
        self._long.close()


class _Call:
    """A job whose result an event loop waits for."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Result],
        function: Callable[..., Result],
        args: tuple[Any, ...],
    ) -> None:
        self._loop, self._future, self._function, self._args = loop, future, function, args
        self._context = contextvars.copy_context()

    def run(self) -> None:
        if self._future.cancelled():
            return
        result = self._context.run(self._function, *self._args)
        insist(lambda: self._tell(self._future.set_result, result))

    def fail(self, error: BaseException) -> None:
        self._tell(self._future.set_exception, as_exception(error))

    def _tell(self, settle: Callable[[Any], None], value: object) -> None:
        """Passes the result to the loop, then drops the future, because the error's traceback holds this job."""
        try:
            self._loop.call_soon_threadsafe(_settle, self._future, settle, value)
        except RuntimeError:
            if not self._loop.is_closed():  # nothing waits on a closed loop
                raise
        del self._future, self._function, self._args


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], value: object) -> None:
    if not future.done():
        settle(value)


def as_exception(error: BaseException, kind: type[Exception] = RuntimeError) -> Exception:
    """The error to raise in a waiting coroutine. An error that would end the event loop or an iteration is wrapped as a cause.

    Args:
        error: The error that was raised.
        kind: Type of the wrapping error.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = kind(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def is_cancellation(error: BaseException) -> bool:
    """Whether an error is the cancellation of the current task rather than an error of the task's work."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


_shared: tuple[int, JobQueue] | None = None
"""Process id and queue. A child process does not have its parent's threads, so it makes a new queue."""


def shared_stuck_seconds() -> float:
    """Seconds since a shared helper thread was last free; 0 while another thread may be started."""
    jobs = None if _shared is None else _shared[1]
    return jobs.stuck_seconds() if jobs is not None else 0.0


async def beside(function: Callable[..., Result], *args: Any) -> Result:
    """Runs a function on one of the process's shared helper threads, like `JobQueue.call`."""
    global _shared
    if (shared := _shared) is None or shared[0] != os.getpid():
        _shared = shared = os.getpid(), JobQueue("llmpy-helper", MAX_SHARED_THREADS)
    return await shared[1].call(function, *args)
