"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.feeds import RequestStream
from ..outputs import CompletionOutput, RequestOutput
from ..text.chat import reads
from ..text.chat_images import has_images
from ..text.chat_window import fitted, prompt_room
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .errors import HttpError, answer, to_http
from .frames import DONE, EventStream, attended
from .grammars import Constraint
from .images import Source, details, load_images
from .logprobs import LogprobWriter, TextLogprobs, prompt_logprobs
from .parsing import Parser, Piece
from .protocol import ChatRequest
from .requests import beside, read, sampling, template_arguments
from .service import UNTOLD, Answering, Service, raise_failure, size_of, usage_of, with_ids

encode = msgspec.json.encode


@dataclass
class Message:
    """The parsed text of one sample so far.

    Args:
        parser: Splits the text into content, reasoning and calls.
        ends: Texts of the end tokens if special tokens are shown; they are removed from the end.
        close_id: The token that ends reasoning; None: reasoning does not end with a single token.
    """

    parser: Parser
    ends: tuple[str, ...] = ()
    close_id: int | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls; the arguments of a call are set when the call is complete."""
    has_begun: bool = False
    num_chars: int = 0
    """Length of the text so far, in characters."""
    is_over: bool = False
    num_thought: int = 0
    """Number of tokens up to the one that ends reasoning."""
    is_thought_out: bool = False
    _texts: dict[str, list[str]] = field(init=False, default_factory=lambda: {"content": [], "reasoning": [], "arguments": []})

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._texts["content"])

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._texts["reasoning"])

    def take(self, sample: CompletionOutput) -> list[Piece]:
        """Parses a sample's new text, adds the pieces to the message and returns them."""
        text = sample.text
        if sample.finish_reason == "stop":
            text = text.removesuffix(next((end for end in self.ends if text.endswith(end)), ""))
        if self.close_id is not None and not self.is_thought_out:
            ids = sample.token_ids
            self.is_thought_out = self.close_id in ids
            self.num_thought += ids.index(self.close_id) + 1 if self.is_thought_out else len(ids)
        self.num_chars += len(text)
        self.is_over = sample.finish_reason is not None
        pieces = self.parser.push(text) + (self.parser.finish() if self.is_over else [])
        for piece in pieces:
            if piece.kind == "call":
                self._end_call()
                function = {"name": piece.text, "arguments": ""}
                self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
            else:
                self._texts[piece.kind].append(piece.text)
        if self.is_over:
            self._end_call()
        return pieces

    def _end_call(self) -> None:
        """Stores the collected arguments in the last call, if there is one."""
        if self.calls:
            self.calls[-1]["function"]["arguments"] += "".join(self._texts["arguments"])
            self._texts["arguments"].clear()

    def num_reasoning(self, tokenizer: Tokenizer) -> int:
        """Number of reasoning tokens. Without a single end token, reasoning is tokenised once when the answer is complete."""
        if not self._texts["reasoning"]:
            return 0
        if self.close_id is None and self.is_over and not self.num_thought:
            self.num_thought = len(tokenizer.encode(self.reasoning, False))
        return self.num_thought

    def whole(self) -> dict[str, Any]:
        """The complete message of an answer that is not streamed."""
        content = self.content or (None if self.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning"] = message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def delta(self, pieces: list[Piece]) -> dict[str, Any]:
        """The delta for pieces that `take` returned."""
        delta: dict[str, Any] = {}
        if not self.has_begun:
            self.has_begun = True
            delta = {"role": "assistant", "content": "", "refusal": None}
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
    """One chat request in progress.

    Args:
        service: The server.
        request: The HTTP request.
        body: The body of the request.
        prefix: Prefix of the answer's id.
        limit_name: The protocol's name for the token limit of an answer; None = the body's name.
    """

    def __init__(
        self, service: Service, request: Request, body: ChatRequest, prefix: str = "chatcmpl", limit_name: str | None = None
    ) -> None:
        super().__init__(service, request, body, prefix, body.top_logprobs)
        self.body, self.state = body, request.state
        self.images: list[Source] = []
        _check_shapes(body)
        self.is_truncated = body.truncation == "auto"
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self.limit: int | None = getattr(body, name)
        self.limit_name = limit_name or name
        fields = sampling(body, self.limit)
        if body.top_logprobs is not None and not body.logprobs:
            raise HttpError(400, "top_logprobs is only allowed with logprobs", "top_logprobs")
        fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        content = fields.pop("structured_outputs")
        self.constraint = Constraint(body, content, service.tokenizer, service.dialect.tool_format, service.dialect.reasoning)
        self.tools = body.tools if body.tool_choice != "none" else None
        self.shows_marks = service.dialect.shows_marks(bool(self.tools))
        if self.shows_marks:
            fields["skip_special_tokens"] = False
        self.fields = {**fields, "output_kind": self.kind}
        self.template = template_arguments(body, service.options.allow_request_template)
        request.state.ignored += self._unread()

    def _unread(self) -> list[str]:
        """Names of template variables of the request that the chat template does not read; the answer's header lists them."""
        body, template = self.body, self.service.template(self.template["chat_template"], bool(self.tools))
        names = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or () if not reads(template, name)]
        if body.reasoning_effort is not None and not reads(template, "reasoning_effort"):
            names.append("reasoning_effort")
        return names

    async def submit(self) -> RequestStream:
        """Fetches the images of the conversation, renders it and queues it."""
        await self.load_images()

        def queue() -> RequestStream:
            messages = self.messages()
            prompt = self.service.prompt(messages, self.template, self.images)
            if self.limit is not None and not self.is_truncated:
                prompt.room = (self.limit_name, self.limit)
            return self.service.run(prompt, False, self.how, self.params(self.sampling(messages)))

        return await self.service.beside(max(self.size, size_of(self.body.messages, self.tools)), queue)

    async def load_images(self) -> None:
        """Takes the images out of the messages, which then hold their numbers."""
        if not has_images(self.body.messages):
            return
        if self.is_truncated:
            raise HttpError(400, "truncation: 'auto' is not supported with images; leave it out", "truncation")
        self.state.ignored += details(self.body.messages)
        self.body.messages, self.images = await load_images(self.service, self.body.messages)

    def messages(self) -> list[dict[str, Any]]:
        """The messages for the template; of a truncated conversation only those that fit."""
        given = [for_template(message) for message in self.body.messages]
        if not self.is_truncated:
            return given
        most = prompt_room(self.service.max_model_len, self.limit)
        kept = fitted(given, lambda some: self.service.prompt_length(some, self.template), most)
        self.state.dropped = len(given) - len(kept)
        return kept

    def sampling(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The sampling fields with the answer's constraint; it depends on whether the rendered conversation opens reasoning."""
        constraint = self.constraint
        prompt = self.service.prompt_text(messages, self.template) if constraint.needs_prompt else ""
        return {**self.fields, "structured_outputs": constraint.params(prompt)}

    def message(self, prompt: str | None) -> Message:
        """A new Message that parses a sample's text."""
        dialect = self.service.dialect
        parser = dialect.parser(prompt or "", self.tools, holds=not self.body.stream)
        return Message(parser, dialect.ends if self.shows_marks else (), dialect.close_id)

    def text_logprobs(self, output: RequestOutput) -> TextLogprobs:
        """An object that finds the logprobs of the message's text among a sample's logprobs."""
        shown = Detokenizer(self.service.tokenizer, output.prompt_token_ids, skip_special_tokens=not self.shows_marks)
        return TextLogprobs(self.writer(), shown)

    def usage(self, output: RequestOutput, tokens: int, messages: Iterable[Message]) -> dict[str, Any]:
        """The counts of an answer so far."""
        return usage_of([output], tokens, sum(message.num_reasoning(self.service.tokenizer) for message in messages))

    # ---- not streamed -----------------------------------------------------------------------------------------------

    async def output(self) -> RequestOutput:
        """Runs the request and returns the final output."""
        stream = await self.submit()
        try:
            return await stream
        finally:
            stream.close()

    async def run(self) -> tuple[RequestOutput, list[Message]]:
        """Runs the request and returns the final output and its parsed samples."""
        output = await self.output()
        messages = [self.message(output.prompt) for _ in output.outputs]
        for message, sample in zip(messages, output.outputs, strict=True):
            message.take(sample)
        return output, messages

    async def whole(self) -> dict[str, Any]:
        """Runs the request and returns the answer."""
        output, messages = await self.run()
        answer = await self.service.write([output], lambda: self.answer(output, messages))
        return answer | await self.handed([output])

    def answer(self, output: RequestOutput, messages: list[Message]) -> dict[str, Any]:
        """The answer for an output."""
        choices = [self.choice(sample, message) for sample, message in zip(output.outputs, messages, strict=True)]
        made: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": self.usage(output, sum(len(sample.token_ids_array) for sample in output.outputs), messages),
            **UNTOLD,
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
            "logprobs": _logprobs(sample, self.writer()),
            "finish_reason": reason_of(sample, message),
            "stop_reason": sample.stop_reason,
        }
        if self.body.return_token_ids:
            with_ids(choice, sample)
        return choice

    # ---- streamed ---------------------------------------------------------------------------------------------------

    async def frames(self, stream: RequestStream) -> AsyncGenerator[bytes]:
        """The frames of a streamed answer."""
        made = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model}
        head = b"data: " + encode({**made, **UNTOLD})[:-1] + b',"choices":['
        options = self.body.stream_options
        plain = b'],"usage":null}\n\n' if options and options.include_usage else b"]}\n\n"
        running = bool(options and options.continuous_usage_stats)
        messages: dict[int, Message] = {}
        writer, tokens, last, end = self.writer(), 0, None, b""
        try:
            async for output in stream:
                raise_failure(output)
                tokens += sum(len(sample.token_ids_array) for sample in output.outputs)
                frame, is_first, last = b"", last is None, output
                usage = self.usage(output, tokens, messages.values()) if running else None
                ending = plain if usage is None else b'],"usage":' + encode(usage) + b"}\n\n"
                for sample in output.outputs:
                    if sample.index not in messages:
                        messages[sample.index] = self.message(output.prompt)
                    delta = await self.service.write([output], partial(self.delta, sample, messages[sample.index], writer))
                    if delta is not None:
                        if is_first and self.body.return_token_ids:
                            delta["prompt_token_ids"] = output.prompt_token_ids
                        frame += head + encode(delta) + ending
                if output.finished:
                    end = frame
                elif frame:
                    yield frame
            if last is not None and self.service.options.role == "prefill":
                await self.handed([last])
            if options and options.include_usage and last is not None:
                end += head + b'],"usage":' + encode(self.usage(last, tokens, messages.values())) + b"}\n\n"
        except Exception as error:
            end += b"data: " + encode(to_http(error).body()) + b"\n\n"
        finally:
            stream.close()
        yield end + DONE

    def delta(self, sample: CompletionOutput, message: Message, writer: LogprobWriter) -> dict[str, Any] | None:
        """The choice with the new output of a sample; None: nothing to send."""
        is_last = sample.finish_reason is not None
        change = message.delta(message.take(sample))
        logprobs = _logprobs(sample, writer)
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


def _logprobs(sample: CompletionOutput, writer: LogprobWriter) -> dict[str, Any] | None:
    return None if sample.logprobs is None else {"content": writer.chat(sample.logprobs), "refusal": None}


def _check_shapes(body: ChatRequest) -> None:
    """Refuses messages and tools that templates would render wrongly."""
    if not body.messages:
        raise HttpError(400, "messages is empty", "messages")
    if not all(isinstance(message.get("role"), str) for message in body.messages):
        raise HttpError(400, "messages: wanted a role in each", "messages")
    if body.truncation not in (None, "auto", "disabled"):
        raise HttpError(400, f"truncation: wanted 'auto' or 'disabled', have {body.truncation[:40]!r}", "truncation")
    functions = [tool.get("function") for tool in body.tools or ()]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise HttpError(400, "tools: wanted functions with names", "tools")


def reason_of(sample: CompletionOutput, message: Message) -> str | None:
    """The finish reason of a sample in chat answers."""
    return "tool_calls" if message.calls and sample.finish_reason == "stop" else sample.finish_reason


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message for templates: arguments of calls as objects, reasoning under all its names."""
    calls, thought = message.get("tool_calls"), message.get("reasoning_content") or message.get("reasoning")
    made = dict(message)
    if isinstance(calls, list):
        made["tool_calls"] = [_with_object(call) for call in calls]
    if thought:
        made |= {"reasoning_content": thought, "reasoning": thought}
        if calls and not message.get("content"):  # gpt-oss's template accepts only one of thinking and content
            made.setdefault("thinking", thought)
    return made


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        parsed = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        raise HttpError(400, "messages: arguments of a tool call are not JSON", "messages") from None
    return {**call, "function": {**function, "arguments": parsed}}


async def chat_completions(service: Service, request: Request) -> ASGIApp:
    """Answers a chat request."""
    body = await read(request, ChatRequest)
    chat = await beside(request, lambda: Chat(service, request, body))
    if body.stream:
        frames = chat.frames(await attended(request.receive, chat.submit()))
        return EventStream(frames, service.answer_headers(request), service.options.stream_timeout)
    made = await attended(request.receive, chat.whole())
    return answer(made, headers=service.answer_headers(request))
