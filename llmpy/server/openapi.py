"""GET /openapi.json: the paths and bodies of this server, from the structs that check them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from .. import __version__
from . import protocol
from .errors import answer
from .service import Service

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/completions/render": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatRequest,
    "/v1/chat/completions/render": protocol.ChatRequest,
    "/v1/responses": protocol.ResponsesRequest,
    "/v1/embeddings": protocol.EmbeddingRequest,
    "/pooling": protocol.PoolingRequest,
    "/classify": protocol.ClassifyRequest,
    "/score": protocol.ScoreRequest,
    "/v1/score": protocol.ScoreRequest,
    "/rerank": protocol.RerankRequest,
    "/v1/rerank": protocol.RerankRequest,
    "/v2/rerank": protocol.RerankRequest,
    "/inference/v1/generate": protocol.GenerateRequest,
    "/v1/messages": protocol.MessagesRequest,
    "/v1/messages/count_tokens": protocol.MessagesRequest,
    "/tokenize": protocol.TokenizeRequest,
    "/detokenize": protocol.DetokenizeRequest,
}
PLAIN = ("/metrics",)
ERRORS = ("400", "401", "404", "408", "413", "429", "503")


def document(routes: list[Any]) -> dict[str, Any]:
    """The OpenAPI document of an application.

    Args:
        routes: The application's routes. Pages, and routes with a body that has no struct here, are left out.
    """
    kinds = list(dict.fromkeys(BODIES.values()))
    bodies, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    refs = dict(zip(kinds, bodies, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        methods = getattr(route, "methods", None) or set()
        if isinstance(route, Route) and route.path in BODIES and "POST" in methods:
            body = {"required": True, "content": {"application/json": {"schema": refs[BODIES[route.path]]}}}
            paths[route.path] = {"post": {"requestBody": body, "responses": _responses("application/json")}}
        elif isinstance(route, Route) and methods == {"GET", "HEAD"} and route.path.startswith(("/v1", "/h", "/m", "/load")):
            path, names = re.sub(r":\w+}", "}", route.path), re.findall(r"{(\w+)", route.path)
            parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
            kind = "text/plain" if route.path in PLAIN else "application/json"
            paths[path] = {"get": {"parameters": parameters, "responses": _responses(kind)}}
    info = {"title": "llmpy", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _responses(kind: str) -> dict[str, Any]:
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    refused = {"description": "Refused", "content": {"application/json": {"schema": error}}}
    return {"200": {"description": "Done", "content": {kind: {}}}, **dict.fromkeys(ERRORS, refused)}


async def openapi(service: Service, request: Request) -> ASGIApp:
    """Answers with the OpenAPI document of this server."""
    return answer(document(request.app.routes))
