"""The engine's thread as Python sees it: requests in flight, event loops that wait for them, life and death."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import _core
from .._core import Channel, EngineThread
from ..errors import EngineClosedError, EngineDeadError
from .health import Watch
from .jobs import RETRY_S, Lanes

if TYPE_CHECKING:
    from .._core import Engine, Model
    from .feeds import Feed

IDLE, HAS_ROOM, PAUSED = _core.DRIVER_IDLE, _core.DRIVER_HAS_ROOM, _core.DRIVER_PAUSED
DEAD, CLOSED, BOUNDARY = _core.DRIVER_DEAD, _core.DRIVER_CLOSED, _core.DRIVER_BOUNDARY
OVER = DEAD | CLOSED
SLICE_S = 0.05
"""Longest stay in the core without looking for signals."""


class ThreadDriver:
    """The thread that drives an engine of the core, and the requests that it holds. All methods from any thread.

    Args:
        model, engine: The core's; closed by `close`.
        max_queued: Most samples that may wait; 0 = no limit.
    """

    def __init__(self, model: Model, engine: Engine, max_queued: int) -> None:
        self.model = model
        self.engine = engine
        self.jobs = Lanes("llmpy-tokenizer")
        """Tokenises long texts."""
        self.untokenised: set[Feed] = set()
        """Requests whose text waits for that."""
        self.thread = EngineThread(engine, max_queued)
        self.closed = False
        self.refuses = False
        """Whether requests are refused because the engine shuts down."""
        self.feeds: dict[int, Feed] = {}
        """By number; those that the core has taken."""
        self.named: dict[str, Feed] = {}
        """By request id; those in flight."""
        self.watch = Watch(self)
        self._pid = os.getpid()
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Link] = weakref.WeakKeyDictionary()
        self._table = threading.Lock()

    # ---- life -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless the engine is open in this process; a dead one is.

        Raises:
            EngineClosedError: It was closed, or belongs to another process.
        """
        if os.getpid() != self._pid:
            raise EngineClosedError(f"engine belongs to process {self._pid}; create one in this process")
        if self.closed:
            raise EngineClosedError("engine is closed")

    def check_alive(self) -> None:
        """Raises unless the engine can run requests.

        Raises:
            EngineDeadError: A fault has killed it; the cause is chained.
        """
        self.check()
        if self.refuses:
            raise EngineClosedError("engine is closed")
        self.raise_death()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """A block that the engine must be able to run for; it raises as `check_alive`."""
        self.check_alive()
        yield

    @property
    def is_paused(self) -> bool:
        """Whether a pause was asked for and not ended."""
        return self.thread.is_pausing()

    def raise_death(self) -> None:
        """Raises what killed the engine, if something did."""
        if os.getpid() != self._pid or not self.thread.state() & DEAD:
            return
        try:
            self.thread.raise_fault()
        except Exception as cause:
            found = {name: getattr(cause, name, None) for name in ("operation", "code")}
            raise EngineDeadError(f"engine is dead: {cause}; close() it and create another", **found) from cause

    def close(self) -> None:
        """Ends every request and frees everything; twice is fine. A child process only forgets it."""
        with self._table:
            if self.closed:
                return
            self.closed = self.refuses = True
        if os.getpid() != self._pid:
            return
        self.jobs.close()
        self.thread.close()
        self.engine.close()
        self.model.close()

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def link(self, loop: asyncio.AbstractEventLoop) -> Link:
        """The loop's own; called in its thread."""
        with self._table:
            link = self._links.get(loop)
        if link is None:
            with self._table:
                for other in [other for other in self._links if other.is_closed()]:
                    self._links.pop(other).close()
            link = Link(self, loop)
            with self._table:
                self._links[loop] = link
        return link

    async def until(self, states: int, boundary: int = 0, timeout: float | None = None) -> None:
        """Waits until one of the states holds, or the boundary has passed.

        Raises:
            TimeoutError: The time is over.
        """
        await self.link(asyncio.get_running_loop()).until(states, boundary, timeout)

    async def settle(self) -> None:
        """Waits until everything that was asked so far has been acted on."""
        await self.until(CLOSED, self.thread.next_boundary())

    def fail_all(self, message: str) -> None:
        """Ends every request in flight; its reader gets an EngineClosedError with this message."""
        for feed in self.find(None):
            feed.fail(EngineClosedError(message))

    def find(self, request_ids: str | Iterable[str] | None) -> list[Feed]:
        """Requests in flight by id; None = all. Unknown ids are passed over."""
        if request_ids is None:
            return list(self.named.values())
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return [feed for name in ids if (feed := self.named.get(name)) is not None]


class Link:
    """What an event loop knows of an engine: one descriptor for all of its requests.

    Args:
        driver: The engine.
        loop: The running loop, which keeps this object.
    """

    def __init__(self, driver: ThreadDriver, loop: asyncio.AbstractEventLoop) -> None:
        self.channel = Channel(driver.thread)
        self._thread = driver.thread
        self._feeds = driver.feeds
        self.loop = weakref.ref(loop)
        """Gives the loop while it lives."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._looks_everywhere = False
        """Whether an error has lost news, so that every reader has to look."""
        self._woken: deque[Feed] = deque()
        """Those that other threads want to be looked at."""
        self._gate = threading.Lock()
        self._fd = self.channel.fileno()
        """-1: the loop does not look at it any more."""
        loop.add_reader(self._fd, self._on_news)
        self.channel.watch(CLOSED, 0)

    def _on_news(self) -> None:
        """The loop found the descriptor readable. What an error keeps from being told is told in the next round."""
        try:
            if self._looks_everywhere:
                self._look_everywhere()
            else:
                self._tell_news()
            if self._woken:
                self._tell_woken()
        except BaseException:
            self._looks_everywhere = True
            time.sleep(RETRY_S)
            if not self._signal():
                asyncio.get_running_loop().call_soon(self._tell_woken)
            raise

    def _look_everywhere(self) -> None:
        """Lets every reader look, and looks at every state."""
        self.channel.take()
        self._woken.extend([feed for feed in self._feeds.copy().values() if feed.link is self])
        self._tell(self._thread.state())
        self._looks_everywhere = False

    def _tell_woken(self) -> None:
        """Lets the readers look that other threads have woken. An error leaves the others in the queue."""
        while self._woken:
            feed = self._woken.popleft()
            try:
                feed.wake()
            except BaseException:
                self._woken.append(feed)
                raise

    def _tell_news(self) -> None:
        states, numbers = self.channel.take()
        feeds = self._feeds
        for number in numbers:
            feed = feeds.get(number)
            if feed is None:
                continue
            feed.has_news, waiter = True, feed.waiting  # as Feed.wake: this is done for every object
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if states:
            self._tell(states)

    def _tell(self, states: int) -> None:
        """Wakes those who wait for a state; the others go on waiting."""
        for item in list(self._waiting):
            wanted, boundary, future = item
            if not future.done():
                if not (states & wanted or (boundary and self._thread.boundary() >= boundary)):
                    self.channel.watch(wanted, boundary)
                    continue
                future.set_result(None)
            self._waiting.remove(item)
        if states & CLOSED:
            self._leave()

    def _leave(self) -> None:
        """The engine is closed: its last news have been told of."""
        loop = self.loop()
        with self._gate:
            fd, self._fd = self._fd, -1
        if fd >= 0 and loop is not None and not loop.is_closed():
            loop.remove_reader(fd)
        self._tell_woken()

    async def until(self, states: int, boundary: int, timeout: float | None) -> None:
        """As ThreadDriver.until."""
        if self._thread.state() & states or (boundary and self._thread.boundary() >= boundary):
            return
        future = asyncio.get_running_loop().create_future()
        item = (states, boundary, future)
        self._waiting.append(item)
        self.channel.watch(states, boundary)
        try:
            await asyncio.wait_for(future, timeout)
        finally:
            if item in self._waiting:  # it ran out of time, or was cancelled: the future would keep the loop
                self._waiting.remove(item)

    def wake(self, feed: Feed) -> None:
        """Lets a request's reader look, from any thread. On a closed loop no reader waits.

        It goes by the descriptor, since a callback given to the loop is lost when it fails.
        """
        loop = self.loop()
        if loop is None or loop.is_closed():
            return
        self._woken.append(feed)
        if not self._signal():
            try:
                loop.call_soon_threadsafe(self._tell_woken)
            except RuntimeError:
                if not loop.is_closed():
                    raise

    def _signal(self) -> bool:
        """Makes the descriptor readable; False: the engine is closed, and the loop does not look at it any more."""
        with self._gate:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            return self._fd >= 0

    def close(self) -> None:
        """Lets go of the descriptor; the loop is closed."""
        with self._gate:
            self._fd = -1
        self.channel.close()
