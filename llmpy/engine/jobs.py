"""Helper threads: every job that is queued is run or told its error, whatever goes wrong in it or around it."""

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
"""Pause before a step that a lack of memory prevented is tried again."""
MAX_SHARED_THREADS = 32
SHORT_THREADS = 2
LONG_WORK = 256 << 10
"""Characters: more are long work, of about 50 ms or more."""


class Job(Protocol):
    """Work for a helper thread. One of the two methods ends it."""

    def run(self) -> None:
        """Does the work; an exception of any kind leads to `fail`."""

    def fail(self, error: BaseException) -> None:
        """Tells the caller that the job failed. It may be called again after a MemoryError, so a second call must be safe."""


class JobQueue:
    """Jobs that helper threads run in the order of their arrival. All methods from any thread.

    The first thread starts with the object and lives until `close`, so a later lack of threads or memory cannot leave a job
    without a thread. More threads start when jobs wait.

    Args:
        name: Of the threads.
        max_threads: Most threads.

    Raises:
        RuntimeError: The first thread could not be started.
    """

    def __init__(self, name: str, max_threads: int = 1) -> None:
        self._name, self._max_threads = name, max_threads
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._unfinished: dict[int, float | None] = {}
        """By the job's id: when it was begun; None: it waits."""
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._start_thread()

    def __len__(self) -> int:
        """Jobs that wait or run."""
        return len(self._unfinished)

    def stuck_seconds(self) -> float:
        """Seconds for which no thread has been free; 0: one is, or the next job may start one."""
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
        """Runs a function on a helper thread and gives its result. If the caller is cancelled a function that has begun goes on
        to its end, and one that waits does not begin.

        Raises:
            Exception: What the function raised; an error that is no Exception comes as the cause of a RuntimeError.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        try:
            self.put(_Call(loop, future, function, args))
            return await future
        finally:
            del future  # its error's traceback holds this frame

    def close(self) -> None:
        """Ends the threads once the jobs that are queued have run; twice is fine. It does not wait."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._queue.put(None)

    def _try_start(self) -> None:
        """One thread more; without it the others go on."""
        try:
            self._start_thread()
        except (RuntimeError, MemoryError) as error:
            logger.warning("%s; %d go on", error, len(self._threads))

    def _start_thread(self) -> None:
        arguments = (self._queue, self._unfinished)  # not the object: a queue that is dropped can be collected
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
    """A helper thread. Nothing but the end of the queue ends it."""
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
    """Runs a job, or tells it why it could not be run."""
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
    """Takes a step that may be repeated, again and again while memory is lacking. For helper threads: it blocks."""
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
    """Helper threads for short work and others for long work, so that short work does not wait behind long work.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._short = JobQueue(name, SHORT_THREADS)
        self._long = JobQueue(f"{name}-long", max(1, (os.cpu_count() or 1) // 2))

    def __len__(self) -> int:
        """Jobs that wait or run."""
        return len(self._short) + len(self._long)

    def of(self, size: int) -> JobQueue:
        """The queue for work on so many characters."""
        return self._long if size > LONG_WORK else self._short

    def stuck_seconds(self) -> float:
        """Seconds for which no thread for short work, or none for long work, has been free; 0: one of each is."""
        return max(self._short.stuck_seconds(), self._long.stuck_seconds())

    def close(self) -> None:
        """As of JobQueue."""
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
        """Gives the result to the loop, then forgets the future: its error's traceback holds this job."""
        try:
            self._loop.call_soon_threadsafe(_settle, self._future, settle, value)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop has no caller that waits
                raise
        del self._future, self._function, self._args


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], value: object) -> None:
    if not future.done():
        settle(value)


def as_exception(error: BaseException, kind: type[Exception] = RuntimeError) -> Exception:
    """An error as a waiting coroutine may get it: one that would end its event loop or its iteration becomes a cause.

    Args:
        error: What was raised.
        kind: Of the error around such a cause.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = kind(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def is_cancellation(error: BaseException) -> bool:
    """Whether an error is the cancellation of the current task, not an error that the task's own work raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


_shared: tuple[int, JobQueue] | None = None
"""Process and queue: a child process has none of its parent's threads."""


def shared_stuck_seconds() -> float:
    """Seconds for which every helper thread of the process has been busy, once there are as many as there may be."""
    jobs = None if _shared is None else _shared[1]
    return jobs.stuck_seconds() if jobs is not None else 0.0


async def beside(function: Callable[..., Result], *args: Any) -> Result:
    """Runs a function on one of the process's helper threads, as `JobQueue.call`."""
    global _shared
    if (shared := _shared) is None or shared[0] != os.getpid():
        _shared = shared = os.getpid(), JobQueue("llmpy-helper", MAX_SHARED_THREADS)
    return await shared[1].call(function, *args)
