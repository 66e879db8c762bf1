"""OpenAI batch files, offline: each input line is a request, each output line its answer; many run at once."""

from __future__ import annotations

import asyncio
import shlex
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec
from starlette.types import ASGIApp, Message

from ..errors import ConfigError, RequestFailedError
from .batch_files import ENDING, Counts, Line

AHEAD = 8
"""Most windows of requests in flight or finished but waiting for an earlier answer; answers are written in order."""
FULL_QUEUE_S = 0.1
"""Seconds before a request that met a full queue is sent again."""
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/classify",
    "/pooling",
)


class _Request(msgspec.Struct):
    """A line of the input. Fields are untyped, so that errors can name the request by its custom_id."""

    custom_id: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Response(msgspec.Struct):
    """The server's response."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class _Answer(msgspec.Struct):
    """A line of the output. batch_files.py relies on the order: `id` is first, `error` last."""

    id: str
    custom_id: Any
    response: _Response | None
    error: dict[str, str] | None


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and content of a POST to an application in this process."""
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, []
    ended = asyncio.Event()

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"host", b"batch")],
        "server": ("batch", 80),
        "client": None,
    }
    try:
        await app(scope, receive, send)
    finally:
        ended.set()
    return status, b"".join(parts)


def _refusal(line: Line, custom_id: Any, message: str) -> bytes:
    """The answer to a line that is not a valid request."""
    return _line(_Answer(line.id, custom_id, None, {"code": "invalid_request", "message": message}))


def _line(made: _Answer) -> bytes:
    return msgspec.json.encode(made) + b"\n"


async def answer(app: ASGIApp, line: Line, is_first: bool = False) -> bytes:
    """Runs a request and returns its line of the output.

    Args:
        app: The server's application.
        line: The request.
        is_first: Whether an unknown model raises; later requests probably name the same model.

    Raises:
        ConfigError: The first request names a model that is not served.
        RequestFailedError: The engine has died.
    """
    name: Any = f"line-{line.number}"
    try:
        request = msgspec.json.decode(line.text, type=_Request)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _refusal(line, name, f"line {line.number} is not a JSON object")
    name = name if request.custom_id is None else request.custom_id
    if request.url not in PATHS:
        return _refusal(line, name, f"url: wanted one of {', '.join(PATHS)}, have {str(request.url)[:60]!r}")
    try:
        body = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _refusal(line, name, f"line {line.number}: body: wanted a JSON object")
    body["stream"] = msgspec.Raw(b"false")
    status, content = await call(app, request.url, msgspec.json.encode(body))
    while status == 429:
        await asyncio.sleep(FULL_QUEUE_S)
        status, content = await call(app, request.url, msgspec.json.encode(body))
    refused = {} if status == 200 else msgspec.json.decode(content)["error"]
    error = {"code": str(status), "message": refused["message"]} if refused else None
    if is_first and refused.get("code") == "model_not_found":
        name = msgspec.json.decode(body["model"])
        message = f"line {line.number}: its model is {name!r}: run again with --served-model-name {shlex.quote(str(name))}"
        raise ConfigError(message, option="served_model_name", value=name)
    if status == 503 and error is not None:
        raise RequestFailedError(f"line {line.number}: {error['message']}; run again, it goes on there")
    return _line(_Answer(line.id, name, _Response(status, line.id, msgspec.Raw(content)), error))


async def run_batch(
    app: ASGIApp, lines: Iterator[Line], output: BinaryIO, done: Counts, window: int, tell: Callable[[Counts], None]
) -> Counts:
    """Answers all lines in order.

    Args:
        app: The server's application.
        lines: Requests, read on demand.
        output: File for the answers, one line each.
        done: Counts of the answers that the file already holds.
        window: Most requests in flight, at least 1.
        tell: Called with the counts after each answer.

    Returns:
        The counts, including `done`.

    Raises:
        ConfigError: The first request names a model that is not served.
        RequestFailedError: The engine has died. Earlier answers are written.
    """
    room = asyncio.Semaphore(window)
    pending: deque[asyncio.Task[bytes]] = deque()

    first: Line | None = None

    async def one(line: Line) -> bytes:
        nonlocal first
        first = first or line
        try:
            return line.answer or await answer(app, line, line is first)
        finally:
            room.release()

    async def write() -> None:
        nonlocal done
        made = await pending[0]
        pending.popleft()
        output.write(made)
        output.flush()
        done = Counts(done.answers + 1, done.errors + (not made.endswith(ENDING)))
        tell(done)

    try:
        for line in lines:
            while pending and (pending[0].done() or len(pending) >= window * AHEAD):
                await write()
            await room.acquire()
            pending.append(asyncio.create_task(one(line)))
        while pending:
            await write()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return done
