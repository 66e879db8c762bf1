"""Paths for model names, tokenisation, health and load."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from .. import __version__
from ..async_engine import AsyncEngine
from ..sampling_params import GENERATION_KEYS
from .errors import HttpError, answer
from .images import load_images
from .protocol import DetokenizeRequest, TokenizeRequest
from .requests import beside, read, template_kwargs
from .service import Service


async def models(service: Service, request: Request) -> ASGIApp:
    """Lists the names of the model and of its adapters, with the fields of OpenAI's and of Anthropic's protocol."""
    data = [_model(service, name) for name in (*service.names, *(one.name for one in service.adapters))]
    return answer({"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})


async def model(service: Service, request: Request) -> ASGIApp:
    """Describes one model name."""
    return answer(_model(service, service.model_name(request.path_params["name"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = next((one for one in service.adapters if one.name == service.adapter(name)), None)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        "created": service.created,
        "owned_by": "llmpy",
        "root": service.names[0] if adapter is None else adapter.path or name,
        "parent": None if adapter is None else service.names[0],
        "max_model_len": service.max_model_len,
        "default_sampling_params": _defaults(service),
    }


def _defaults(service: Service) -> dict[str, Any] | None:
    """Default sampling parameters of requests; None if the server does not sample."""
    if not isinstance(service.engine, AsyncEngine):
        return None
    params = service.engine.get_default_sampling_params()
    return {name: getattr(params, name) for key, name in GENERATION_KEYS.items() if key == name}


async def tokenize(service: Service, request: Request) -> ASGIApp:
    """Tokenises a prompt or a conversation."""
    body = await read(request, TokenizeRequest)
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "wanted either prompt or messages", "prompt")
    if body.messages is not None and body.add_special_tokens:
        message = "add_special_tokens is not supported with messages; the chat template adds them"
        raise HttpError(400, message, "add_special_tokens")
    tokenizer = service.tokenizer
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        prompt = body.prompt or ""
        ids = await beside(request, lambda: service.encode(prompt, special))
    else:
        arguments = {
            "add_generation_prompt": body.add_generation_prompt is not False and not body.continue_final_message,
            "continue_final_message": bool(body.continue_final_message),
            "tools": body.tools,
            "chat_template_kwargs": template_kwargs(body.chat_template_kwargs),
        }
        turns, images = await load_images(service, body.messages)
        ids = await beside(request, lambda: service.prompt_ids(turns, arguments, images))
    made: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len}
    if body.return_token_strs:
        made["token_strs"] = await service.beside(len(ids), lambda: tokenizer.convert_ids_to_tokens(ids))
    return answer(made, headers=service.answer_headers(request))


async def detokenize(service: Service, request: Request) -> ASGIApp:
    """Decodes token ids."""
    body = await read(request, DetokenizeRequest)
    service.model_name(body.model)

    def decoded() -> str:
        most = service.tokenizer.max_token_id
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) <= most:
            raise HttpError(400, f"tokens: wanted ids from 0 to {most}", "tokens")
        return service.tokenizer.decode(body.tokens)

    return answer({"prompt": await beside(request, decoded)}, headers=service.answer_headers(request))


async def tokenizer_info(service: Service, request: Request) -> ASGIApp:
    """Describes the tokenizer for clients that tokenise themselves."""
    tokenizer = service.tokenizer
    template = tokenizer.chat_template
    return answer(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            **tokenizer.special_tokens_map,
            "chat_template": None if template is None else str(template),
            "max_model_len": service.max_model_len,
        }
    )


async def health(service: Service, request: Request) -> ASGIApp:
    """200 if a request would be served."""
    service.check_health()
    return answer({})


async def ping(service: Service, request: Request) -> ASGIApp:
    """200 unless the process must be restarted; so also while the engine is paused, asleep or without weights."""
    service.check_health(alive_only=True)
    return answer({})


async def version(service: Service, request: Request) -> ASGIApp:
    """The version of llmpy."""
    return answer({"version": __version__})


async def load(service: Service, request: Request) -> ASGIApp:
    """Gauges of the engine, and what routers want to know of the server."""
    stats, options = service.engine.stats(), service.options
    gauges = {"running": stats.num_running, "waiting": stats.num_waiting, "kv_usage": stats.kv_usage}
    return answer({"server_load": service.running, **gauges, "role": options.role, "kv_events": options.kv_events})


async def drain(service: Service) -> None:
    """Refuses new requests and waits for running ones, at most shutdown_timeout."""
    service.is_draining = True
    deadline = asyncio.get_running_loop().time() + service.options.shutdown_timeout
    while service.running and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
