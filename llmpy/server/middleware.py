"""What happens to every request before its path is looked at: keys, length of bodies, the log, answers to errors."""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import HttpError, log, refusal
from .service import Service

OPEN = ("/health", "/ping")
"""Paths that need no key."""


class BodyTooLong(HttpError):
    """The body is longer than the server takes."""

    def __init__(self, most: int) -> None:
        super().__init__(413, f"the body is longer than {most} bytes; --max-body-bytes")


class Guard:
    """Keys, limits, the log.

    Args:
        app: What is guarded.
        service: The server.
        control: Paths that want a key of their own.
    """

    def __init__(self, app: ASGIApp, service: Service, control: Iterable[str]) -> None:
        self._app, self._service, self._control = app, service, frozenset(control)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        scope.setdefault("state", {})["key"] = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._admit(scope)
            await self._app(scope, _limited(receive, scope, self._service.options.max_body_bytes), noted)
        except HttpError as error:
            await refusal(error, scope["path"])(scope, receive, noted)
        finally:
            took = 1e3 * (time.perf_counter() - started)
            log.info("%s %s %d %.1f ms", scope["method"], scope["path"], status, took)

    def _admit(self, scope: Scope) -> None:
        """Checks the key, and that the server takes requests."""
        options, path = self._service.options, scope["path"]
        is_control = path in self._control
        keys = options.control_keys if is_control else options.api_keys
        if keys and path not in OPEN:
            given = _key(scope)
            if given is None or not any([hmac.compare_digest(given, key.encode()) for key in keys]):
                raise HttpError(401, "wanted a valid key: 'Authorization: Bearer KEY', or 'x-api-key'")
            scope["state"]["key"] = hmac.new(b"llmpy", given, "sha256").hexdigest()[:16]
        if self._service.is_draining and scope["method"] == "POST" and not is_control:
            raise HttpError(503, "the server is shutting down", retry_after=5)


def _key(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:])
        if name == b"x-api-key":
            return bytes(value)
    return None


def _limited(receive: Receive, scope: Scope, most: int) -> Receive:
    """Receives a body of at most so many bytes."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if length.isdigit() and int(length) > most:
        raise BodyTooLong(most)
    have = 0

    async def limited() -> Message:
        nonlocal have
        message = await receive()
        have += len(message.get("body", b""))
        if have > most:
            raise BodyTooLong(most)
        return message

    return limited
