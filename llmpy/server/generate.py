"""POST /inference/v1/generate: token ids in, token ids out, no text. For trainers and routers that tokenise themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.feeds import RequestStream
from ..errors import LlmpyError
from ..logprobs import Logprobs
from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from . import limits
from .errors import answer, to_http
from .fields import check_fields
from .frames import DONE, EventStream, attended
from .handover import check_role
from .images import check_contents, featured
from .logprobs import finite, prompt_logprobs
from .protocol import Features, GenerateRequest
from .requests import beside, read, token_id
from .service import Service, raise_failure, usage_of, with_ids

KNOWN = {field.name for field in fields(SamplingParams)} - {"output_kind", "detokenize"}

encode = msgspec.json.encode


def _sampling(service: Service, request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters; the answer's headers list names without effect."""
    limits.check(given, service.sizes, "sampling_params.")
    request.state.ignored += check_fields(given, KNOWN, GenerateRequest, request.url.path, "sampling_params.")
    known = {name: value for name, value in given.items() if name in KNOWN and (value is not None or name == "max_tokens")}
    if isinstance(known.get("logit_bias"), dict):
        known["logit_bias"] = {token_id(key): value for key, value in known["logit_bias"].items()}
    return {**known, "detokenize": bool(known.get("stop"))}


def _logprobs(entries: Logprobs | None) -> dict[str, Any] | None:
    """Logprobs in the form of chat completions, with ids instead of token texts."""
    if entries is None:
        return None
    content = []
    for entry in entries:
        own, *best = ({"token": f"token_id:{i}", "logprob": finite(value.logprob)} for i, value in (entry or {}).items())
        content.append({**own, "top_logprobs": best})
    return {"content": content}


def _choice(sample: CompletionOutput) -> dict[str, Any]:
    choice = {
        "index": sample.index,
        "logprobs": _logprobs(sample.logprobs),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    with_ids(choice, sample)
    return choice


async def _whole(service: Service, stream: RequestStream, request_id: str) -> dict[str, Any]:
    try:
        output = await stream
    finally:
        stream.close()
    return await service.write([output], lambda: _answer(output, request_id))


def _answer(output: RequestOutput, request_id: str) -> dict[str, Any]:
    tokens = sum(len(sample.token_ids_array) for sample in output.outputs)
    return {
        "request_id": request_id,
        "choices": [_choice(sample) for sample in output.outputs],
        "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        "usage": usage_of([output], tokens),
    }


def _frame(output: RequestOutput, request_id: str) -> bytes:
    made: dict[str, Any] = {"request_id": request_id, "choices": [_choice(sample) for sample in output.outputs]}
    if output.finished and output.prompt_logprobs is not None:
        made["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return b"data: " + encode(made) + b"\n\n"


async def _frames(service: Service, stream: RequestStream, request_id: str, tells_usage: bool) -> AsyncGenerator[bytes]:
    tokens, last = 0, None
    try:
        async for output in stream:
            raise_failure(output)
            last = output
            tokens += sum(len(sample.token_ids_array) for sample in output.outputs)
            yield await service.write([output], partial(_frame, output, request_id))
        if tells_usage and isinstance(last, RequestOutput):
            yield b"data: " + encode({"request_id": request_id, "choices": [], "usage": usage_of([last], tokens)}) + b"\n\n"
    except Exception as error:
        yield b"data: " + encode(to_http(error).body()) + b"\n\n"
    finally:
        stream.close()
    yield DONE


def _stream(
    service: Service, prompt: dict[str, Any], features: Features | None, how: dict[str, Any], params: dict[str, Any]
) -> RequestStream:
    """Queues the request."""
    if features is None:
        return service.engine.generate(prompt, **how, **params)
    (made,) = service.engine._frontend.prompts([prompt], False)
    if isinstance(made, LlmpyError):
        raise made
    check_contents(made, features)
    return service.run(made, False, how, params)


async def generate(service: Service, request: Request) -> ASGIApp:
    """Answers a request with token ids."""
    body = await read(request, GenerateRequest)
    service.model_name(body.model)
    limits.check_prompts([body.token_ids, body.output_token_ids], service.sizes)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = {**_sampling(service, request, body.sampling_params), "output_kind": kind}
    check_role(service.options.role, params.get("max_tokens"))
    prompt: Any = {"prompt_token_ids": body.token_ids}
    if body.output_token_ids:
        prompt["output_token_ids"] = body.output_token_ids
    if body.features is not None:
        prompt |= await featured(service, body.features)
        request.state.size = max(request.state.size, service.beside_size)  # images are prepared on a thread
    how = service.engine_arguments(request, body)
    stream = await beside(request, lambda: _stream(service, prompt, body.features, how, params))
    headers = service.answer_headers(request)
    if body.stream:
        tells_usage = bool(body.stream_options and body.stream_options.include_usage)
        frames = _frames(service, stream, request.state.request_id, tells_usage)
        return EventStream(frames, headers, service.options.stream_timeout)
    return answer(await attended(request.receive, _whole(service, stream, request.state.request_id)), headers=headers)
