"""Converts bodies to the engine's arguments: decoding, unknown fields, limits, sampling parameters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ..sampling_params import ROWS
from . import beams, limits
from .errors import HttpError
from .fields import check_fields
from .frames import ClientGone, attended
from .grammars import wanted_content
from .protocol import ChatRequest, Inputs, Sampling

Body = TypeVar("Body", bound=msgspec.Struct)
Made = TypeVar("Made")

MAX_TEMPERATURE = 2.0
BODY_S = limits.seconds("body_s")
PROGRESS_S = limits.seconds("progress_s")

_ENCODED = re.compile(rb"[A-Za-z0-9+/=]{1024,}")
"""What is an encoded image, and not logged."""
_CONVERTED = ("max_tokens", "logit_bias", "structured_outputs", "stream_interval")
SAMPLING = [name for name in Sampling.__struct_fields__ if name in ROWS and name not in _CONVERTED]
"""Fields of requests that SamplingParams has under the same name and takes unchanged."""
RENDERING = (
    "self",
    "messages",
    "tools",
    "tokenize",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)
"""Arguments of `Tokenizer.apply_chat_template` besides the template's variables."""


async def read(request: Request, kind: type[Body]) -> Body:
    """Reads the body as a struct. Names of unknown fields go to `request.state.ignored`.

    Raises:
        HttpError:
            400: the body is not JSON; a field has a wrong type, exceeds its limit, or is unsupported and would change the
                answer.
            408: the body does not arrive in time.
            413: the body has too many parts.
    """
    pieces = await _body(request)
    service = request.app.state.service
    request.state.size = sum(map(len, pieces))
    fields, body = await beside(request, lambda: _parse(pieces, kind))
    limits.check(fields, service.sizes)
    if fields.get("chat_template") is not None:
        request.state.size = max(request.state.size, service.beside_size)  # rendering a request's template may take long
    request.state.ignored = check_fields(fields, kind.__struct_fields__, kind, request.url.path)
    return body


async def beside(request: Request, call: Callable[[], Made]) -> Made:
    """Runs work on a request; if the body is long, on a thread. The work is cancelled when the client disconnects."""
    work = request.app.state.service.beside(request.state.size, call)
    made: Made = await attended(request.receive, work) if request.state.size > limits.LONG_BYTES else await work
    return made


def _parse(pieces: list[bytes], kind: type[Body]) -> tuple[dict[str, Any], Body]:
    """The fields of a body, and the body as a struct. Clears `pieces`, which would take as much memory again."""
    text = b"".join(pieces)
    pieces.clear()
    try:
        fields = msgspec.json.decode(text)
        if not isinstance(fields, dict):
            raise HttpError(400, "the body is not a JSON object")
        return fields, msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, param = str(error), re.search(r"\$\.(\w+)", str(error))
        raise HttpError(400, message, param[1] if param else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None


async def _body(request: Request) -> list[bytes]:
    """Receives the pieces of the body, with time limits."""
    if hasattr(request.state, "body"):
        body: list[bytes] = request.state.body
        return body
    body, parts, fresh = [], limits.PartCounter(), 0
    try:
        async with asyncio.timeout(BODY_S), asyncio.timeout(PROGRESS_S) as progress:
            async for part in request.stream():
                parts.add(part)
                if part:
                    body.append(part)
                fresh += len(part)
                if fresh >= limits.LONG_BYTES:
                    fresh = 0
                    progress.reschedule(asyncio.get_running_loop().time() + PROGRESS_S)
    except TimeoutError:
        message = f"the body did not come: wanted {limits.LONG_BYTES} bytes, or the end, every {PROGRESS_S:g} s"
        raise HttpError(408, f"{message}, and all of it within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    request.state.body = body
    if request.app.state.service.options.log_prompts:
        request.state.logged_body = _ENCODED.sub(lambda found: b"(%d bytes)" % len(found[0]), b"".join(body))
    return body


async def read_if_any(request: Request, kind: type[Body]) -> Body:
    """Reads an optional body as a struct with defaults for all fields."""
    return await read(request, kind) if await _body(request) else kind()


def sampling(body: Sampling, max_tokens: int | None) -> dict[str, Any]:
    """The sampling fields that the request sets.

    Args:
        body: The request.
        max_tokens: Most tokens; None = to the end of the context.

        Raises:
            HttpError: 400, a field exceeds the server's limits or is not supported.
    """
    _check(body)
    fields = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    fields["max_tokens"] = max_tokens
    if body.logit_bias:
        fields["logit_bias"] = {token_id(key): value for key, value in body.logit_bias.items()}
    fields["structured_outputs"] = wanted_content(body)
    return fields


def token_id(key: str) -> int:
    """A key of logit_bias as a token id; JSON keys are text."""
    try:
        return int(key)
    except ValueError:
        raise HttpError(400, f"logit_bias: wanted token ids as keys, have {key[:40]!r}", "logit_bias") from None


def _check(body: Sampling) -> None:
    """Refuses unsupported values, and fields that a stream cannot return."""
    if body.stream_interval not in (None, 1):
        raise HttpError(400, f"stream_interval: wanted 1, have {body.stream_interval}", "stream_interval")
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        raise HttpError(400, f"temperature must be at most 2, got {body.temperature}.", "temperature")
    if body.stream and body.prompt_logprobs is not None:
        raise HttpError(400, "prompt_logprobs is not available with stream; leave stream out", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options is only allowed with stream", "stream_options")
    beams.check(body)


def prompts_of(given: Inputs, name: str, sizes: limits.Sizes) -> list[str | list[int]]:
    """The prompts in a field.

    Args:
        given: One prompt as text or ids, or a list of prompts.
        name: Name of the field, for errors.
        sizes: Sizes of the model.
    """
    if isinstance(given, str):
        return [given]
    if not given or [] in given:
        raise HttpError(400, f"{name} is empty", name)
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        limits.check_prompts([ids], sizes)
        return [ids]
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) < len(given) or len({type(item) for item in prompts}) > 1:
        raise HttpError(400, f"{name}: wanted text, ids, or a list of one of them", name)
    most = limits.most("prompts")
    if len(prompts) > most:
        raise HttpError(400, f"{name}: wanted at most {most} prompts, have {len(prompts)}", name)
    limits.check_prompts(prompts, sizes)
    return prompts


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """The template variables that a request sets. Other arguments of rendering have separate fields or belong to the server.

    Raises:
        HttpError: 400, chat_template_kwargs has such an argument.
    """
    for name in RENDERING:
        if given and name in given:
            raise HttpError(400, f"chat_template_kwargs: {name} is not a variable of the template", "chat_template_kwargs")
    return dict(given or {})


def template_arguments(body: ChatRequest, allows_template: bool) -> dict[str, Any]:
    """The arguments of rendering for `AsyncEngine.chat`."""
    if body.chat_template is not None and not allows_template:
        raise HttpError(400, "chat_template in a request is not allowed; --allow-request-template", "chat_template")
    kwargs = template_kwargs(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents is not None:
        kwargs.setdefault("documents", body.documents)
    continues = bool(body.continue_final_message)
    return {
        "chat_template": body.chat_template,
        "add_generation_prompt": not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": continues,
        "tools": body.tools if body.tool_choice != "none" else None,
        "chat_template_kwargs": kwargs,
    }
