"""The render paths, which return the ids that a request would run, and the stand-in for an engine in a render-only server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..config import EngineConfig
from ..engine.loading import load_renderer
from ..hub import resolve
from ..text.tokenizer import Tokenizer
from .chat import Chat
from .completions import Completion
from .errors import HttpError, answer
from .images import expanded, features_of, given_images
from .protocol import ChatRequest, CompletionRequest, Sampling
from .requests import beside, read
from .service import Answering, Service

if TYPE_CHECKING:
    from ..vision.images import Images


class Renderer:
    """The tokenizer, the maximum length and the image processor of a model: replaces the engine in a server that only renders.

    Args:
        model: Hub id or directory; weights are not needed.
        options: Fields of EngineConfig.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.config: EngineConfig
        self.name = resolve(str(model), options.get("revision"), options.get("hf_token"), weights=False).name
        self.tokenizer: Tokenizer
        self.images: Images | None
        self.config, self.tokenizer, self.images = load_renderer(EngineConfig(model=str(model), **options))

    def check_health(self, stuck_after_s: float = 0.0, alive_only: bool = False) -> None:
        """Never raises."""

    def is_sleeping(self) -> bool:
        """Always False."""
        return False


def _rendered(
    answering: Answering, ids: list[int], fields: dict[str, Any], features: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A body for /inference/v1/generate that runs the same request."""
    params = {name: value for name, value in fields.items() if name != "output_kind"}
    return {
        "request_id": answering.how["request_id"],
        "model": answering.model,
        "token_ids": ids,
        "features": features,
        "sampling_params": msgspec.to_builtins(params, str_keys=True),
        "priority": answering.how["priority"],
        "cache_salt": answering.how["cache_salt"],
    }


def _check(request: Request, body: Sampling) -> None:
    """Refuses beam searches: the path that takes the rendered body has none."""
    if body.use_beam_search:
        path = request.url.path
        message = f"use_beam_search is not supported on {path}; use {path.removesuffix('/render')}"
        raise HttpError(400, message, "use_beam_search")


async def render_chat(service: Service, request: Request) -> ASGIApp:
    """Renders a chat completion."""
    body = await read(request, ChatRequest)
    _check(request, body)
    given = given_images(body.messages)
    chat = await beside(request, lambda: Chat(service, request, body))
    await chat.load_images()
    if given is not None:
        request.state.size = max(request.state.size, service.beside_size)  # images are prepared on a thread

    def rendered() -> dict[str, Any]:
        messages = chat.messages()
        ids, placed = expanded(service, service.prompt(messages, chat.template, chat.images))
        return _rendered(chat, ids, chat.sampling(messages), features_of(placed, given))

    return answer(await beside(request, rendered), headers=service.answer_headers(request))


async def render_completions(service: Service, request: Request) -> ASGIApp:
    """Renders a completion: one object per prompt."""
    body = await read(request, CompletionRequest)
    _check(request, body)

    def rendered() -> list[dict[str, Any]]:
        completion, special = Completion(service, request, body), body.add_special_tokens is not False
        ids = [service.encode(item, special) if isinstance(item, str) else item for item in completion.prompts]
        return [_rendered(completion, one, completion.fields) for one in ids]

    return answer(await beside(request, rendered), headers=service.answer_headers(request))


POST = {
    "/v1/completions/render": render_completions,
    "/v1/chat/completions/render": render_chat,
}
