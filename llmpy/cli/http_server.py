"""What `llmpy serve` and `llmpy route` share: signals, the end of requests, the number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

FILES = 128
"""Number of open files besides connections."""


def connections(wanted: int) -> int:
    """Most connections: `wanted`, or fewer if the process may not open enough files."""
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < wanted + FILES:
        files = wanted + FILES if most == resource.RLIM_INFINITY else min(wanted + FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    if files < wanted + FILES:
        print(f"llmpy: {files} open files are allowed: at most {files - FILES} connections; ulimit -n", file=sys.stderr)
    return min(wanted, files - FILES)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed (extra `fast`)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextlib.contextmanager
def signals(server: Any, seconds: float) -> Iterator[None]:
    """Handles SIGTERM and Ctrl-C: the first signal lets requests finish within a time limit, a second one ends at once."""

    def handle(number: int, frame: object) -> None:
        is_first = not server.should_exit
        server.force_exit, server.should_exit = not is_first, True
        if is_first:
            with contextlib.suppress(Exception):  # a failed print must not keep the server from ending
                print(f"ending: what runs has {seconds:g} s; another signal ends it now", file=sys.stderr)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_server(app: Any, chosen: Namespace, tls: Any) -> Any:
    """uvicorn's server for an application.

    Args:
        app: The ASGI application.
        chosen: The command's options.
        tls: TLS context, or None.
    """
    import uvicorn

    from ..server.connections import bounded

    class Server(uvicorn.Server):
        """uvicorn's server, but after a signal it returns instead of raising the signal again."""

        def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
            return signals(self, chosen.shutdown_timeout)

    config = uvicorn.Config(
        app,
        http=bounded(connections(chosen.max_connections), chosen.stream_timeout, tls),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(chosen.shutdown_timeout) + 1,
    )
    return Server(config)


def begin_log(chosen: Namespace) -> None:
    """Sends the log to standard error."""
    logging.basicConfig(level=chosen.log_level.upper(), format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


async def serve(server: Any, service: Any, chosen: Namespace, sockets: list[socket.socket], has_page: bool = True) -> None:
    """Serves, and prints the address as soon as the server listens."""
    ending = asyncio.ensure_future(_end_requests(server, service, chosen.shutdown_timeout))
    task = asyncio.ensure_future(server.serve(sockets))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if server.started:
        scheme = "https" if chosen.ssl_certfile else "http"
        address = f"{scheme}://{in_url(chosen.host)}:{sockets[0].getsockname()[1]}"
        if has_page:
            print(f"open {address}/ in a browser, or give this base address to clients:", file=sys.stderr)
        print(f"{address}/v1", file=sys.stderr, flush=True)
    try:
        await task
    finally:
        ending.cancel()


async def _end_requests(server: Any, service: Any, seconds: float) -> None:
    """At shutdown, refuses new requests, and aborts the requests that still run after `seconds`."""
    while not server.should_exit:
        await asyncio.sleep(0.02)
    service.is_draining = True
    await asyncio.sleep(seconds)
    service.end_requests()


def in_url(host: str) -> str:
    """A host for a URL; a wildcard address becomes a loopback address, which browsers accept."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown
