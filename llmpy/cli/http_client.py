"""A small HTTP/1.1 client over asyncio for commands that call a server: POST with a streamed answer, and GET."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, urlsplit

Take = Callable[[bytes], None]


class HttpFailure(Exception):
    """The server refused, or the connection broke.

    Args:
        message: The failure.
        status: HTTP status; 0 = no status was received.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def reason(error: OSError) -> str:
    """The reason why a server cannot be reached."""
    if isinstance(error, ConnectionRefusedError):
        return "no server listens at this address; is the server running?"
    return error.strerror or str(error) or type(error).__name__


def address(url: str) -> SplitResult:
    """Parses a server's address, with or without http://.

    Raises:
        ValueError: The text is not an address.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError(f"wanted http://HOST:PORT, have {url!r}")
    return parts


class _Connection(asyncio.Protocol):
    """A connection with one request at a time; pieces of the answer's body go to a function as they arrive."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: Any = None
        self._buffer = b""
        self._take: Take = lambda piece: None
        self._done: asyncio.Future[int] | None = None
        self._step: Callable[[], bool] = self._head
        self._status = 0
        self._left = 0
        self._stays = True

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._step == self._rest:
            self._finish()
        self._fail(HttpFailure(f"the connection was closed: {error or 'by the server'}"))

    def ask(self, request: bytes, take: Take) -> asyncio.Future[int]:
        """Sends a request; the future returns the status when the answer is complete."""
        self._take, self._step, self._buffer = take, self._head, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while self._done is not None and self._step():
                pass
        except (ValueError, IndexError) as error:
            self._fail(HttpFailure(f"the answer is no HTTP: {error}"))
            self.close()

    def _fail(self, error: Exception) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(error)

    def _finish(self) -> bool:
        done, self._done = self._done, None
        if not self._stays:
            self.close()
        if done is not None and not done.done():
            done.set_result(self._status)
        return False

    def _head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.split(b"\r\n")
        fields = dict(line.lower().split(b":", 1) for line in lines)
        self._status, self._buffer = int(first.split()[1]), rest
        if self._status == 100:
            return True
        self._stays = fields.get(b"connection", b"").strip() != b"close"
        if fields.get(b"transfer-encoding", b"").strip() == b"chunked":
            self._step = self._chunk
        elif b"content-length" in fields:
            self._left, self._step = int(fields[b"content-length"]), self._counted
        else:
            self._stays, self._step = False, self._rest
        return True

    def _chunk(self) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        size = int(line.split(b";")[0], 16)
        if len(rest) < size + 2:
            return False
        self._buffer = rest[size + 2 :]
        if size == 0:
            return self._finish()
        self._take(rest[:size])
        return True

    def _counted(self) -> bool:
        piece, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        self._left -= len(piece)
        if piece:
            self._take(piece)
        return self._finish() if self._left == 0 else False

    def _rest(self) -> bool:
        piece, self._buffer = self._buffer, b""
        if piece:
            self._take(piece)
        return False


class HttpClient:
    """Sends requests to one server, with one connection per request in flight.

    Args:
        url: URL of the server; a path in it is the prefix of requests' paths.
        key: API key of every request; None = none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = address(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._fields = f"host: {parts.netloc}\r\n" + (f"authorization: Bearer {key}\r\n" if key else "")
        self._idle: list[_Connection] = []

    async def _connection(self) -> _Connection:
        while self._idle:
            found = self._idle.pop()
            if found.is_open:
                return found
        try:
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls))[1]
        except OSError as error:
            raise HttpFailure(reason(error)) from None

    async def _ask(self, request: bytes, take: Take) -> int:
        connection = await self._connection()
        try:
            status = await connection.ask(request, take)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return status

    async def post(self, path: str, body: bytes, take: Take) -> int:
        """Posts JSON.

        Args:
            path: Path after the URL.
            body: JSON.
            take: Called with the pieces of the answer's body as they arrive.

        Returns:
            The status.

        Raises:
            HttpFailure: The connection broke.
        """
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._fields}content-type: application/json\r\n"
        return await self._ask(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body, take)

    async def get(self, path: str) -> Any:
        """Gets the JSON at a path.

        Raises:
            HttpFailure: The connection broke, the status is not 200, or the body is not JSON.
        """
        parts: list[bytes] = []
        status = await self._ask(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._fields}\r\n".encode(), parts.append)
        if status != 200:
            raise HttpFailure(f"{path}: status {status}", status)
        try:
            return json.loads(b"".join(parts))
        except ValueError:
            raise HttpFailure(f"{path}: the answer is not JSON", status) from None

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
