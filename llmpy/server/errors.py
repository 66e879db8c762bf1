"""Errors in the form of the protocols: a status, a type, and a message without text of the request."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..config import EngineConfig
from ..errors import (
    CheckpointError,
    DeviceError,
    DeviceMemoryError,
    EngineAsleepError,
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    EngineStuckError,
    InvalidRequestError,
    LlmpyError,
    ModelNotFoundError,
    NoAllowedTokenError,
    QueueFullError,
    RequestFailedError,
    UnsupportedError,
    WeightsMissingError,
    WeightUpdateError,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    409: "conflict_error",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "internal_error",
    501: "not_implemented_error",
    503: "service_unavailable",
    504: "timeout_error",
}
CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}
"""Default codes of OpenAI's protocol by status; an HttpError may set another code."""
TOO_LONG = "context_length_exceeded"
JSON = "application/json"
OPTIONS = frozenset(field.name for field in fields(EngineConfig))
WORDS = {
    "call score()": "set echo and max_tokens 0 on /v1/completions",
    "; chat_template, or generate() with a text prompt": "; start the server with --chat-template, or use /v1/completions",
    "The decoder prompt": "The prompt",
    "call wake_up()": "POST /wake_up",
    "call resume()": "POST /resume",
    "use level=1": "use level 1",
}
"""Phrases for Python callers -> phrases for HTTP clients."""
TRANSFERS = ("ipc_open", "nccl_open", "open", "init_weight_group", "receive")
"""Operations of DeviceErrors that concern the sender of weights, not the engine's device."""
UNSERVED = (EngineDeadError, EngineClosedError, EngineAsleepError, EngineStuckError, WeightsMissingError, DeviceMemoryError)
"""Errors that mean that the engine cannot serve any request now."""

log = logging.getLogger("llmpy.server")


class HttpError(Exception):
    """An error to answer with.

    Args:
        status: HTTP status.
        message: The message.
        param: The field of the request that is wrong.
        retry_after: Seconds after which a retry makes sense; None = no Retry-After header.
        code: The code of OpenAI's protocol; None = the default code of the status, if any.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after: float | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after
        self.code = CODES.get(status) if code is None else code
        self._headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = TYPES.get(self.status, "internal_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The error in Anthropic's form."""
        kind = {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}.get(self.status)
        return {"type": "error", "error": {"type": kind or TYPES.get(self.status, "api_error"), "message": self.message}}

    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        made = dict(self._headers)
        if self.status == 401:
            made["WWW-Authenticate"] = "Bearer"
        if self.retry_after is not None:
            made["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        return made


def for_clients(message: str) -> str:
    """An error's text for HTTP clients: flags instead of options, no Python calls, no internals of the grammar library."""
    text = message.partition("<state>")[0].rstrip()
    for python, words in WORDS.items():
        text = text.replace(python, words)
    return re.sub(r"\b([Rr]aise|[Ll]ower) (\w+)", _with_flag, text)


def _with_flag(found: re.Match[str]) -> str:
    return f"{found[1]} --{found[2].replace('_', '-')}" if found[2] in OPTIONS else found[0]


def ending() -> HttpError:
    """The answer of a server that is shutting down."""
    return HttpError(503, "the server is shutting down", retry_after=5)


def to_http(error: BaseException) -> HttpError:
    """Converts an error of the engine, or of parsing a body, to an answer. Errors that no request caused are logged."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, QueueFullError):
        return HttpError(429, for_clients(str(error)), retry_after=1)
    if isinstance(error, UNSERVED):
        return HttpError(503, for_clients(str(error)), retry_after=5)
    if isinstance(error, EngineBusyError):
        return HttpError(409, str(error))
    if isinstance(error, InvalidRequestError):
        code = TOO_LONG if "maximum model length" in str(error) else None
        return HttpError(400, for_clients(str(error)), error.parameter, code=code)
    if isinstance(error, UnsupportedError | WeightUpdateError | CheckpointError | ModelNotFoundError | NoAllowedTokenError):
        return HttpError(400, for_clients(str(error)))
    if isinstance(error, DeviceError) and error.operation in TRANSFERS:
        return HttpError(400, str(error))
    if isinstance(error, RequestFailedError) and isinstance(error.__cause__, InvalidRequestError | NoAllowedTokenError):
        return to_http(error.__cause__)  # the grammar does not compile, or other fields exclude all its texts
    if isinstance(error, ImportError):  # an optional package is missing
        return HttpError(501, str(error))
    if isinstance(error, RecursionError):
        return HttpError(400, "the body is nested too deep")
    if isinstance(error, TypeError):  # wrong types; the message has names of the Python interface
        return HttpError(400, for_clients(str(error)))
    log.error("a request failed", exc_info=error)
    if isinstance(error, MemoryError):
        return HttpError(503, "the server is out of memory; shorten the request, or try again later", retry_after=5)
    return HttpError(500, str(error) if isinstance(error, LlmpyError) else "internal error")


def refusal(error: BaseException, path: str, retry_after: float | None = None) -> Response:
    """The answer to a failed request in the protocol of its path.

    Args:
        error: The failure.
        path: The request's path.
        retry_after: Seconds until a full queue has room; None = 1.
    """
    known = to_http(error)
    if known.status == 429 and retry_after is not None:
        known.retry_after = retry_after
    body = known.anthropic() if path.startswith("/v1/messages") else known.body()
    return answer(body, known.status, known.headers())


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, headers, JSON)


def unknown_path(request: Request, error: Exception) -> Response:
    """Converts errors of Starlette's router to our error format."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    known = HttpError(error.status_code, message, headers=error.headers)
    return refusal(known, request.url.path)
