"""/v1/embeddings, /pooling and /classify: pooled states of prompts, in the formats of OpenAI and vLLM."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.pooling import TASKS
from .errors import HttpError, answer
from .frames import attended
from .protocol import ClassifyRequest, EmbeddingRequest, Pooling, PoolingRequest
from .requests import beside, prompts_of, read
from .service import Service, text_size


def check_task(service: Service, request: Request, tasks: Sequence[str]) -> str:
    """The first of these tasks that the model supports.

    Raises:
        HttpError: 400, the model supports none of them; the message lists its tasks.
    """
    pooler = service.engine._frontend.pooler
    found = next((task for task in tasks if task in pooler.tasks), None)
    if found is None:
        have = ", ".join([*pooler.tasks, *(["generate"] if pooler.generates else [])])
        message = f"{request.url.path} wants a model with the task {' or '.join(tasks)}; this one has: {have}"
        raise HttpError(400, message, "model")
    return found


async def pooled(
    service: Service, request: Request, body: Pooling, prompts: Sequence[Any], task: str, **fields: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Runs prompts through a pooling task.

    Args:
        service: The server.
        request: The HTTP request.
        body: The body of the request.
        prompts: Texts or ids.
        task: The pooling task.
        fields: Fields of PoolingParams; None = the model's default.

    Returns:
        float32 arrays, and the usage.
    """
    plain = body.add_special_tokens is False
    given = {name: value for name, value in fields.items() if value is not None}
    salt, encode = service.salt(request, body.cache_salt), service.engine.encode
    adapter = service.adapter(body.model)

    def queue() -> list[Any]:
        encoded = [service.encode(item) if isinstance(item, str) else item for item in prompts] if plain else prompts
        return [encode(item, pooling_task=task, lora_request=adapter, cache_salt=salt, **given) for item in encoded]

    async def results() -> list[Any]:
        pending = await service.beside(max(request.state.size, text_size(prompts)), queue)
        return [await one for one in pending]

    outputs = await attended(request.receive, results())
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    rows = [np.asarray(output.outputs.data, np.float32) for output in outputs]
    return rows, {"prompt_tokens": tokens, "total_tokens": tokens}


async def _prompts(service: Service, request: Request, body: EmbeddingRequest | ClassifyRequest) -> list[str | list[int]]:
    return await beside(request, lambda: prompts_of(body.input, "input", service.sizes))


def made(kind: str, name: str, rest: dict[str, Any]) -> dict[str, Any]:
    """An answer with the first fields of vLLM's answers."""
    return {"id": f"{kind}-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": name, **rest}


def _shown(row: Any, body: EmbeddingRequest) -> Any:
    """An array as a list of numbers, or as bytes, which are encoded as base64."""
    return row.tobytes() if body.encoding_format == "base64" else row.tolist()


async def embeddings(service: Service, request: Request) -> ASGIApp:
    """Embeds texts or ids."""
    body = await read(request, EmbeddingRequest)
    name, task = service.model_name(body.model), check_task(service, request, ("embed",))
    prompts = await _prompts(service, request, body)
    rows, usage = await pooled(service, request, body, prompts, task, dimensions=body.dimensions)
    data = [{"object": "embedding", "index": i, "embedding": _shown(row, body)} for i, row in enumerate(rows)]
    return answer({"object": "list", "model": name, "data": data, "usage": usage}, headers=service.answer_headers(request))


async def pooling(service: Service, request: Request) -> ASGIApp:
    """Pools states by a task; the default is the task for every token."""
    body = await read(request, PoolingRequest)
    if body.task not in (None, *TASKS):
        raise HttpError(400, f"task: wanted one of {', '.join(TASKS)}, have {str(body.task)[:40]!r}", "task")
    wanted = ("token_embed", "token_classify") if body.task is None else (body.task,)
    name, task = service.model_name(body.model), check_task(service, request, wanted)
    fields = {"dimensions": body.dimensions, "normalize": body.normalize, "use_activation": body.use_activation}
    rows, usage = await pooled(service, request, body, await _prompts(service, request, body), task, **fields)
    data = [{"object": "pooling", "index": i, "data": _shown(row, body)} for i, row in enumerate(rows)]
    return answer(made("pool", name, {"data": data, "usage": usage}), headers=service.answer_headers(request))


async def classify(service: Service, request: Request) -> ASGIApp:
    """Classifies texts or ids."""
    body = await read(request, ClassifyRequest)
    name, task = service.model_name(body.model), check_task(service, request, ("classify",))
    prompts = await _prompts(service, request, body)
    rows, usage = await pooled(service, request, body, prompts, task, use_activation=body.use_activation)
    labels = service.engine._frontend.pooler.labels
    data = [
        {"index": i, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(row)}
        for i, row in enumerate(rows)
    ]
    return answer(made("classify", name, {"data": data, "usage": usage}), headers=service.answer_headers(request))
