"""Middleware for every request: API keys, limits of bodies, the log, answers to errors."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable
from socket import gethostname
from typing import Protocol
from urllib.parse import quote

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import HttpError, log, refusal
from .limits import BODIES, LONG_BYTES
from .page import is_page

OPEN = ("/health", "/ping")
"""Paths without a key, besides the page."""
PAGE_HEADER = b"x-llmpy-page"
"""Header of the requests that the page sends every second; they are logged at level debug."""
LOCAL_NAMES = (".localhost", ".local", ".internal")
"""Suffixes of host names that cannot be registered in DNS; `host.docker.internal` is this machine in Docker."""


class BodyTooLong(HttpError):
    """The body is longer than max_body_bytes."""

    def __init__(self, most: int) -> None:
        super().__init__(413, f"the body is longer than {most} bytes; --max-body-bytes")


class GuardOptions(Protocol):
    """The options that a Guard reads; see `llmpy.server.service.Options`."""

    @property
    def api_keys(self) -> tuple[str, ...]: ...
    @property
    def control_keys(self) -> tuple[str, ...]: ...
    @property
    def cors_origins(self) -> tuple[str, ...]: ...
    @property
    def max_body_bytes(self) -> int: ...


class Guarded(Protocol):
    """The state of a server that a Guard protects."""

    body_bytes: int

    @property
    def options(self) -> GuardOptions: ...


class Guard:
    """Checks keys and limits, and writes the log.

    Args:
        app: The application behind this middleware.
        service: The server.
        control: Control paths; they need a control key.
        check_serves: Raises for a request that the server could not run now.
    """

    def __init__(self, app: ASGIApp, service: Guarded, control: Iterable[str], check_serves: Callable[[], None]) -> None:
        self._app, self._service, self._control, self._check_serves = app, service, frozenset(control), check_serves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with an error."""
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

        limited: _Limited | None = None
        try:
            self._admit(scope)
            limited = _Limited(receive, scope, self._service)
            await self._app(scope, limited, noted)
        except HttpError as error:
            await refusal(error, scope["path"])(scope, receive, noted)
        finally:
            if limited is not None:
                limited.end()
            took = 1e3 * (time.perf_counter() - started)
            level = logging.DEBUG if _header(scope, PAGE_HEADER) else logging.INFO
            log.log(level, "%s %s %d %.1f ms", scope["method"], quote(scope["path"][:200]), status, took)

    def _admit(self, scope: Scope) -> None:
        """Checks the head, the origin and the key of a request, and that the server accepts requests."""
        options, path = self._service.options, _path(scope)
        _check_head(scope)
        if path not in OPEN:
            _check_origin(scope, options.cors_origins)
            if not options.api_keys:
                _check_host(scope)
        is_control = path in self._control
        keys = (options.control_keys or options.api_keys) if is_control else options.api_keys
        if is_control and not options.control_keys:
            _check_is_local(scope)
        if keys and path not in OPEN and not is_page(path):
            given = _key(scope)
            if given is None or not any([hmac.compare_digest(given, key.encode()) for key in keys]):
                raise HttpError(401, "wanted a valid key: 'Authorization: Bearer KEY', or 'x-api-key'")
            scope["state"]["key"] = hmac.new(b"llmpy", given, "sha256").hexdigest()[:16]
        if scope["method"] == "POST" and not is_control:
            self._check_serves()


def guard(app: ASGIApp, service: Guarded, control: Iterable[str], check_serves: Callable[[], None]) -> ASGIApp:
    """A Guard, behind CORS if the options name origins.

    Args:
        app, service, control, check_serves: As of Guard.
    """
    guarded: ASGIApp = Guard(app, service, control, check_serves)
    if service.options.cors_origins:
        guarded = CORSMiddleware(guarded, allow_origins=service.options.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return guarded


def guarded_service(app: ASGIApp) -> Guarded:
    """The server of an application from `guard`."""
    while isinstance(app, CORSMiddleware):
        app = app.app
    assert isinstance(app, Guard)
    return app._service


def _path(scope: Scope) -> str:
    """The path as the router sees it: without the prefix where the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if path.startswith(root + "/") else path


def _check_head(scope: Scope) -> None:
    """Refuses heads that a proxy may interpret differently than this server."""
    names = [name for name, _ in scope["headers"]]
    hosts = names.count(b"host")
    if b"content-length" in names and b"transfer-encoding" in names:
        message = "wanted Content-Length or Transfer-Encoding, have both; send one of them"
    elif hosts > 1 or (hosts == 0 and scope.get("http_version") == "1.1"):
        message = f"wanted one Host header, have {hosts}"
    else:
        return
    raise HttpError(400, message, headers={"Connection": "close"})


def _check_origin(scope: Scope, allowed: Iterable[str]) -> None:
    """Refuses requests that a browser sends for a page of another origin."""
    own = {_header(scope, b"host").lower()}
    for name, value in scope["headers"]:
        origin = value.decode("latin-1")
        is_own = origin.lower().partition("://")[2] in own
        if name == b"origin" and not is_own and origin not in allowed and "*" not in allowed:
            raise HttpError(403, f"pages of {origin[:200]} may not call this server; allow them with --cors-origin")


def _check_host(scope: Scope) -> None:
    """On a loopback address, refuses host names that an attacker's DNS may point at this machine (DNS rebinding)."""
    server, name = scope.get("server"), host_name(scope)
    if server is None or not is_loopback(str(server[0])) or is_loopback(name) or name in ("0.0.0.0", gethostname().lower()):
        return
    if "." in name and not name.endswith(LOCAL_NAMES):
        message = f"Host {name[:200]!r} is not this machine's; call it localhost, or start the server with --api-key-file"
        raise HttpError(403, message)


def _check_is_local(scope: Scope) -> None:
    """Refuses requests from other machines, and from pages in a browser of this machine."""
    client, name = scope.get("client"), host_name(scope)
    is_elsewhere = client is not None and not is_loopback(client[0])
    if is_elsewhere or not (is_loopback(name) or name == "0.0.0.0") or _header(scope, b"origin"):
        raise HttpError(403, "control paths are for clients of this machine unless they have keys; --control-key-file")


def host_name(scope: Scope) -> str:
    """The Host header without its port; "localhost" if there is no header."""
    host = _header(scope, b"host", "localhost").rpartition("@")[2].lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _header(scope: Scope, wanted: bytes, default: str = "") -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), default)


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _key(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:])
        if name == b"x-api-key":
            return bytes(value)
    return None


class _Limited:
    """Receives a body of at most max_body_bytes. All long bodies together may have BODIES times as many bytes.

    Args:
        receive: The server's receive function.
        scope: The request's scope.
        service: The server; it counts the bytes of all bodies.
    """

    def __init__(self, receive: Receive, scope: Scope, service: Guarded) -> None:
        self._receive, self._service, self._most = receive, service, service.options.max_body_bytes
        self._have = self._counted = 0
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._most:
            raise BodyTooLong(self._most)

    async def __call__(self) -> Message:
        """Receives the next message."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self._have += size
        if self._have > self._most:
            raise BodyTooLong(self._most)
        if self._have > LONG_BYTES:
            self._service.body_bytes += self._have - self._counted
            self._counted = self._have
            if self._service.body_bytes > BODIES * self._most:
                raise HttpError(429, "too many long bodies at once; try again", retry_after=1)
        return message

    def end(self) -> None:
        """Subtracts the body from the count after the request has been answered."""
        self._service.body_bytes -= self._counted
