"""From bodies to what the engine takes: decoding, unknown fields, limits, sampling parameters."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from .errors import HttpError
from .fields import check_fields
from .frames import ClientGone
from .grammars import wanted_content
from .protocol import ChatRequest, Inputs, Sampling

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_N = 128
MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_TEMPERATURE = 2.0
BODY_S = 60.0
"""Seconds that a body may take to come."""
LONG_BODY_BYTES = 64 << 10
MAX_PARTS = {b",": 4_000_000, b"[": 100_000, b"{": 100_000, b'":': 100_000}
"""Marks of JSON in a long body, which bound the time that it takes to read while others wait."""

# Fields of a request that are fields of SamplingParams under the same name.
SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)
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
"""Arguments of `Tokenizer.apply_chat_template` beside the template's variables."""


async def read(request: Request, kind: type[Body]) -> Body:
    """The body as a struct. Names of unknown fields go to `request.state.ignored`.

    Raises:
        HttpError: 400, the body is no JSON, or a field has a wrong type, or one that is not supported would change the answer;
            408, it does not come; 413, it has too many parts.
    """
    text = await _body(request)
    if len(text) > LONG_BODY_BYTES:
        _check_parts(text)
    try:
        fields = msgspec.json.decode(text)
        if not isinstance(fields, dict):
            raise HttpError(400, "the body is not a JSON object")
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, param = str(error), re.search(r"\$\.(\w+)", str(error))
        raise HttpError(400, message, param[1] if param else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
    request.state.ignored = check_fields(fields, kind.__struct_fields__, kind, request.url.path)
    return body


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise ClientGone from None


def _check_parts(text: bytes) -> None:
    """Refuses a body that takes long to read, whatever it says."""
    for mark, most in MAX_PARTS.items():
        if text.count(mark) > most:
            raise HttpError(413, f"the body has too many parts: wanted at most {most} {mark.decode()!r}")


async def read_if_any(request: Request, kind: type[Body]) -> Body:
    """The body as a struct all of whose fields may be missing, as the body may."""
    return await read(request, kind) if await _body(request) else kind()


def sampling(body: Sampling, max_tokens: int | None) -> dict[str, Any]:
    """The sampling fields that the request sets.

    Args:
        body: The request.
        max_tokens: Most tokens, None = to the end of the context.

    Raises:
        HttpError: 400, a field beyond the server's limits, or one that is not supported.
    """
    _check(body)
    fields = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    fields["max_tokens"] = max_tokens
    if body.logit_bias:
        fields["logit_bias"] = {token_id(key): value for key, value in body.logit_bias.items()}
    fields["structured_outputs"] = wanted_content(body)
    return fields


def token_id(key: str) -> int:
    """A key of logit_bias, which JSON writes as text."""
    try:
        return int(key)
    except ValueError:
        raise HttpError(400, f"logit_bias: wanted token ids as keys, have {key[:40]!r}", "logit_bias") from None


def _check(body: Sampling) -> None:
    """Refuses what is too much, and what a stream cannot tell."""
    if body.stream_interval not in (None, 1):
        raise HttpError(400, f"stream_interval: wanted 1, have {body.stream_interval}", "stream_interval")
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        raise HttpError(400, f"temperature must be at most 2, got {body.temperature}.", "temperature")
    if body.n is not None and body.n > MAX_N:
        raise HttpError(400, f"n must be at most {MAX_N}, got {body.n}.", "n")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or any(len(stop.encode("utf-8", "replace")) > MAX_STOP_BYTES for stop in stops):
        raise HttpError(400, f"stop: wanted at most {MAX_STOPS} strings of {MAX_STOP_BYTES} bytes", "stop")
    if body.stream and body.prompt_logprobs is not None:
        raise HttpError(400, "prompt_logprobs is not available with stream; leave stream out", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options is only allowed with stream", "stream_options")


def prompts_of(given: Inputs, name: str) -> list[str | list[int]]:
    """The prompts in a field.

    Args:
        given: One prompt as text or ids, or a list of prompts.
        name: The field.
    """
    if isinstance(given, str):
        return [given]
    if not given or [] in given:
        raise HttpError(400, f"{name} is empty", name)
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) < len(given) or len({type(item) for item in prompts}) > 1:
        raise HttpError(400, f"{name}: wanted text, ids, or a list of one of them", name)
    if len(prompts) > MAX_PROMPTS:
        raise HttpError(400, f"{name}: wanted at most {MAX_PROMPTS} prompts, have {len(prompts)}", name)
    return prompts


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """The template's variables that a request sets; what else rendering depends on has fields of its own, or is the server's.

    Raises:
        HttpError: 400, one of those.
    """
    for name in RENDERING:
        if given and name in given:
            raise HttpError(400, f"chat_template_kwargs: {name} is not a variable of the template", "chat_template_kwargs")
    return dict(given or {})


def template_arguments(body: ChatRequest, allows_template: bool) -> dict[str, Any]:
    """What the chat template gets, as `AsyncEngine.chat` takes it."""
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
