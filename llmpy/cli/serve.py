"""`llmpy serve`: the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .common import model_path
from .engine_options import engine_options
from .tls import tls_options

MAX_QUEUED = 2048
FILES = 128
"""Open files beside connections."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(chosen: Namespace) -> int:
    """Loads the model and serves it until SIGTERM or Ctrl-C."""
    keys = read_keys(chosen.api_key_file)
    if chosen.host not in LOOPBACK and not keys:
        print(f"llmpy: {chosen.host} is open to others and no key is needed; --api-key-file", file=sys.stderr)
    control_keys = read_keys(chosen.control_key_file)
    if chosen.control and chosen.host not in LOOPBACK and not control_keys:
        message = f"--control on {chosen.host}: wanted keys of its own, have none; --control-key-file"
        raise ConfigError(message, option="control")
    tls = tls_options(chosen)
    try:
        import uvicorn

        from ..server import Renderer, build_app
        from ..server.connections import bounded
    except ImportError as error:
        raise ImportError(f"`llmpy serve` needs the package {error.name}; pip install 'llmpy[server]'") from None
    from .. import AsyncEngine

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    started = time.perf_counter()
    options = {"max_queued_requests": MAX_QUEUED, **engine_options(chosen)}
    publish = _publisher(chosen, options)
    engine = (Renderer if chosen.render_only else AsyncEngine)(model_path(chosen), **options)
    print(f"{engine!r}\nready after {time.perf_counter() - started:.2f} s", file=sys.stderr)

    def end() -> None:
        server.should_exit = True

    app = build_app(
        engine,
        served_model_name=tuple(chosen.served_model_name),
        api_keys=keys,
        tool_call_parser=chosen.tool_call_parser,
        reasoning_parser=chosen.reasoning_parser,
        allow_request_template=chosen.allow_request_template,
        max_body_bytes=chosen.max_body_bytes,
        stream_timeout=chosen.stream_timeout,
        shutdown_timeout=chosen.shutdown_timeout,
        log_prompts=chosen.log_prompts,
        cors_origins=tuple(chosen.cors_origin),
        keep_responses=chosen.keep_responses,
        salt_by_key=chosen.salt_by_key,
        control=chosen.control,
        control_keys=control_keys,
        metrics_compat=chosen.metrics_compat,
        reject_when_asleep=chosen.reject_when_asleep,
        on_drain=end,
    )
    config = uvicorn.Config(
        app,
        host=chosen.host,
        port=chosen.port,
        http=bounded(_connections(chosen.max_connections), chosen.stream_timeout),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(chosen.shutdown_timeout) + 1,
        **tls,
    )
    server = uvicorn.Server(config)
    with contextlib.ExitStack() as stack:
        if isinstance(engine, AsyncEngine):
            stack.callback(engine.close)
            stack.enter_context(publish(engine))
        runner = stack.enter_context(asyncio.Runner(loop_factory=_loop_factory()))
        runner.run(_serve(server, chosen))
    return 0


def _publisher(chosen: Namespace, options: dict[str, Any]) -> Callable[[Any], AbstractContextManager[object]]:
    """What publishes an engine's events, if somebody wants them; the engine's options are completed."""
    if chosen.kv_events_address is None:
        return contextlib.nullcontext
    try:
        from ..server.kv_events import CAPACITY, KvEventPublisher
    except ImportError as error:
        raise ImportError(f"--kv-events-address needs the package {error.name}; pip install 'llmpy[kvevents]'") from None
    options.setdefault("kv_event_capacity", CAPACITY)

    def publish(engine: Any) -> AbstractContextManager[object]:
        name = chosen.served_model_name[0] if chosen.served_model_name else engine.config.model
        topic = f"kv@{chosen.host}:{chosen.port}@{name}"
        replay, style = chosen.kv_events_replay_address, chosen.kv_events_format
        return contextlib.closing(KvEventPublisher(engine, topic, chosen.kv_events_address, replay, style))

    return publish


def _connections(wanted: int) -> int:
    """Most connections: as many as wanted, if this process may open so many files."""
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < wanted + FILES:
        files = wanted + FILES if most == resource.RLIM_INFINITY else min(wanted + FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    if files < wanted + FILES:
        print(f"llmpy: {files} open files are allowed: at most {files - FILES} connections; ulimit -n", file=sys.stderr)
    return min(wanted, files - FILES)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where the extra `fast` is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(server: Any, chosen: Namespace) -> None:
    """Serves, and says where as soon as it listens."""
    task = asyncio.ensure_future(server.serve())
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if server.started:
        port = server.servers[0].sockets[0].getsockname()[1]
        scheme = "https" if chosen.ssl_certfile else "http"
        print(f"{scheme}://{chosen.host}:{port}/v1", file=sys.stderr, flush=True)
    await task


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys in a file, one per line.

    Raises:
        ConfigError: It holds none.
    """
    if path is None:
        return ()
    keys = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"{path}: wanted keys, one per line, have none", option="api_key_file")
    return keys
