"""Adapters over HTTP: vLLM's paths that load and unload them. A loaded adapter is a model name of requests."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from ..engine.jobs import LONG_WORK
from ..errors import ModelNotFoundError
from .errors import HttpError
from .requests import read
from .service import Service


class LoadRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


async def load(service: Service, request: Request) -> ASGIApp:
    """Loads an adapter on a thread; steps go on meanwhile."""
    body = await read(request, LoadRequest)
    name, adapters = body.lora_name, service.engine._frontend.adapters
    if not name or not body.lora_path:
        raise HttpError(400, "wanted lora_name and lora_path, have an empty one", "lora_path" if name else "lora_name")
    if name in service.known_names:
        raise HttpError(400, f"lora_name: {name[:200]!r} is a name of the model; use another one", "lora_name")
    if adapters.knows(name) and not body.load_inplace:
        message = f"The adapter {name[:200]!r} is loaded already; load_inplace replaces it, /v1/unload_lora_adapter removes it."
        raise HttpError(400, message, "lora_name")
    try:
        await service.jobs.of(LONG_WORK + 1).call(lambda: adapters.load(name, body.lora_path, None))
    except ModelNotFoundError as error:
        raise HttpError(404, str(error), "lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(service: Service, request: Request) -> ASGIApp:
    """Forgets an adapter; requests that have it go on with it."""
    body = await read(request, UnloadRequest)
    adapters = service.engine._frontend.adapters
    if not adapters.knows(body.lora_name):
        raise HttpError(404, f"The adapter {body.lora_name[:200]!r} is not loaded.", "lora_name")
    adapters.remove(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


POST = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}
