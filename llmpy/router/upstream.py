"""HTTP/1.1 to one engine: connections that are used again, and answers that arrive in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import h11

from ..errors import ConfigError

CONNECT_S = 5.0
READ_BYTES = 1 << 16
KEPT_CONNECTIONS = 64
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""After 25 seconds without a sign of life from its host a connection breaks."""

Headers = list[tuple[bytes, bytes]]


class Broken(Exception):
    """The engine cannot be reached, or the connection broke."""


class _Connection:
    """A connection with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    @property
    def is_open(self) -> bool:
        return not self._writer.is_closing() and not self._reader.at_eof()

    async def send(self, request: h11.Request, body: bytes) -> None:
        """Sends a request and its body."""
        parts = [self._http.send(request)] + ([self._http.send(h11.Data(data=body))] if body else [])
        self._writer.write(b"".join(part for part in [*parts, self._http.send(h11.EndOfMessage())] if part))
        await self._writer.drain()

    async def event(self) -> Any:
        """The next event of h11."""
        data = None
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                self._http.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise Broken("the connection was closed" if data == b"" else f"the answer is not HTTP: {error}") from None
        return event

    def is_ready_again(self) -> bool:
        """Whether another request can follow, behind the end of an answer."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE or not self.is_open:
            return False
        self._http.start_next_cycle()
        return True

    def close(self) -> None:
        self._writer.close()


class Answer:
    """An engine's answer. Read it to its end, or close it, which ends the request.

    Args:
        upstream: The engine's connections.
        connection: That of this answer.
        head: Status and headers.
    """

    def __init__(self, upstream: Upstream, connection: _Connection, head: h11.Response) -> None:
        self.status: int = head.status_code
        self.headers: Headers = [(bytes(name), bytes(value)) for name, value in head.headers]
        self._upstream, self._connection = upstream, connection
        self._is_over = False

    def header(self, name: bytes) -> str:
        """The value of a header; "" if there is none."""
        return next((value.decode("latin-1") for given, value in self.headers if given == name), "")

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body as it arrives.

        Raises:
            Broken: The connection broke.
        """
        with _as_broken():
            while not isinstance(event := await self._connection.event(), h11.EndOfMessage):
                if isinstance(event, h11.ConnectionClosed):
                    raise Broken("the connection was closed")
                yield bytes(event.data)
        self._is_over = True
        self._upstream.give_back(self._connection)

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Closes the connection unless the answer has been read to its end."""
        if not self._is_over:
            self._connection.close()


@contextlib.contextmanager
def _as_broken() -> Any:
    try:
        yield
    except (OSError, TimeoutError) as error:
        raise Broken(str(error) or type(error).__name__) from None


class Upstream:
    """Sends requests to one engine.

    Args:
        url: http://HOST:PORT.

    Raises:
        ConfigError: It is not an address.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            is_known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            is_known = is_known and parts.path in ("", "/", "/v1")
        except ValueError:
            is_known = False
        if not is_known:
            raise ConfigError(f"wanted http://HOST:PORT of an engine, have {url!r}", option="urls", value=url)
        self.host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._netloc = parts.netloc.rpartition("@")[2].encode()
        self._idle: list[_Connection] = []
        self._open: WeakSet[_Connection] = WeakSet()

    async def ask(self, method: str, target: str, headers: Headers, body: bytes = b"") -> Answer:
        """Sends a request, and waits for the head of the answer.

        Args:
            method: GET, POST, ...
            target: Path and query.
            headers: Without `host` and the length of the body.
            body: The body.

        Raises:
            Broken: The engine cannot be reached, or the connection broke.
        """
        length = [(b"content-length", b"%d" % len(body))] if body or method == "POST" else []
        request = h11.Request(method=method, target=target, headers=[(b"host", self._netloc), *headers, *length])
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                with contextlib.suppress(Broken):  # the engine may just have closed it; a new one tells more
                    return await self._asked(connection, request, body)
        return await self._asked(await self._connected(), request, body)

    async def _asked(self, connection: _Connection, request: h11.Request, body: bytes) -> Answer:
        try:
            with _as_broken():
                with contextlib.suppress(OSError):  # it may have refused the body, and said so
                    await connection.send(request, body)
                while isinstance(event := await connection.event(), h11.InformationalResponse):
                    pass
            if not isinstance(event, h11.Response):
                raise Broken("the connection was closed")
            return Answer(self, connection, event)
        except BaseException:
            connection.close()
            raise

    async def _connected(self) -> _Connection:
        with _as_broken():
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(self.host, self._port, ssl=self._tls)
        found = writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        made = _Connection(reader, writer)
        self._open.add(made)
        return made

    def give_back(self, connection: _Connection) -> None:
        """Keeps a connection for a later request."""
        if len(self._idle) < KEPT_CONNECTIONS and connection.is_ready_again():
            self._idle.append(connection)
        else:
            connection.close()

    def end(self) -> None:
        """Closes all connections; requests that run are `Broken`."""
        for connection in list(self._open):
            connection.close()
