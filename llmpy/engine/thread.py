"""Python's side of the engine thread: requests in flight, event loops that wait for them, start and end."""

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
from ..errors import EngineClosedError, EngineDeadError
from .cores import notifier_of, raise_fault_of, thread_of
from .health import Watch, check_open
from .jobs import RETRY_S, Lanes

if TYPE_CHECKING:
    from .._core import Engine, Model
    from .feeds import Feed

IDLE, HAS_ROOM, PAUSED = _core.DRIVER_IDLE, _core.DRIVER_HAS_ROOM, _core.DRIVER_PAUSED
DEAD, CLOSED, BOUNDARY = _core.DRIVER_DEAD, _core.DRIVER_CLOSED, _core.DRIVER_BOUNDARY
OVER = DEAD | CLOSED
SLICE_S = 0.05
"""Seconds in the core between two checks for signals."""


class ThreadDriver:
    """The thread that runs an engine of the core, and the engine's requests. Any thread may call any method.

    Args:
        model, engine: Objects of the core; `close` closes them.
        max_queued: Most samples that may wait; 0 = no limit.
    """

    def __init__(self, model: Model, engine: Engine, max_queued: int) -> None:
        self.model = model
        self.engine = engine
        self.jobs = Lanes("llmpy-tokenizer")
        """Tokenises long texts."""
        self.untokenised: set[Feed] = set()
        """Requests with a text that is not tokenised yet."""
        self.thread = thread_of(engine, max_queued)
        self.closed = False
        self.refuses = False
        """Whether requests are refused because the engine shuts down."""
        self.feeds: dict[int, Feed] = {}
        """The requests that the core has, by number."""
        self.named: dict[str, Feed] = {}
        """The requests in flight, by request id."""
        self.watch = Watch(self)
        self._pid = os.getpid()
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Link] = weakref.WeakKeyDictionary()
        self._table = threading.Lock()

    # ---- life -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless the engine is open in this process; a dead engine counts as open.

        Raises:
            EngineClosedError: The engine was closed, or belongs to another process.
        """
        check_open(self._pid, self.closed)

    def check_alive(self) -> None:
        """Raises unless the engine can run requests.

        Raises:
            EngineDeadError: A fault has killed the engine; the cause is chained.
        """
        self.check()
        if self.refuses:
            raise EngineClosedError("engine is closed")
        self.raise_death()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """A block that needs a running engine; raises like `check_alive`."""
        self.check_alive()
        yield

    @property
    def is_paused(self) -> bool:
        """True from `pause` until `resume`."""
        return self.thread.is_pausing()

    def raise_death(self, number: int | None = None) -> None:
        """Raises the fault that killed the engine, if there is one.

        Args:
            number: A request; with replicas, the fault of the request's replica counts, too.
        """
        if os.getpid() != self._pid:
            return
        if number is not None:
            raise_fault_of(self.thread, number)
        if not self.thread.state() & DEAD:
            return
        try:
            self.thread.raise_fault()
        except Exception as cause:
            found = {name: getattr(cause, name, None) for name in ("operation", "code")}
            raise EngineDeadError(f"engine is dead: {cause}; close() it and create another", **found) from cause

    def close(self) -> None:
        """Ends every request and frees the engine; a second call does nothing. In a child process nothing is freed."""
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
        """The Link of an event loop. Call it in the loop's thread."""
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
            TimeoutError: `timeout` seconds have passed.
        """
        await self.link(asyncio.get_running_loop()).until(states, boundary, timeout)

    async def settle(self) -> None:
        """Waits until the engine has acted on all earlier calls."""
        await self.until(CLOSED, self.thread.next_boundary())

    def fail_all(self, message: str) -> None:
        """Ends every request in flight; its reader gets an EngineClosedError with this message."""
        for feed in self.find(None):
            feed.fail(EngineClosedError(message))

    def find(self, request_ids: str | Iterable[str] | None) -> list[Feed]:
        """Requests in flight by id; None = all. Unknown ids are ignored."""
        if request_ids is None:
            return list(self.named.values())
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return [feed for name in ids if (feed := self.named.get(name)) is not None]


class Link:
    """Connects an event loop to an engine, through one descriptor a replica for all requests of the loop.

    Args:
        driver: The engine.
        loop: The running loop; it keeps this object alive.
    """

    def __init__(self, driver: ThreadDriver, loop: asyncio.AbstractEventLoop) -> None:
        self.notifier, self._fds = notifier_of(driver.thread)
        self._thread = driver.thread
        self._feeds = driver.feeds
        self.loop = weakref.ref(loop)
        """Weak reference to the loop."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._looks_everywhere = False
        """True if an error has lost notifications, so that every reader must be woken."""
        self._woken: deque[Feed] = deque()
        """Requests with readers that other threads want to wake."""
        self._gate = threading.Lock()
        """Guards `_fds`, the watched descriptors; none: the loop no longer watches them."""
        for fd in self._fds:
            loop.add_reader(fd, self._on_output)
        self.notifier.watch(CLOSED, 0)

    def _on_output(self) -> None:
        """Runs when the descriptor is readable. Notifications that an error prevents are repeated in the next round."""
        try:
            if self._looks_everywhere:
                self._look_everywhere()
            else:
                self._tell_output()
            if self._woken:
                self._tell_woken()
        except BaseException:
            self._looks_everywhere = True
            time.sleep(RETRY_S)
            if not self._signal():
                asyncio.get_running_loop().call_soon(self._tell_woken)
            raise

    def _look_everywhere(self) -> None:
        """Wakes every reader and checks every awaited state."""
        self.notifier.take()
        self._woken.extend([feed for feed in self._feeds.copy().values() if feed.link is self])
        self._tell(self._thread.state())
        self._looks_everywhere = False

    def _tell_woken(self) -> None:
        """Wakes the readers that other threads have queued. After an error the remaining readers stay queued."""
        while self._woken:
            feed = self._woken.popleft()
            try:
                feed.wake()
            except BaseException:
                self._woken.append(feed)
                raise

    def _tell_output(self) -> None:
        states, numbers = self.notifier.take()
        feeds = self._feeds
        for number in numbers:
            feed = feeds.get(number)
            if feed is None:
                continue
            feed.has_output, waiter = True, feed.waiting  # Feed.wake inlined, because this runs for every output
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if states:
            self._tell(states)

    def _tell(self, states: int) -> None:
        """Wakes the waiters of the given states; other waiters go on waiting."""
        for item in list(self._waiting):
            wanted, boundary, future = item
            if not future.done():
                if not (states & wanted or (boundary and self._thread.boundary() >= boundary)):
                    self.notifier.watch(wanted, boundary)
                    continue
                future.set_result(None)
            self._waiting.remove(item)
        if states & CLOSED:
            self._leave()

    def _leave(self) -> None:
        """Stops watching: the engine is closed and its last notifications were delivered."""
        loop = self.loop()
        with self._gate:
            fds, self._fds = self._fds, []
        if loop is not None and not loop.is_closed():
            for fd in fds:
                loop.remove_reader(fd)
        self._tell_woken()

    async def until(self, states: int, boundary: int, timeout: float | None) -> None:
        """Like ThreadDriver.until."""
        if self._thread.state() & states or (boundary and self._thread.boundary() >= boundary):
            return
        future = asyncio.get_running_loop().create_future()
        item = (states, boundary, future)
        self._waiting.append(item)
        self.notifier.watch(states, boundary)
        try:
            await asyncio.wait_for(future, timeout)
        finally:
            if item in self._waiting:  # timed out or cancelled: the future would keep the loop alive
                self._waiting.remove(item)

    def wake(self, feed: Feed) -> None:
        """Wakes a request's reader from any thread. On a closed loop no reader waits.

        This uses the descriptor, because a failed callback of the loop is lost.
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
        """Makes the descriptor readable; False: the engine is closed and the loop no longer watches the descriptor."""
        with self._gate:
            if self._fds:
                os.eventfd_write(self._fds[0], 1)
            return bool(self._fds)

    def close(self) -> None:
        """Closes the descriptor after the loop was closed."""
        with self._gate:
            self._fds = []
        self.notifier.close()
