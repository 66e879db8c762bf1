"""POST /v1/responses: OpenAI's Responses API, converted to and from the chat path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.feeds import RequestStream
from ..engine.jobs import as_exception, is_cancellation
from ..outputs import CompletionOutput, RequestOutput
from .chat import Chat, Message
from .errors import HttpError, answer, to_http
from .frames import EventStream, attended
from .protocol import ResponsesRequest
from .requests import beside, read
from .responses_input import Items, items_of, to_chat
from .responses_output import Output
from .responses_store import Kept
from .service import Service

ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "tools", "user")


TOKEN_BYTES = 8
"""Bytes per token of a kept answer."""


class Responding:
    """One request in progress.

    Args:
        service: The server.
        request: The HTTP request.
        body: The body of the request.
        before: Items of the previous conversation.
    """

    def __init__(self, service: Service, request: Request, body: ResponsesRequest, before: Items) -> None:
        self.body = body
        self._input = before + items_of(body.input)
        self.is_kept = bool(service.responses.most) and body.store is not False
        self.chat = Chat(service, request, to_chat(body, self._input), "resp", "max_output_tokens")
        self.id = self.chat.id
        self.output = Output(self.chat.shown_id)
        self.kept = Kept(self.whole, self.items, self.chat.how["request_id"], self.chat.size)
        self._status = "in_progress"
        self._why: str | None = None
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None

    # ---- the answer -------------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The response in its current state."""
        body, defaults = self.body, self.chat.service.engine.get_default_sampling_params()
        self.output.settle()
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.chat.created,
            "model": self.chat.model,
            "status": self._status,
            "error": self._error,
            "incomplete_details": None if self._why is None else {"reason": self._why},
            "output": self.output.items,
            "usage": self._usage,
            **{name: getattr(body, name) for name in ECHOED},
            "tools": body.tools or [],
            "metadata": body.metadata or {},
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "text": body.text or {"format": {"type": "text"}},
            "truncation": body.truncation or "disabled",
            "background": bool(body.background),
            "store": self.is_kept,
            "service_tier": "default",
            "top_logprobs": body.top_logprobs or 0,
        }

    def items(self) -> Items:
        """The items of the conversation, including the answer."""
        return self._input + self.output.items

    def begin(self, output: RequestOutput) -> Message:
        """Makes the message for the first output."""
        if self.chat.body.logprobs:
            self.output.logprobs = self.chat.text_logprobs(output)
        return self.chat.message(output.prompt)

    def take(self, sample: CompletionOutput, message: Message) -> bytes:
        """Adds a sample's new text and returns the events."""
        if self.output.logprobs is not None:
            self.output.logprobs.add(sample)
        return self.output.take(message.take(sample), message)

    def end(self, output: RequestOutput, tokens: int, message: Message) -> bytes:
        """Ends the answer and returns the events."""
        reason = output.outputs[0].finish_reason
        self._status, self._why = {"length": ("incomplete", "max_output_tokens"), "abort": ("cancelled", None)}.get(
            str(reason), ("completed", None)
        )
        prompt = len(output.prompt_token_ids_array)
        self._usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": message.num_reasoning(self.chat.service.tokenizer)},
            "total_tokens": prompt + tokens,
        }
        self.chat.service.responses.grow(self.kept, TOKEN_BYTES * tokens)
        frame = self.output.finish("completed" if self._status == "completed" else "incomplete")
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        return frame + self.output.event(kind, response=self.whole())

    # ---- not streamed, and streamed ---------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        """Runs the request and returns the response."""
        output = await self.chat.output()
        sample = output.outputs[0]
        message = self.begin(output)
        await self.chat.service.write([output], lambda: self.take(sample, message))
        self.end(output, len(sample.token_ids_array), message)
        return self.whole()

    async def frames(self, stream: RequestStream) -> AsyncGenerator[bytes]:
        """The events of a streamed response."""
        message: Message | None = None
        tokens = 0
        try:
            yield self._told("response.created") + self._told("response.in_progress")
            async for output in stream:
                sample = output.outputs[0]
                tokens += len(sample.token_ids_array)
                if message is None:
                    message = self.begin(output)
                frame = await self.chat.service.write([output], partial(self.take, sample, message))
                if sample.finish_reason is not None:
                    frame += self.end(output, tokens, message)
                if frame:
                    yield frame
        except Exception as error:
            self._fail(error)
            yield self._told("response.failed")
        finally:
            stream.close()
            if self._status == "in_progress":  # the client has disconnected
                self._status = "cancelled"

    async def run_alone(self) -> None:
        """Runs the request in the background."""
        self.chat.service.running += 1
        try:
            await self.run()
        except BaseException as error:
            self._fail(as_exception(error))
            if is_cancellation(error):
                raise
        finally:
            self.chat.service.running -= 1

    def _fail(self, error: Exception) -> None:
        self._status, self._error = "failed", {"code": "server_error", "message": to_http(error).message}

    def _told(self, kind: str) -> bytes:
        return self.output.event(kind, response=self.whole())


async def responses(service: Service, request: Request) -> ASGIApp:
    """Answers a request of the Responses API."""
    body = await read(request, ResponsesRequest)
    store, key = service.responses, request.state.key
    before = store.get(key, body.previous_response_id).items() if body.previous_response_id else []
    responding = await beside(request, lambda: Responding(service, request, body, before))
    kept = responding.kept
    if body.background and (body.stream or not responding.is_kept):
        raise HttpError(400, "background: wanted a response that is kept (--keep-responses) and not streamed", "background")
    if body.background:
        kept.task = asyncio.create_task(responding.run_alone())
        store.add(key, responding.id, kept)
        return answer(responding.whole(), headers=service.answer_headers(request))
    if body.stream:
        frames = responding.frames(await attended(request.receive, responding.chat.submit()))
        if responding.is_kept:
            store.add(key, responding.id, kept)
        return EventStream(frames, service.answer_headers(request), service.options.stream_timeout)
    whole = await attended(request.receive, responding.run())
    if responding.is_kept:
        store.add(key, responding.id, kept)
    return answer(whole, headers=service.answer_headers(request))


async def response(service: Service, request: Request) -> ASGIApp:
    """Returns a kept response."""
    return answer(service.responses.get(request.state.key, request.path_params["id"]).whole())


async def cancel(service: Service, request: Request) -> ASGIApp:
    """Cancels a background response."""
    kept = service.responses.get(request.state.key, request.path_params["id"])
    if kept.task is None:
        raise HttpError(400, "only responses with background=true can be cancelled")
    while not kept.task.done():
        await service.engine.abort(kept.request_id)
        await asyncio.wait([kept.task], timeout=0.1)
    return answer(kept.whole())


async def delete(service: Service, request: Request) -> ASGIApp:
    """Deletes a kept response."""
    id = request.path_params["id"]
    service.responses.remove(request.state.key, id)
    return answer({"id": id, "object": "response.deleted", "deleted": True})
