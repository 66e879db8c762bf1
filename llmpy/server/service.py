"""What all paths of one server share: the engine, its names, its options."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request

from ..async_engine import AsyncEngine
from ..outputs import RequestOutput
from ..sampling_params import RequestOutputKind
from ..tokenizer import Tokenizer
from .errors import HttpError
from .formats import Format, reasoning_markers, tool_format
from .logprobs import LogprobWriter
from .parsing import Parser, PlainParser, ReasoningParser, ToolParser
from .protocol import Sampling

Result = TypeVar("Result")

THREAD_CHARS = 8192  # longer conversations are rendered and tokenised beside the event loop


@dataclass(kw_only=True)
class Options:
    """How a server behaves.

    Args:
        served_model_name: Names that requests may call the model by; () = the model's path or id.
        api_keys: Any of them opens the paths; () = no key is needed.
        allow_request_template: A request may bring a chat template.
        max_body_bytes: Longest body.
        stream_timeout: Seconds that a client may leave a frame unread.
        shutdown_timeout: Seconds that running requests get when the server ends.
        log_prompts: Prompts are logged.
        cors_origins: Origins that browsers may call from; () = none.
        salt_by_key: Requests of unlike keys share no cached block.
        control: Paths that pause, put to sleep and update the engine exist.
        control_keys: Any of them opens those paths.
    """

    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allow_request_template: bool = False
    max_body_bytes: int = 32 << 20
    stream_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    log_prompts: bool = False
    cors_origins: tuple[str, ...] = ()
    salt_by_key: bool = False
    control: bool = False
    control_keys: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Service:
    """An engine that is served.

    Args:
        engine: The engine.
        options: How.
    """

    engine: AsyncEngine
    options: Options
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    running: int = 0
    """Requests that are being answered."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model."""
        return self.options.served_model_name or (str(self.engine.config.model),)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence."""
        length = self.engine.config.max_model_len
        assert isinstance(length, int)
        return length

    @cached_property
    def tool_format(self) -> Format | None:
        """How the model writes tool calls, as far as its chat template tells."""
        return tool_format(self.tokenizer.chat_template or "")

    @cached_property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """What the model puts around its reasoning."""
        return reasoning_markers(self.tokenizer.chat_template or "")

    def parser(self, prompt: str, has_tools: bool) -> Parser:
        """What takes an answer apart.

        Args:
            prompt: The rendered conversation: it may end with an open reasoning.
            has_tools: The request brought tools.
        """
        parser: Parser = ToolParser(self.tool_format) if has_tools and self.tool_format else PlainParser()
        if self.reasoning_markers is None:
            return parser
        return ReasoningParser(self.reasoning_markers, prompt.rstrip().endswith(self.reasoning_markers[0]), parser)

    def model_name(self, wanted: str | None) -> str:
        """The name to answer with.

        Raises:
            HttpError: 404, another model was asked for.
        """
        if wanted is None:
            return self.names[0]
        if wanted not in self.names:
            raise HttpError(404, f"The model `{wanted[:200]}` does not exist.", "model")
        return wanted

    def engine_arguments(self, request: Request, body: Any) -> dict[str, Any]:
        """Id, priority and salt of a request."""
        salt: str | None = body.cache_salt
        if self.options.salt_by_key and request.state.key is not None:
            salt = f"{request.state.key}/{salt or ''}"
        request_id = body.request_id or request.headers.get("x-request-id") or secrets.token_hex(12)
        request.state.request_id = request_id
        return {"request_id": request_id, "priority": body.priority or 0, "cache_salt": salt}

    def prompt_ids(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        """Ids of a conversation, as `AsyncEngine.chat` would run it."""
        given = {**arguments, **arguments["chat_template_kwargs"]}
        del given["chat_template_kwargs"]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, **given)
        return ids

    async def beside(self, size: int, call: Callable[[], Result]) -> Result:
        """Runs a call that renders or tokenises, on a thread if there is much to do."""
        return call() if size <= THREAD_CHARS else await asyncio.to_thread(call)

    def answer_headers(self, request: Request) -> dict[str, str]:
        """Headers of every answer to this request."""
        headers = {"x-request-id": getattr(request.state, "request_id", "") or request.headers.get("x-request-id", "")}
        ignored = getattr(request.state, "ignored", None)
        if ignored:
            headers["x-llmpy-ignored"] = ", ".join(name[:64] for name in ignored[:32])
        return {name: clean for name, value in headers.items() if (clean := _header(value))}


def _header(value: str) -> str:
    """A header's value: printable ASCII."""
    return "".join(c for c in value if " " <= c <= "~")[:2048]


def chars_of(messages: Any) -> int:
    """About how long a conversation is."""
    return sum(len(str(message.get("content") or "")) for message in messages if isinstance(message, Mapping))


def usage_of(outputs: list[RequestOutput], tokens: int, reasoning: int = 0) -> dict[str, Any]:
    """The counts of an answer: each prompt once, all samples."""
    prompt = sum(len(output.prompt_token_ids_array) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def raise_failure(output: RequestOutput) -> None:
    """Ends a stream with the failure of one of its samples, though others still run; a last output raises by itself."""
    if output.error is not None:
        raise output.error


def with_ids(choice: dict[str, Any], sample: Any) -> None:
    """Adds a sample's ids, and which weights made them."""
    choice["token_ids"] = sample.token_ids
    choice["weight_versions"] = [list(span) for span in sample.weight_versions]


class Answering:
    """One request for text on its way.

    Args:
        service: The server.
        request: The HTTP request.
        body: What it asks for.
        prefix: Of the answer's id.
        top: Alternatives that logprobs are to have.
    """

    def __init__(self, service: Service, request: Request, body: Sampling, prefix: str, top: int | None) -> None:
        self.service = service
        self.model = service.model_name(body.model)
        self.created = int(time.time())
        self.how = service.engine_arguments(request, body)
        self.id = f"{prefix}-{self.how['request_id']}"
        self.kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        self._top, self._names_ids = top or 0, bool(body.return_tokens_as_token_ids)

    def writer(self) -> LogprobWriter:
        """What writes logprobs of a sample."""
        return LogprobWriter(self.service.tokenizer, self._top, self._names_ids)
