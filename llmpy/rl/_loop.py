"""LoopThread: an event loop in a thread of its own, for callers that have none or are inside another."""

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
        name: Of the thread.
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
        """Runs the loop until `close`. A SystemExit or KeyboardInterrupt of a task stops a loop: it is run again."""
        while not self._ends:
            try:
                self._loop.run_forever()
            except BaseException:
                logger.exception("%s: the event loop goes on after an error", self._thread.name)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """A coroutine's result; blocks the caller. Ctrl-C cancels the coroutine."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what is left and ends the thread; twice is fine."""
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
    """Options of an update of all weights that is written in the caller's thread, also where the engine is asynchronous."""
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
