"""The ASGI application: paths and middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..async_engine import AsyncEngine
from ..engine.handover import check as check_handover
from ..errors import QueueFullError
from . import adapters, anthropic, control, models, page, pooling, render, responses, scoring, weights
from .chat import chat_completions
from .completions import completions
from .errors import HttpError, ending, log, refusal, unknown_path
from .frames import ClientGone
from .generate import generate
from .metrics import metrics
from .middleware import guard, guarded_service
from .openapi import openapi
from .service import Options, Service, check_serves

Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

POST: dict[str, Handler] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses.responses,
    "/v1/responses/{id}/cancel": responses.cancel,
    "/v1/embeddings": pooling.embeddings,
    "/pooling": pooling.pooling,
    "/classify": pooling.classify,
    **scoring.POST,
    "/inference/v1/generate": generate,
    **render.POST,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/tokenize": models.tokenize,
    "/detokenize": models.detokenize,
}
GET: dict[str, Handler] = {
    "/v1/responses/{id}": responses.response,
    "/v1/models": models.models,
    "/v1/models/{name:path}": models.model,
    "/tokenizer_info": models.tokenizer_info,
    "/health": models.health,
    "/ping": models.ping,
    "/version": models.version,
    "/load": models.load,
    "/metrics": metrics,
    "/openapi.json": openapi,
}
CONTROL_POST: dict[str, Handler] = {**control.POST, **weights.POST, **adapters.POST}
CONTROL_GET: dict[str, Handler] = {**control.GET, **weights.GET}
RENDERING = (
    *render.POST,
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/v1/models",
    "/v1/models/{name:path}",
    "/health",
    "/ping",
    "/version",
)
"""Paths of a server that only renders (--render-only)."""
_SGLANG = "SGLang's dialect"
LATER = {
    "/generate": _SGLANG,
    "/health_generate": _SGLANG,
    "/flush_cache": _SGLANG,
    "/update_weights_from_tensor": _SGLANG,
    "/update_weights_from_distributed": _SGLANG,
    "/update_weights_from_disk": _SGLANG,
    "/init_weights_update_group": _SGLANG,
    "/destroy_weights_update_group": _SGLANG,
    "/get_weight_version": _SGLANG,
    "/weights_checker": _SGLANG,
    "/release_memory_occupation": _SGLANG,
    "/resume_memory_occupation": _SGLANG,
    "/pause_generation": _SGLANG,
    "/continue_generation": _SGLANG,
    "/abort_request": _SGLANG,
}
"""Known paths that are not implemented -> the feature that they belong to."""


def build_app(engine: AsyncEngine | render.Renderer, **options: Any) -> ASGIApp:
    """An ASGI application that serves an engine.

    Args:
        engine: The engine; the caller must close it. A Renderer serves only the paths that run no model.
        options: Fields of `Options`.

    Returns:
        The application; `app.state.service` is its Service.
    """
    service = Service(engine=engine, options=replace(Options(), **options))  # type: ignore[arg-type]
    if service.options.role != "both" and isinstance(engine, AsyncEngine):
        check_handover(engine.config, f"role {service.options.role!r}")
    is_open = service.options.control
    post, get = ({**POST, **CONTROL_POST}, {**GET, **CONTROL_GET}) if is_open else (POST, GET)
    if isinstance(engine, render.Renderer):
        post, get = ({path: _in(table, path) for path in table} for table in (post, get))
    routes = [Route(path, _endpoint(service, handler), methods=["POST"]) for path, handler in post.items()]
    routes += [Route(path, _endpoint(service, handler), methods=["GET"]) for path, handler in get.items()]
    routes.append(Route("/v1/responses/{id}", _endpoint(service, responses.delete), methods=["DELETE"]))
    routes += [Route(path, _later, methods=["GET", "POST"]) for path in LATER]
    routes += [] if is_open else [Route(path, _closed, methods=["GET", "POST"]) for path in (*CONTROL_POST, *CONTROL_GET)]
    routes += page.routes()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.drain(service)

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: unknown_path})
    app.state.service = service
    app.router.redirect_slashes = False  # a redirect would go to the host that the request names
    return guard(app, service, (*CONTROL_POST, *CONTROL_GET), partial(check_serves, service))


def find_service(app: ASGIApp) -> Service:
    """The Service of an application from `build_app`."""
    service = guarded_service(app)
    assert isinstance(service, Service)
    return service


class _endpoint:
    """A handler as an ASGI application; Starlette calls it without a wrapper."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self._service, self._handler = service, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.running += 1
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            request = Request(scope, receive)
            response = await self._answer(request)
            if self._service.options.log_prompts and scope["method"] == "POST":
                log.info("%s %s", scope["path"], getattr(request.state, "logged_body", b"").decode(errors="replace"))
            await response(scope, receive, noted)
        except asyncio.CancelledError:
            if has_begun or not self._service.is_over:
                raise
            await refusal(ending(), scope["path"])(scope, receive, send)
        finally:
            self._service.running -= 1

    async def _answer(self, request: Request) -> ASGIApp:
        try:
            return await self._handler(self._service, request)
        except ClientGone:
            return Response(status_code=499)  # the client is gone; the status is for the log
        except Exception as error:
            wait = self._service.queue_seconds() if isinstance(error, QueueFullError) else None
            return refusal(error, request.url.path, wait)


def _in(table: Mapping[str, Handler], path: str) -> Handler:
    """The handler of a path in a server that only renders."""
    return table[path] if path in RENDERING else _renders_only


async def _renders_only(service: Service, request: Request) -> ASGIApp:
    raise HttpError(501, f"{request.url.path}: this server only renders (--render-only)")


async def _later(request: Request) -> Response:
    feature = LATER[request.scope["route"].path]
    return refusal(HttpError(501, f"{request.url.path}: {feature}: not implemented yet"), request.url.path)


async def _closed(request: Request) -> Response:
    return refusal(HttpError(404, f"{request.url.path} is off; start the server with --control"), request.url.path)
