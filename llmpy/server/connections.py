"""Limits of connections below HTTP: their number, the time for a request head, and the time that data stays unread."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from weakref import WeakSet

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .handshakes import Handshake
from .limits import most, seconds
from .strict_head import strict

MAX_HEAD_BYTES = most("head_bytes")
MAX_REST_BYTES = most("rest_bytes")
"""Bytes of a body to read and drop after an early answer, so that the client gets to read the answer."""
HEAD_S = seconds("head_s")
"""Seconds for a TLS handshake, and again for a request head (from the connection, the handshake or the head's first byte)."""
LINGER_S = seconds("linger_s")
"""Seconds that a closing connection may take to send its written data."""
SWEEP_S = 1.0

_MESSAGE = b'{"error":{"message":"too many connections","type":"service_unavailable","param":null,"code":null}}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_MESSAGE), _MESSAGE)
)


class Clock:
    """The start time of a condition that holds now; None if it does not hold."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: float | None = None

    def start(self, now: float) -> None:
        """Starts the clock unless it runs already."""
        if self.since is None:
            self.since = now

    def stop(self) -> None:
        """Stops the clock."""
        self.since = None

    def passed(self, now: float, seconds: float) -> bool:
        """Whether the clock has run for more than `seconds`."""
        return self.since is not None and now - self.since > seconds


def bounded(max_connections: int, read_timeout: float, tls: ssl.SSLContext | None = None) -> Any:
    """Makes a protocol for uvicorn that limits connections. A sweep every second checks all connections.

    Args:
        max_connections: Most connections. A further one gets a 503 and is closed; with TLS it is closed before the handshake.
        read_timeout: Seconds that written data may stay unread.
        tls: TLS context if the server uses TLS; uvicorn then gets no certificate.
    """

    swept: WeakSet[Any] = WeakSet()
    """Server states with a scheduled sweep; each has one sweep."""

    class Bounded(strict(AutoHTTPProtocol)):  # type: ignore[misc]
        """One connection."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head, self._unread, self._closing = Clock(), Clock(), Clock()
            self._surplus_bytes = 0
            if self.server_state not in swept:
                swept.add(self.server_state)
                self.loop.call_later(SWEEP_S, _sweep, self.loop, self.server_state)
            if len(self.connections) > max_connections:
                transport.write(FULL)
                transport.close()
            else:
                self._head.start(self.loop.time())

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before or (before is not None and not before.response_complete):
                self._head.stop()
                self._surplus_bytes = 0
                return
            has_rest = before is not None and before.more_body
            self._surplus_bytes += len(data)
            if self._surplus_bytes > (MAX_REST_BYTES if has_rest else MAX_HEAD_BYTES):
                self.transport.close()
            self._head.start(self.loop.time())

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread.start(self.loop.time())

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unread.stop()

        def sweep(self, now: float) -> None:
            """Ends the connection if it has exceeded a time limit."""
            if self.transport.is_closing():
                self._closing.start(now)
            elif self._head.passed(now, HEAD_S):
                self.transport.close()
            if self._unread.passed(now, read_timeout) or self._closing.passed(now, LINGER_S):
                self.transport.abort()

    def _sweep(loop: asyncio.AbstractEventLoop, state: Any) -> None:
        try:
            now = loop.time()
            for connection in list(state.connections):
                connection.sweep(now)
        finally:
            if state.connections:
                loop.call_later(SWEEP_S, _sweep, loop, state)
            else:
                swept.discard(state)

    def secured(**given: Any) -> asyncio.BaseProtocol:
        assert tls is not None
        return Handshake(Bounded(**given), tls, max_connections, HEAD_S)

    return Bounded if tls is None else secured
