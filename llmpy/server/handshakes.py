"""TLS handshakes: a connection is counted and gets a deadline before its handshake begins."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Generator
from typing import Any


class _Begun:
    """A coroutine that has run to its first wait, so that TLS owns the connection before anything is read from it.

    Args:
        coroutine: A coroutine that has not started.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine, self._first = coroutine, coroutine.send(None)

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            yield self._first
        except BaseException as error:  # the task was cancelled
            self._coroutine.throw(error)
            raise
        return (yield from self._coroutine.__await__())


class Handshake(asyncio.Protocol):
    """The protocol of a connection during its TLS handshake; then another protocol takes over.

    The event loop's TLS would make a protocol only after the handshake, so unfinished handshakes would not be counted.

    Args:
        inner: The protocol after the handshake: one of uvicorn's.
        context: TLS context of the server.
        max_connections: Most connections; a further one is closed.
        seconds: Time limit of the handshake.
    """

    def __init__(self, inner: Any, context: ssl.SSLContext, max_connections: int, seconds: float) -> None:
        self._inner, self._context, self._max, self._seconds = inner, context, max_connections, seconds
        self._early: list[bytes] = []
        self._is_lost = False

    def connection_made(self, transport: Any) -> None:
        """Counts the connection and starts the handshake."""
        self._transport = transport
        self._inner.connections.add(self)
        if len(self._inner.connections) > self._max:
            self._leave()
            return
        loop = self._inner.loop
        try:
            begun = _Begun(
                loop.start_tls(transport, self, self._context, server_side=True, ssl_handshake_timeout=self._seconds)
            )
            self._task = loop.create_task(self._run(begun))
        except BaseException:
            self._leave()
            raise

    async def _run(self, begun: _Begun) -> None:
        try:
            secured = await begun
            if not self._is_lost:
                self._hand_over(secured)
        except OSError:  # no TLS, no trust, or timeout
            self._leave()
        except BaseException:
            self._leave()
            raise

    def _hand_over(self, secured: Any) -> None:
        """Passes the connection and the data so far to the inner protocol after the handshake."""
        self._inner.connections.discard(self)
        self._inner.connection_made(secured)
        secured.set_protocol(self._inner)
        if self._early:
            self._inner.data_received(b"".join(self._early))

    def data_received(self, data: bytes) -> None:
        """Stores data that arrived with the end of the handshake."""
        self._early.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        """Removes the connection from the count."""
        self._is_lost = True
        self._inner.connections.discard(self)

    def _leave(self) -> None:
        self._inner.connections.discard(self)
        self._transport.abort()

    def shutdown(self) -> None:
        """Aborts the handshake; uvicorn calls this at shutdown."""
        self._leave()

    def sweep(self, now: float) -> None:
        """Does nothing: the event loop limits the time of a handshake."""
