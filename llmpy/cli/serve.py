"""`llmpy serve`: the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import stat
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .adapters import load, modules
from .common import model_path
from .engine_options import engine_options
from .http_server import begin_log, loop_factory, make_server, serve
from .listening import bind
from .stderr import Lines
from .tls import tls_context
from .vllm_flags import REASONING_PARSERS, TOOL_PARSERS, parser_name

MAX_QUEUED = 2048
SWITCH_S = 0.0005
"""Seconds that a helper thread may keep the GIL from the event loop. Python's default, 5 ms, would delay each wait."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(chosen: Namespace) -> int:
    """Loads the model and serves it until SIGTERM or Ctrl-C."""
    with contextlib.redirect_stderr(Lines(sys.stderr)):
        return _run(chosen)


def _run(chosen: Namespace) -> int:
    keys, control_keys = _keys(chosen)
    tls = tls_context(chosen)
    try:
        from ..server import Renderer, build_app
        from ..server.app import find_service
        from ..server.connections import bounded  # noqa: F401  (it needs uvicorn)
        from ..server.limits import option_problem
        from ..server.service import Options
    except ImportError as error:
        raise ImportError(f"`llmpy serve` needs the package {error.name}; pip install 'llmpy[server]'") from None
    from .. import AsyncEngine

    def end() -> None:
        server.should_exit = True

    begin_log(chosen)
    served = _options(chosen, api_keys=keys, control_keys=control_keys, on_drain=end)
    Options(**served)  # raises before a model is loaded
    if problem := option_problem("max_connections", chosen.max_connections):
        raise ConfigError(problem, option="max_connections", value=chosen.max_connections)
    options = {"max_queued_requests": MAX_QUEUED, **engine_options(chosen)}
    _check_role(chosen, options)
    publish = _publisher(chosen, options)
    served["kv_events"] = _told_events(chosen)
    adapters = modules(chosen)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bind(chosen.host, chosen.port)]
        started = time.perf_counter()
        engine = (Renderer if chosen.render_only else AsyncEngine)(model_path(chosen), **options)
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()  # exclude long-lived objects from later garbage collections
        print(f"{engine!r}\nready after {time.perf_counter() - started:.2f} s", file=sys.stderr)
        app = build_app(engine, **served)
        if isinstance(engine, AsyncEngine):
            load(engine, adapters, find_service(app).known_names)
        server = make_server(app, chosen, tls)
        if isinstance(engine, AsyncEngine):
            stack.callback(engine.close)
            stack.enter_context(publish(engine))
        runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
        runner.run(serve(server, find_service(app), chosen, sockets, not chosen.render_only))
    return 0


def _keys(chosen: Namespace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """API keys and control keys.

    Raises:
        ConfigError: Other machines could use the control paths without a key.
    """
    keys, control_keys = read_keys(chosen.api_key_file), read_keys(chosen.control_key_file)
    if chosen.host not in LOOPBACK and not keys:
        print(f"llmpy: {chosen.host} is open to others and no key is needed; --api-key-file", file=sys.stderr)
    if chosen.control and chosen.host not in LOOPBACK and not control_keys:
        message = f"--control on {chosen.host}: wanted keys of its own, have none; --control-key-file"
        raise ConfigError(message, option="control")
    return keys, control_keys


def _options(chosen: Namespace, **others: Any) -> dict[str, Any]:
    """The options of the application."""
    names = "tool_call_parser reasoning_parser allow_request_template allow_image_urls max_body_bytes stream_timeout"
    names += " shutdown_timeout stuck_timeout log_prompts keep_responses salt_by_key control metrics_compat reject_when_asleep"
    names += " role"
    made = {name: getattr(chosen, name) for name in names.split()}
    for option, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        made[option] = parser_name(known, "--" + option.replace("_", "-"), made[option])
    lists = {"served_model_name": tuple(chosen.served_model_name), "cors_origins": tuple(chosen.cors_origin)}
    lists["image_domains"] = tuple(chosen.image_domains)
    return {**made, **lists, **others}


def _check_role(chosen: Namespace, options: dict[str, Any]) -> None:
    """Raises before the model loads if a role needs options that are not given."""
    if chosen.role != "both":
        from ..config import EngineConfig
        from ..engine.handover import check

        check(EngineConfig(model=model_path(chosen), **options), f"--role {chosen.role}")


def _told_events(chosen: Namespace) -> dict[str, str | None] | None:
    """Where routers can connect to KV events; None if nowhere."""
    if chosen.kv_events_address is None:
        return None
    from ..server.kv_events import binds

    replay = chosen.kv_events_replay_address
    found = {"endpoint": chosen.kv_events_address, "replay_endpoint": replay if replay and binds(replay) else None}
    return found if binds(chosen.kv_events_address) else None


def _publisher(chosen: Namespace, options: dict[str, Any]) -> Callable[[Any], AbstractContextManager[object]]:
    """A function that opens the publisher of KV events if --kv-events-address is given. Adds the engine options for it."""
    if chosen.kv_events_address is None:
        return contextlib.nullcontext
    try:
        from ..server.kv_events import CAPACITY, KvEventPublisher, check_addresses, is_open
    except ImportError as error:
        raise ImportError(f"--kv-events-address needs the package {error.name}; pip install 'llmpy[kvevents]'") from None
    check_addresses(chosen.kv_events_address, chosen.kv_events_replay_address)
    for address in (chosen.kv_events_address, chosen.kv_events_replay_address):
        if address is not None and is_open(address):
            print(f"llmpy: {address} tells all who reach it the token ids of prompts; use tcp://lo:PORT", file=sys.stderr)
    options.setdefault("kv_event_capacity", CAPACITY)

    from ..server.service import model_names

    def publish(engine: Any) -> AbstractContextManager[object]:
        name = (chosen.served_model_name or model_names(engine))[0]
        topic = f"kv@{chosen.host}:{chosen.port}@{name}"
        replay, style = chosen.kv_events_replay_address, chosen.kv_events_format
        return contextlib.closing(KvEventPublisher(engine, topic, chosen.kv_events_address, replay, style))

    return publish


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Reads the keys of a file, one per line.

    Raises:
        ConfigError: The file holds no key.
    """
    if path is None:
        return ()
    keys = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    mode = stat.S_IMODE(path.stat().st_mode)
    if keys and mode & 0o077:
        print(f"llmpy: {path}: other users may read these keys (mode {mode:o}); chmod 600 {path}", file=sys.stderr)
    if not keys:
        raise ConfigError(f"{path}: wanted keys, one per line, have none", option="api_key_file")
    return keys
