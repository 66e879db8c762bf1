"""Ray Serve: replicas with one engine each, and a front that sends a request to the replica that has cached its prefix."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from ..async_engine import AsyncEngine
from ..engine.jobs import as_exception, is_cancellation
from ..server import build_app
from ..server.service import Options
from ._beginnings import Owners, beginnings

SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client")
"""Keys of a request's scope that go to the replica. The replica needs `client` to decide about control paths."""


def application(
    model: str,
    *,
    num_replicas: int | str = 1,
    ray_actor_options: Mapping[str, Any] | None = None,
    max_ongoing_requests: int = 256,
    max_imbalance: int = 16,
    server: Mapping[str, Any] | None = None,
    **engine: Any,
) -> serve.Application:
    """An application for `serve.run`: the HTTP server of `llmpy serve`, over several engines.

    A request goes to the replica that computed the longest prefix of its prompt (in pieces of 512 bytes), unless that replica
    has many more requests than others. A request with an unknown prefix goes to a replica with few requests.

    Args:
        model: Hub id, or a path that every machine has.
        num_replicas: Number of engines; "auto" = Ray Serve scales them.
        ray_actor_options: Resources of a replica: `{"num_gpus": 1}`.
        max_ongoing_requests: Most requests in one replica; others wait in the front.
        max_imbalance: Most requests that the replica with the prefix may have above the replica with the fewest.
        server: Options of `llmpy.server.build_app`.
        engine: Options of AsyncEngine.

    Returns:
        The application. `serve.run(application(...), route_prefix="/")` serves it.
    """
    options = replace(Options(), **(server or {}))
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"max_imbalance": max_imbalance})
    replicas = serve.deployment(
        Replica,
        name="llmpy",
        num_replicas=num_replicas,
        ray_actor_options=dict(ray_actor_options or {}),
        max_ongoing_requests=max_ongoing_requests,
        request_router_config=router,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
    )
    front = serve.deployment(Front, name="llmpy-front", max_ongoing_requests=1 << 20, ray_actor_options={"num_cpus": 0})
    return front.bind(replicas.bind(model, dict(engine), dict(server or {})), options.max_body_bytes)


class Replica:
    """One engine behind the server's application.

    Args:
        model: Hub id or path.
        engine: Options of AsyncEngine.
        server: Options of `llmpy.server.build_app`.
    """

    def __init__(self, model: str, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        self._engine = AsyncEngine(model, **engine)
        self._app = build_app(self._engine, **server)

    async def answer(self, scope: dict[str, Any], body: bytes, beginnings: tuple[bytes, ...]) -> AsyncIterator[Message]:
        """Answers one HTTP request.

        Args:
            scope: The request's ASGI scope.
            body: The request's body.
            beginnings: Keys of prefixes, for the router.

            Returns:
                The ASGI messages of the answer. The request is aborted if the reader stops.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue(1)
        gone = asyncio.Event()
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            except BaseException as error:
                if is_cancellation(error):  # the reader has left, so the queue stays full
                    raise
                await messages.put(None)
                raise as_exception(error) from error
            await messages.put(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            gone.set()
            task.cancel()

    def check_health(self) -> None:
        """Raises if the engine is dead or stuck, so that Ray Serve replaces the replica; not if it is paused or asleep."""
        self._engine.check_health(alive_only=True)

    def __del__(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.close()


class Front:
    """The deployment that Ray Serve's proxy calls: reads the body, computes the prefix keys, and passes the answer on.

    Args:
        replicas: The engines.
        max_body_bytes: Longest body, in bytes.
    """

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Answers one HTTP request."""
        try:
            body = await self._read(request)
        except ClientDisconnect:
            return Response(status_code=499)
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        messages = self._replicas.remote(scope, body, beginnings=beginnings(body))
        start = await anext(messages)
        response = StreamingResponse(_bodies(messages), status_code=start["status"])
        response.raw_headers = list(start["headers"])
        return response

    async def _read(self, request: Request) -> bytes:
        """Reads the body; stops soon after the limit, so that the replica can refuse the body."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                break
        return bytes(body)


async def _bodies(messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message.get("body", b"")


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that computed the longest prefix of its prompt, unless that has many more requests."""

    def initialize_state(self, max_imbalance: int = 16, **unused: object) -> None:
        """Initialises the router; Ray Serve passes the arguments of `application`.

        Args:
            max_imbalance: See `application`.
        """
        self._owners: Owners[ReplicaID] = Owners()
        self._max_imbalance = max_imbalance

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Lists of replicas to try, the best first; within a list Ray Serve takes the replica with the fewest requests."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # a retried request has tried all replicas
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        counts = {one.replica_id: self.replica_queue_len_cache.get(one.replica_id) or 0 for one in shuffled}
        owner = self._owners.find(_keys(pending_request), counts)
        if owner is None or counts[owner] > min(counts.values()) + self._max_imbalance:
            return [shuffled[:2], shuffled[2:]]
        return [
            [one for one in shuffled if one.replica_id == owner],
            [one for one in shuffled if one.replica_id != owner],
        ]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Records the replica of the request's prefixes."""
        self._owners.note(_keys(pending_request), replica_id)


def _keys(request: PendingRequest | None) -> tuple[bytes, ...]:
    keys: tuple[bytes, ...] = () if request is None else request.kwargs.get("beginnings", ())
    return keys
