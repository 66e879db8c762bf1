"""Calls from another process of this host: JSON lines over a Unix socket, many in flight on one connection.

A line is `{"id": n, "call": name, "args": [...], "kwargs": {...}}`; the answer is `{"id": n, "result": ...}` or
`{"id": n, "error": text}`.
Nothing is unpickled. The socket lies in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ..engine.jobs import is_cancellation

Methods = Mapping[str, Callable[..., Awaitable[Any]]]
_LINE_BYTES = 1 << 28
"""Longest line in bytes; a prompt of a million ids takes 8 MB."""


class Server:
    """Serves methods on a new Unix socket. Runs in one event loop.

    Args:
        methods: The callable methods, by name.
    """

    def __init__(self, methods: Methods) -> None:
        self._methods = methods
        self._folder = tempfile.mkdtemp(prefix="llmpy-")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def path(self) -> str:
        """Path of the socket."""
        return str(Path(self._folder) / "socket")

    async def start(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_unix_server(self._connected, self.path, limit=_LINE_BYTES)

    async def close(self) -> None:
        """Stops listening and closes the connections, which cancels their calls."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        while self._writers:
            await asyncio.sleep(0.001)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the calls of one connection; when it closes, its calls are cancelled, and so are their requests."""
        tasks: set[asyncio.Task[None]] = set()
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                task = asyncio.create_task(self._answer(json.loads(line), writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except ConnectionError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
            self._writers.discard(writer)

    async def _answer(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            result = await self._methods[message["call"]](*message["args"], **message["kwargs"])
            line = json.dumps({"id": message["id"], "result": result})
        except BaseException as error:
            if is_cancellation(error):
                raise
            line = json.dumps({"id": message["id"], "error": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(ConnectionError):
            writer.write(line.encode() + b"\n")
            await writer.drain()


class Client:
    """The client of a `Server`. Runs in one event loop.

    Args:
        path: Path of the server's socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the server and waits for its result.

        Raises:
            RuntimeError: The method raised; the text names the exception's type.
            ConnectionError: The server's process has ended.
        """
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=_LINE_BYTES)
                self._reading = asyncio.create_task(self._read(reader))
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            message = {"id": number, "call": name, "args": args, "kwargs": kwargs}
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
            return await future
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Ends the connection."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        cause: BaseException | None = None
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["id"])
                if future is None or future.done():
                    continue
                if "error" in answer:
                    future.set_exception(RuntimeError(answer["error"]))
                else:
                    future.set_result(answer["result"])
        except BaseException as error:  # any end of reading ends the waiting calls
            cause = error
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for future in self._waiting.values():
            if not future.done():
                gone = ConnectionError("the engine's process closed the connection")
                gone.__cause__ = cause
                future.set_exception(gone)
