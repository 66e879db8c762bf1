"""`llmpy route`: a proxy before several servers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from argparse import Namespace

from ..errors import ConfigError
from .http_server import begin_log, loop_factory, make_server, serve
from .listening import bind
from .serve import LOOPBACK, read_keys
from .stderr import Lines
from .tls import tls_context


def run(chosen: Namespace) -> int:
    """Routes requests until SIGTERM or Ctrl-C."""
    with contextlib.redirect_stderr(Lines(sys.stderr)):
        return _run(chosen)


def _run(chosen: Namespace) -> int:
    keys = read_keys(chosen.api_key_file)
    if chosen.host not in LOOPBACK and not keys:
        print(f"llmpy: {chosen.host} is open to others and no key is needed; --api-key-file", file=sys.stderr)
    tls = tls_context(chosen)
    try:
        from ..router import build_router, parsed
        from ..router.proxy import find_router
        from ..server.connections import bounded  # noqa: F401  (it needs uvicorn)
    except ImportError as error:
        raise ImportError(f"`llmpy route` needs the package {error.name}; pip install 'llmpy[server]'") from None
    begin_log(chosen)
    roles = ((None, chosen.urls), ("prefill", chosen.prefill), ("decode", chosen.decode))
    engines = [parsed(url, role) for role, urls in roles for url in urls]
    if not engines:
        raise ConfigError("route: wanted addresses of servers, have none; llmpy route http://127.0.0.1:8001", option="urls")
    app = build_router(
        engines,
        policy=chosen.policy,
        api_keys=keys,
        cors_origins=tuple(chosen.cors_origin),
        max_body_bytes=chosen.max_body_bytes,
        poll_s=chosen.poll,
    )
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bind(chosen.host, chosen.port)]
        server = make_server(app, chosen, tls)
        runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
        runner.run(serve(server, find_router(app), chosen, sockets, has_page=False))
    return 0
