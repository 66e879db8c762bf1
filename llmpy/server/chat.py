"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from .._feeds import RequestStream
from ..outputs import CompletionOutput, RequestOutput
from .errors import HttpError, answer, to_http
from .frames import DONE, EventStream, attended
from .logprobs import LogprobWriter, prompt_logprobs
from .parsing import Parser, Piece
from .protocol import ChatRequest
from .requests import read, sampling, template_arguments
from .service import Answering, Service, chars_of, raise_failure, usage_of, with_ids

encode = msgspec.json.encode


@dataclass
class Message:
    """What one sample has said so far, taken apart.

    Args:
        parser: Takes the text apart.
        eos: The end of sequence, where special tokens are shown.
    """

    parser: Parser
    eos: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    has_begun: bool = False

    def take(self, sample: CompletionOutput) -> list[Piece]:
        """The pieces of a sample's new text, which are added."""
        text = sample.text.removesuffix(self.eos) if sample.finish_reason == "stop" else sample.text
        pieces = self.parser.push(text) + (self.parser.finish() if sample.finish_reason is not None else [])
        for piece in pieces:
            if piece.kind == "content":
                self.content += piece.text
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            elif piece.kind == "call":
                function = {"name": piece.text, "arguments": ""}
                self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
            else:
                self.calls[-1]["function"]["arguments"] += piece.text
        return pieces

    def whole(self) -> dict[str, Any]:
        """The message of an answer in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning"] = message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def delta(self, pieces: list[Piece]) -> dict[str, Any]:
        """The change that pieces, which have been taken, make."""
        delta: dict[str, Any] = {}
        if not self.has_begun:
            self.has_begun = True
            delta = {"role": "assistant", "content": ""}
        number = len(self.calls) - sum(piece.kind == "call" for piece in pieces) - 1
        for piece in pieces:
            if piece.kind == "content":
                delta["content"] = delta.get("content", "") + piece.text
            elif piece.kind == "reasoning":
                for name in ("reasoning", "reasoning_content"):
                    delta[name] = delta.get(name, "") + piece.text
            elif piece.kind == "call":
                number += 1
                call = self.calls[number]
                made = {"index": number, "id": call["id"], "type": "function"}
                delta.setdefault("tool_calls", []).append({**made, "function": {"name": piece.text, "arguments": ""}})
            else:
                changes = delta.setdefault("tool_calls", [])
                if changes and changes[-1]["index"] == number:
                    changes[-1]["function"]["arguments"] += piece.text
                else:
                    changes.append({"index": number, "function": {"arguments": piece.text}})
        return delta


class Chat(Answering):
    """One conversation on its way.

    Args:
        service: The server.
        request: The HTTP request.
        body: What it asks for.
    """

    def __init__(self, service: Service, request: Request, body: ChatRequest) -> None:
        super().__init__(service, request, body, "chatcmpl", body.top_logprobs)
        self.body = body
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        fields = sampling(body, limit)
        if body.top_logprobs is not None and not body.logprobs:
            raise HttpError(400, "top_logprobs is only allowed with logprobs", "top_logprobs")
        fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        _check_format(body)
        self.has_tools = bool(body.tools) and body.tool_choice != "none"
        self.shows_marks = self.has_tools and service.tool_format is not None and service.tool_format.is_special
        if self.shows_marks:
            fields["skip_special_tokens"] = False
        self.fields = {**fields, "output_kind": self.kind}
        self.template = template_arguments(body, service.options.allow_request_template)

    async def submit(self) -> RequestStream:
        """Queues the conversation."""
        messages = [with_object_arguments(message) for message in self.body.messages]
        return await self.service.beside(
            chars_of(messages),
            lambda: self.service.engine.chat(messages, **self.how, **self.template, **self.fields),
        )

    def message(self, prompt: str | None) -> Message:
        """A sample's answer, which takes the sample's text apart."""
        eos = self.service.tokenizer.eos_token if self.shows_marks else None
        return Message(self.service.parser(prompt or "", self.has_tools), eos or "")

    # ---- at once ----------------------------------------------------------------------------------------------------

    async def run(self) -> tuple[RequestOutput, list[Message]]:
        """The whole output, and its samples taken apart."""
        stream = await self.submit()
        try:
            output = await stream
        finally:
            stream.close()
        messages = [self.message(output.prompt) for _ in output.outputs]
        for message, sample in zip(messages, output.outputs, strict=True):
            message.take(sample)
        return output, messages

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        output, messages = await self.run()
        choices = [self.choice(sample, message) for sample, message in zip(output.outputs, messages, strict=True)]
        made = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_of([output], sum(len(sample.token_ids_array) for sample in output.outputs)),
        }
        if self.body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            made["prompt_token_ids"] = output.prompt_token_ids
        return made

    def choice(self, sample: CompletionOutput, message: Message) -> dict[str, Any]:
        """One sample of the answer."""
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message.whole(),
            "logprobs": None if sample.logprobs is None else {"content": self.writer().chat(sample.logprobs)},
            "finish_reason": reason_of(sample, message),
            "stop_reason": sample.stop_reason,
        }
        if self.body.return_token_ids:
            with_ids(choice, sample)
        return choice

    # ---- in frames --------------------------------------------------------------------------------------------------

    async def frames(self, stream: RequestStream) -> AsyncGenerator[bytes]:
        """The answer in frames."""
        made = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model}
        head = b"data: " + encode(made)[:-1] + b',"choices":['
        options = self.body.stream_options
        running = bool(options and options.continuous_usage_stats)
        messages: dict[int, Message] = {}
        writer, tokens, last = self.writer(), 0, None
        try:
            async for output in stream:
                raise_failure(output)
                tokens += sum(len(sample.token_ids_array) for sample in output.outputs)
                usage = b'],"usage":' + encode(usage_of([output], tokens)) + b"}\n\n" if running else b"]}\n\n"
                frame, is_first, last = b"", last is None, output
                for sample in output.outputs:
                    if sample.index not in messages:
                        messages[sample.index] = self.message(output.prompt)
                    delta = self.delta(sample, messages[sample.index], writer)
                    if delta is not None:
                        if is_first and self.body.return_token_ids:
                            delta["prompt_token_ids"] = output.prompt_token_ids
                        frame += head + encode(delta) + usage
                if frame:
                    yield frame
            if options and options.include_usage and last is not None:
                yield head + b'],"usage":' + encode(usage_of([last], tokens)) + b"}\n\n"
        except Exception as error:
            yield b"data: " + encode(to_http(error).body()) + b"\n\n"
        finally:
            stream.close()
        yield DONE

    def delta(self, sample: CompletionOutput, message: Message, writer: LogprobWriter) -> dict[str, Any] | None:
        """What is new of a sample; None: nothing that anybody asked for."""
        is_last = sample.finish_reason is not None
        change = message.delta(message.take(sample))
        logprobs = None if sample.logprobs is None else {"content": writer.chat(sample.logprobs)}
        if not (change or is_last or logprobs or self.body.return_token_ids):
            return None
        choice: dict[str, Any] = {
            "index": sample.index,
            "delta": change,
            "logprobs": logprobs,
            "finish_reason": reason_of(sample, message),
        }
        if sample.stop_reason is not None:
            choice["stop_reason"] = sample.stop_reason
        if self.body.return_token_ids:
            with_ids(choice, sample)
        return choice


def reason_of(sample: CompletionOutput, message: Message) -> str | None:
    """Why a sample ended, as chat answers say it."""
    return "tool_calls" if message.calls and sample.finish_reason == "stop" else sample.finish_reason


def with_object_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as objects, as templates read them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        parsed = msgspec.json.decode(arguments) if arguments else {}
    except msgspec.DecodeError:
        raise HttpError(400, "messages: arguments of a tool call are not JSON", "messages") from None
    return {**call, "function": {**function, "arguments": parsed}}


def _check_format(body: ChatRequest) -> None:
    """Refuses formats and tool choices that nothing here can enforce yet."""
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise HttpError(400, f"response_format of type {kind!r} is not supported", "response_format")
    if body.tool_choice not in (None, "none", "auto"):
        raise HttpError(400, "tool_choice: only 'none' and 'auto' are supported", "tool_choice")


async def chat_completions(service: Service, request: Request) -> ASGIApp:
    """Answers a chat request."""
    chat = Chat(service, request, await read(request, ChatRequest))
    headers = service.answer_headers(request)
    if chat.body.stream:
        return EventStream(chat.frames(await chat.submit()), headers, service.options.stream_timeout)
    return answer(await attended(request.receive, chat.whole()), headers=headers)
