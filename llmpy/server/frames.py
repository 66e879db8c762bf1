"""Server-sent events: one write per step, comments during pauses, and the end when the client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
COMMENT_S = 15.0


class ClientGone(Exception):
    """The client has closed the connection."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def attended(receive: Receive, work: Awaitable[Result]) -> Result:
    """Returns the result of work; cancels the work when the client disconnects.

    Raises:
        ClientGone: The client has disconnected.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(task, watch)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and waits for them."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(BaseException):
            await task


class EventStream:
    """A streamed answer.

    Args:
        frames: The frames; the generator is closed when the answer ends for any reason.
        headers: Further headers.
        read_timeout: Seconds that a client may leave a frame unread.
    """

    def __init__(self, frames: AsyncGenerator[bytes], headers: Mapping[str, str], read_timeout: float) -> None:
        self._frames = frames
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()),
        ]
        self._read_timeout = read_timeout
        self._sending_since: float | None = None
        self._sent = time.monotonic()
        self._has_left = False
        self._tender: asyncio.TimerHandle
        self._comment: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the stream until it ends or the client disconnects. A second task waits for the disconnect."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.ensure_future(_until_gone(receive))

        def leave(_: object = None) -> None:
            self._has_left = True
            task.cancel()

        watch.add_done_callback(leave)
        self._tend_later(send, leave)
        try:
            await self._produce(send)
        except asyncio.CancelledError:
            if not self._has_left or task.uncancel():
                raise
        finally:
            watch.remove_done_callback(leave)
            watch.cancel()
            self._tender.cancel()
            await self._frames.aclose()

    async def _produce(self, send: Send) -> None:
        is_last = False
        async for frame in self._frames:
            self._sending_since = time.monotonic()
            is_last = frame.endswith(DONE)
            await send({"type": "http.response.body", "body": frame, "more_body": not is_last})
            self._sent, self._sending_since = self._sending_since, None
        if not is_last:
            await send({"type": "http.response.body", "body": b""})

    def _tend_later(self, send: Send, leave: Callable[[], None]) -> None:
        pause = min(COMMENT_S, self._read_timeout) / 2
        self._tender = asyncio.get_running_loop().call_later(pause, self._tend, send, leave)

    def _tend(self, send: Send, leave: Callable[[], None]) -> None:
        """Sends comments during pauses; ends the stream when a frame stays unread too long."""
        now, since = time.monotonic(), self._sending_since
        if since is not None and now - since > self._read_timeout:
            leave()
            return
        try:
            if since is None and now - self._sent >= COMMENT_S:
                self._sent = now
                self._comment = asyncio.ensure_future(send({"type": "http.response.body", "body": COMMENT, "more_body": True}))
        finally:
            self._tend_later(send, leave)
