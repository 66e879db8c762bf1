"""The ASGI application: paths, and what stands in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..async_engine import AsyncEngine
from . import anthropic, models
from .chat import chat_completions
from .completions import completions
from .errors import HttpError, refusal
from .frames import ClientGone
from .metrics import metrics
from .middleware import Guard
from .service import Options, Service

Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

POST: dict[str, Handler] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/embeddings": models.embeddings,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/tokenize": models.tokenize,
    "/detokenize": models.detokenize,
}
GET: dict[str, Handler] = {
    "/v1/models": models.models,
    "/v1/models/{name:path}": models.model,
    "/tokenizer_info": models.tokenizer_info,
    "/health": models.health,
    "/ping": models.health,
    "/version": models.version,
    "/load": models.load,
    "/metrics": metrics,
}
LATER = ("/v1/responses", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/classify", "/score", "/rerank", "/pooling")


def build_app(engine: AsyncEngine, **options: Any) -> ASGIApp:
    """An ASGI application that serves an engine.

    Args:
        engine: The engine; it stays the caller's to close.
        options: Fields of `Options`.

    Returns:
        The application, its `service` as an attribute of its state.
    """
    service = Service(engine=engine, options=replace(Options(), **options))
    routes = [Route(path, _endpoint(service, handler), methods=["POST"]) for path, handler in POST.items()]
    routes += [Route(path, _endpoint(service, handler), methods=["GET"]) for path, handler in GET.items()]
    routes += [Route(path, _later, methods=["GET", "POST"]) for path in LATER]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.drain(service)

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _known})
    app.state.service = service
    guarded: ASGIApp = Guard(app, service, ())
    if service.options.cors_origins:
        guarded = CORSMiddleware(guarded, allow_origins=service.options.cors_origins, allow_methods=["*"], allow_headers=["*"])
    return guarded


class _endpoint:
    """A handler as an ASGI application, which Starlette calls without a wrapper of its own."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self._service, self._handler = service, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.running += 1
        try:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)
        finally:
            self._service.running -= 1


    async def _answer(self, request: Request) -> ASGIApp:
        try:
            return await self._handler(self._service, request)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; the log does
        except Exception as error:
            return refusal(error, request.url.path)


def _known(request: Request, error: Exception) -> Response:
    """What the router refuses, in our words."""
    assert isinstance(error, HTTPException)
    known = HttpError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    return refusal(known, request.url.path)


async def _later(request: Request) -> Response:
    return refusal(HttpError(501, f"{request.url.path} is not implemented yet"), request.url.path)
