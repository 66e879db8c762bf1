"""`llmpy serve`: the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .common import model_path
from .engine_options import engine_options

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(chosen: Namespace) -> int:
    """Loads the model and serves it until SIGTERM or Ctrl-C."""
    keys = read_keys(chosen.api_key_file)
    if chosen.host not in LOOPBACK and not keys:
        print(f"llmpy: {chosen.host} is open to others and no key is needed; --api-key-file", file=sys.stderr)
    try:
        import uvicorn

        from ..server import build_app
    except ImportError as error:
        raise ImportError(f"`llmpy serve` needs the package {error.name}; pip install 'llmpy[server]'") from None
    from .. import AsyncEngine

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    started = time.perf_counter()
    options = engine_options(chosen)
    engine = AsyncEngine(model_path(chosen), **options)
    print(f"{engine!r}\nready after {time.perf_counter() - started:.2f} s", file=sys.stderr)
    app = build_app(
        engine,
        served_model_name=tuple(chosen.served_model_name),
        api_keys=keys,
        allow_request_template=chosen.allow_request_template,
        max_body_bytes=chosen.max_body_bytes,
        stream_timeout=chosen.stream_timeout,
        shutdown_timeout=chosen.shutdown_timeout,
        cors_origins=tuple(chosen.cors_origin),
        salt_by_key=chosen.salt_by_key,
    )
    config = uvicorn.Config(
        app,
        host=chosen.host,
        port=chosen.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(chosen.shutdown_timeout) + 1,
    )
    try:
        asyncio.run(_serve(uvicorn.Server(config), chosen))
    finally:
        engine.close()
    return 0


async def _serve(server: Any, chosen: Namespace) -> None:
    """Serves, and says where as soon as it listens."""
    task = asyncio.ensure_future(server.serve())
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if server.started:
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"http://{chosen.host}:{port}/v1", file=sys.stderr, flush=True)
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
