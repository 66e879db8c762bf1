"""LoopThread: an event loop in a separate thread, for callers without a loop or inside another loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..weights.updates import DEFAULT_BUCKET_BYTES

T = TypeVar("T")
logger = logging.getLogger("llmpy")


class LoopThread:
    """Runs coroutines until it is closed.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ends = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def _serve(self) -> None:
        """Runs the loop until `close`. A SystemExit or KeyboardInterrupt in a task stops the loop; it is then restarted."""
        while not self._ends:
            try:
                self._loop.run_forever()
            except BaseException:
                logger.exception("%s: the event loop goes on after an error", self._thread.name)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and returns its result; blocks the caller. Ctrl-C cancels the coroutine."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels the remaining tasks and ends the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._ends = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def transaction(
    version: int | str | None = None, rename: Callable[[str], str | None] | None = None, on_running: str = "keep"
) -> dict[str, Any]:
    """Options of an update of all weights; the caller's thread writes the weights, also for an AsyncEngine."""
    return {
        "version": version,
        "partial": False,
        "rename": rename,
        "on_running": on_running,
        "staging": "in_place",
        "bucket_bytes": DEFAULT_BUCKET_BYTES,
        "check_finite": False,
    }


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
