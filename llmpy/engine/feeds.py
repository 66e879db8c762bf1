"""Requests of an AsyncEngine and the objects that read their outputs: a stream, a handle, an awaitable."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ..errors import RequestFailedError
from ..outputs import RequestOutput
from ..sampling_params import RequestOutputKind
from .jobs import as_exception
from .requests import ScoreRequest
from .thread import SLICE_S

Result = TypeVar("Result")

if TYPE_CHECKING:
    from typing import Self

    from .._core import Subscription
    from .requests import Request
    from .thread import Link, ThreadDriver


class Feed:
    """A request and its subscription to the core's output. The core merges unread output, so a slow reader costs nothing.

    Args:
        driver: The engine.
        request: A checked request, not yet submitted.
    """

    __slots__ = (
        "_begun",
        "_driver",
        "_is_plain",
        "_lock",
        "_unseen",
        "aborts",
        "all_come",
        "error",
        "has_ended",
        "has_output",
        "kind",
        "link",
        "request",
        "subscription",
        "waiting",
    )

    def __init__(self, driver: ThreadDriver, request: Request) -> None:
        self.request = request
        self.kind = request.params.output_kind
        self.subscription: Subscription | None = None
        self.link: Link | None = None
        self.error: BaseException | None = None
        """The error that kept the request from being submitted, or that ended its reading."""
        self.aborts = self.all_come = False
        """all_come: no more blocks of its prompt will come from another engine."""
        self.has_ended = False
        """Whether the last output was given out."""
        self._driver = driver
        self._lock = threading.Lock()
        self.has_output = True
        """Whether the reader was woken since it last read."""
        self._begun = False
        self._unseen = False
        self._is_plain = self.kind is RequestOutputKind.DELTA and request.streams_plainly
        self.waiting: asyncio.Future[None] | None = None
        """The future of the current or last waiting reader."""

    @property
    def ends_only(self) -> bool:
        """Whether the core need only report the end of the request."""
        return self.kind is RequestOutputKind.FINAL_ONLY and not self.request.match_stops

    @property
    def refused(self) -> bool:
        """Whether the engine refuses new requests."""
        return self._driver.refuses

    def submit(self, core: dict[str, Any]) -> None:
        """Submits the request to the core."""
        request = self.request
        assert request.prompt.ids is not None
        if request.match_stops:
            request.prepare_text()
        link = self.link
        notifier = None if link is None else link.notifier
        subscription = self._driver.thread.submit(notifier, request.prompt.ids.tobytes(), core, self.ends_only)
        request.number = subscription.number
        self._driver.feeds[subscription.number] = self
        self.subscription = subscription
        self._driver.untokenised.discard(self)
        if self.link is not link and self.link is not None:  # a reader was bound meanwhile
            subscription.move(self.link.notifier, self.ends_only)
        if self.has_ended:
            self.release()
        elif self.aborts:
            subscription.abort()
        elif self.all_come:
            subscription.end_wait()

    def fail(self, error: BaseException) -> None:
        """Ends a request that never reached the core."""
        self.error = error
        self.end()
        self.wake_anywhere()

    def end(self) -> None:
        """Ends the request on this side: no more outputs will be read."""
        self.request.abort()
        self.release()

    def release(self) -> None:
        """Drops the subscription; the core then ends a request that still runs."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            self._driver.feeds.pop(subscription.number, None)
        self._driver.untokenised.discard(self)
        named = self._driver.named
        if named.get(self.request.request_id) is self:
            named.pop(self.request.request_id, None)

    def abort(self) -> None:
        """Ends the request at the next step boundary; its outputs so far can still be read."""
        self.aborts = True
        subscription = self.subscription
        if subscription is not None:
            subscription.abort()
        else:
            self._driver.untokenised.discard(self)

    def end_wait(self) -> None:
        """Lets a request that awaits blocks of another engine go on with those that are there."""
        self.all_come = True
        subscription = self.subscription
        if subscription is not None:
            subscription.end_wait()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def pull(self) -> bool:
        """Takes new output from the core. Returns whether the request has finished."""
        with self._lock:
            return self._pull()

    def _pull(self) -> bool:
        request, subscription = self.request, self.subscription
        if subscription is not None and not request.finished:
            if self._begun:
                more = subscription.take_more()
                if more is not None:
                    request.absorb_more(*more)
                    self._unseen = True
                    return False
            try:
                outputs = subscription.take()
            except MemoryError as error:
                self.error = error
                self.end()
                return True
            for output in outputs:
                request.absorb(output)
            if outputs:
                self._unseen = True
                self._begun = not request.match_stops
                if request.finished:
                    self.release()
        return request.finished

    def refresh(self) -> bool:
        """Like `pull`, but outside the reader's loop; wakes the reader if there is new output."""
        finished = self.pull()
        if self._unseen:
            self.wake_anywhere()
        return finished

    def next_output(self) -> RequestOutput | None:
        """The next output, as `output_kind` defines it; None if there is none yet."""
        with self._lock:
            if self.has_ended:
                return None
            subscription = self.subscription
            if self._is_plain and self._begun and not self._unseen and subscription is not None:
                more = subscription.take_more()
                if more is not None:
                    return self.request.plain_delta(*more)
            finished = self._pull()
            if not finished and (not self._unseen or self.kind is RequestOutputKind.FINAL_ONLY):
                return None
            return self._output(finished)

    def final_output(self) -> RequestOutput | None:
        """The last output; None while the request runs."""
        with self._lock:
            return self._output(True) if self._pull() else None

    def _output(self, finished: bool) -> RequestOutput:
        self._unseen = False
        self.has_ended = finished
        if finished:
            self.raise_failure()
        return self.request.output(delta=self.kind is RequestOutputKind.DELTA)

    def raise_failure(self) -> None:
        """Raises the request's error if the request failed."""
        request = self.request
        if self.error is not None:
            raise self.error
        if request.error is None:
            return
        if any(sample.finish == "error" for sample in request.samples):
            self._driver.raise_death(request.number)
        raise RequestFailedError(f"request failed: {request.error}", output=request.result()) from request.error

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def bind(self, loop: asyncio.AbstractEventLoop, ends_only: bool) -> None:
        """Makes the core notify this loop."""
        self.link = self._driver.link(loop)
        subscription = self.subscription
        if subscription is not None:
            subscription.move(self.link.notifier, ends_only)

    def wake(self) -> None:
        """Wakes the reader. Call it in the reader's loop."""
        self.has_output = True
        waiter = self.waiting
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def wake_anywhere(self) -> None:
        """Wakes the reader from any thread."""
        if self.link is not None:
            self.link.wake(self)

    def waiter(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future that is done when there is new output. Only one reader may wait."""
        waiter = self.waiting
        if waiter is not None and not waiter.done():
            raise RuntimeError("another task is reading this stream")
        waiter = self.waiting = asyncio.Future(loop=loop)  # faster than loop.create_future; this runs for every output
        return waiter

    async def finish(self) -> None:
        """Waits until the request has finished."""
        loop = asyncio.get_running_loop()
        self.bind(loop, not self.request.match_stops)
        while not self.pull():
            await self.waiter(loop)

    def wait_blocking(self, timeout: float | None) -> bool:
        """Waits without asyncio until the request has finished; False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.pull():
            left = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
            if left <= 0:
                return False
            subscription = self.subscription
            if subscription is None:
                time.sleep(min(left, 0.001))
            else:
                subscription.wait(left)
        return True


class Reader:
    """Reads the outputs of a request. Dropping the reader ends the request.

    Args:
        feed: The request.
        keep: An object to keep alive as long as this reader.
    """

    __slots__ = ("__weakref__", "_feed", "_keep")

    def __init__(self, feed: Feed, keep: object) -> None:
        self._feed = feed
        self._keep = keep

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._feed.request.request_id

    @property
    def finished(self) -> bool:
        """Whether the last output was given out."""
        return self._feed.has_ended

    def abort(self) -> None:
        """Ends the request at the next step boundary; the last output says "abort". A second call does nothing."""
        self._feed.abort()

    def close(self) -> None:
        """Ends the request and drops what it made."""
        self._drop()
        self._feed.wake_anywhere()

    def _drop(self) -> None:
        self._feed.has_ended = self._feed.aborts = True
        self._feed.end()

    def __del__(self) -> None:
        self._drop()

    def __repr__(self) -> str:
        state = "finished" if self._feed.request.finished else "running"
        return f"{type(self).__name__}({self.request_id}, {state})"


class RequestStream(Reader):
    """Outputs of one request: `async for output in stream`, or `await stream` for the last one.

    Cancelling the reading task, closing the stream or dropping it ends the request. A slow reader does not slow the engine:
    unread outputs merge into one.
    """

    __slots__ = ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            RequestFailedError: The request failed; `.output` holds its output so far.
            EngineDeadError: A fault has killed the engine.
            InvalidRequestError: A long text was tokenised after the call had returned, and it cannot run.
        """
        feed, loop = self._feed, asyncio.get_running_loop()
        if feed.link is None or feed.link.loop() is not loop:
            feed.bind(loop, feed.ends_only)
            feed.has_output = True
        try:
            while True:
                if feed.has_output or feed.has_ended:
                    feed.has_output = False
                    output = feed.next_output()
                    if output is not None:
                        return output
                    if feed.has_ended:
                        raise StopAsyncIteration
                await feed.waiter(loop)
        except asyncio.CancelledError:
            self._drop()
            raise

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._final().__await__()

    async def _final(self) -> RequestOutput:
        feed = self._feed
        if feed.has_ended:
            raise RuntimeError(f"the last output of request {self.request_id} was already read")
        try:
            await feed.finish()
        except asyncio.CancelledError:
            self._drop()
            raise
        output = feed.final_output()
        assert output is not None
        return output

    async def aclose(self) -> None:
        """Ends the request and drops what it made."""
        self.close()


class RequestHandle(Reader):
    """Reads a request without asyncio. Dropping the handle ends the request."""

    __slots__ = ()

    def poll(self) -> RequestOutput | None:
        """The next output, as `output_kind` defines it; None if there is none yet or the last output was given out.

        Raises:
            RequestFailedError: The request failed; `.output` holds its output so far.
            EngineDeadError: A fault has killed the engine.
        """
        return self._feed.next_output()

    def wait(self, timeout: float | None = None) -> RequestOutput:
        """Waits until the request has finished, without holding the GIL, and returns the last output.

        Args:
            timeout: Seconds; None = no limit.

        Raises:
            TimeoutError: The request still runs.
            RequestFailedError, EngineDeadError: As in `poll`.
        """
        feed = self._feed
        subscription = feed.subscription
        if subscription is not None and not feed.request.match_stops:
            subscription.move(None, True)
        try:
            done = feed.wait_blocking(timeout)
        finally:
            if subscription is not None and feed.subscription is subscription:
                subscription.move(None, feed.ends_only)
        if not done:
            raise TimeoutError(f"request {self.request_id} still runs after {timeout} s")
        output = feed.final_output()
        assert output is not None
        return output


class PendingResult(Reader, Generic[Result]):
    """A result that is being computed. Await it to get the result."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Result]:
        return self._result().__await__()

    async def _result(self) -> Result:
        feed, request = self._feed, self._feed.request
        try:
            await feed.finish()
        except asyncio.CancelledError:
            self._drop()
            raise
        feed.has_ended = True
        feed.raise_failure()
        if request.samples[0].finish == "abort":
            what = "score" if isinstance(request, ScoreRequest) else "request"
            raise RequestFailedError(f"{what} was aborted", output=request.result())
        return cast(Result, request.result())


class DeferredSubmission:
    """A job that prepares a request and submits it, unless the request was ended meanwhile.

    Args:
        feed: The registered request.
        prepare: Returns the core parameters.
    """

    def __init__(self, feed: Feed, prepare: Callable[[], dict[str, Any]]) -> None:
        self._feed, self._prepare = feed, prepare

    def run(self) -> None:
        """Submits the request, unless it ended before it was prepared or meanwhile."""
        core = None if self._has_ended() else self._prepare()
        if core is None or self._has_ended():
            self._feed.end()
            self._feed.wake_anywhere()
        else:
            self._feed.submit(core)
            self._feed.wake_anywhere()  # the loop drops a notification of a request that `submit` has not registered yet

    def _has_ended(self) -> bool:
        return self._feed.aborts or self._feed.refused

    def fail(self, error: BaseException) -> None:
        """Passes the error to the reader."""
        self._feed.fail(as_exception(error, RequestFailedError))
