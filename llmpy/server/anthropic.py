"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol, converted to and from the chat path."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..outputs import CompletionOutput, RequestOutput
from .chat import Chat, Message, for_template
from .errors import HttpError, answer, to_http
from .formats_json import decode
from .frames import EventStream, attended
from .images import load_images
from .parsing import Piece
from .protocol import ChatRequest, MessagesRequest
from .requests import beside, read, template_arguments
from .service import Service

THINKS = ("enabled", "adaptive")
"""Types of `thinking` that request reasoning."""

encode = msgspec.json.encode


def to_chat(body: MessagesRequest) -> ChatRequest:
    """Converts a request to a chat completion request."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for message in body.messages:
        messages += _messages(message)
    kwargs = {"enable_thinking": body.thinking.get("type") in THINKS} if body.thinking else None
    last = messages[-1] if messages else {"role": ""}
    continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=False if (body.tool_choice or {}).get("disable_parallel_tool_use") else None,
        response_format=_format(body),
        chat_template_kwargs=kwargs,
        continue_final_message=continues or None,
    )


def _format(body: MessagesRequest) -> dict[str, Any] | None:
    """The response format of the request as in chat completions, if the request has one."""
    given = body.output_format or (body.output_config or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise HttpError(400, "output_config.format: wanted {'type': 'json_schema', 'schema': ...}", "output_config")
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The text of a content field; content parts if there are images among its blocks."""
    if not isinstance(content, list) or not any(_is_image(block) for block in content):
        return _text(content, where)
    return [_image(block) if _is_image(block) else {"type": "text", "text": _text([block], where)} for block in content]


def _is_image(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _image(block: dict[str, Any]) -> dict[str, Any]:
    """An image block as a content part of chat completions."""
    given = block.get("source")
    source: dict[str, Any] = given if isinstance(given, dict) else {}
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type')};base64,{source['data']}"
    elif source.get("type") == "url" and isinstance(source.get("url"), str):
        url = source["url"]
    else:
        raise HttpError(400, "image: wanted a source of type base64 with data, or of type url with a url", "messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: Any, where: str) -> str:
    """The text of a content field: a string, or a list of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpError(400, f"{where}: wanted text or a list of blocks", where)
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text" or not isinstance(block.get("text"), str):
            raise HttpError(400, f"{where}: blocks of type {str(kind)[:40]!r} are not supported", where)
    return "\n".join(block["text"] for block in content)


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Converts a message to messages for chat templates; each tool result becomes a separate message."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise HttpError(400, "messages: wanted the role user or assistant", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise HttpError(400, "messages: wanted content as text or a list of blocks", "messages")
    made: list[dict[str, Any]] = []
    blocks, calls, thoughts = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = _content(block.get("content") or "", "tool_result")
            made.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            blocks.append(block)
    if blocks or calls or not made:
        own: dict[str, Any] = {"role": role, "content": _content(blocks, "messages")}
        if calls:
            own["tool_calls"] = calls
        if thoughts:
            own["reasoning_content"] = "\n".join(thoughts)
        made.append(own)
    return made


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise HttpError(400, f"tools: {str(tool.get('type'))[:60]!r} is not supported", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"auto": "auto", "any": "required", "none": "none"}.get(str(kind), str(kind))


def stop_reason(sample: CompletionOutput, message: Message) -> str:
    """The stop reason of a sample in Anthropic's protocol."""
    if message.calls and sample.finish_reason == "stop":
        return "tool_use"
    if isinstance(sample.stop_reason, str):
        return "stop_sequence"
    return {"length": "max_tokens", "abort": "pause_turn"}.get(str(sample.finish_reason), "end_turn")


def _usage(output: RequestOutput, tokens: int) -> dict[str, int]:
    cached = output.num_cached_tokens
    prompt = len(output.prompt_token_ids_array) - cached
    return {"input_tokens": prompt, "cache_read_input_tokens": cached, "output_tokens": tokens}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not (message.calls or blocks):
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        function = call["function"]
        given = decode(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given or {}})
    return blocks


async def _whole(chat: Chat) -> dict[str, Any]:
    output, messages = await chat.run()
    sample, message = output.outputs[0], messages[0]
    return {
        "id": f"msg_{chat.shown_id}",
        "type": "message",
        "role": "assistant",
        "model": chat.model,
        "content": _blocks(message),
        "stop_reason": stop_reason(sample, message),
        "stop_sequence": sample.stop_reason if isinstance(sample.stop_reason, str) else None,
        "usage": _usage(output, len(sample.token_ids_array)),
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


class _Blocks:
    """The content blocks of a streamed message; at most one is open."""

    def __init__(self) -> None:
        self.index = -1
        self._num_calls = 0
        self._open: str | None = None

    def take(self, piece: Piece, message: Message) -> bytes:
        """Adds a piece and returns its events."""
        kind = {"content": "text", "reasoning": "thinking"}.get(piece.kind, "tool_use")
        frame = b""
        if kind != self._open or piece.kind == "call":
            frame = self.close()
            self.index, self._open = self.index + 1, kind
            frame += _event("content_block_start", index=self.index, content_block=self._empty(kind, message))
        if piece.kind == "call" or not piece.text:
            return frame
        delta = {
            "text": {"type": "text_delta", "text": piece.text},
            "thinking": {"type": "thinking_delta", "thinking": piece.text},
            "tool_use": {"type": "input_json_delta", "partial_json": piece.text},
        }[kind]
        return frame + _event("content_block_delta", index=self.index, delta=delta)

    def _empty(self, kind: str, message: Message) -> dict[str, Any]:
        """The initial, empty form of a block."""
        if kind == "text":
            return {"type": "text", "text": ""}
        if kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        call = message.calls[self._num_calls]
        self._num_calls += 1
        return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}

    def close(self) -> bytes:
        """Closes the open block, if any, and returns the event."""
        was, self._open = self._open, None
        return b"" if was is None else _event("content_block_stop", index=self.index)


async def _frames(chat: Chat, stream: Any) -> AsyncGenerator[bytes]:
    message: Message | None = None
    blocks, tokens = _Blocks(), 0
    try:
        async for output in stream:
            sample = output.outputs[0]
            tokens += len(sample.token_ids_array)
            frame = b""
            if message is None:
                message = chat.message(output.prompt)
                empty = {"id": f"msg_{chat.shown_id}", "type": "message", "role": "assistant", "content": []}
                rest = {"model": chat.model, "stop_reason": None, "stop_sequence": None, "usage": _usage(output, 0)}
                frame = _event("message_start", message={**empty, **rest}) + _event("ping")
            for piece in message.take(sample):
                frame += blocks.take(piece, message)
            if sample.finish_reason is not None:
                if blocks.index < 0:
                    frame += blocks.take(Piece("content", ""), message)
                frame += blocks.close()
                sequence = sample.stop_reason if isinstance(sample.stop_reason, str) else None
                end = {"stop_reason": stop_reason(sample, message), "stop_sequence": sequence}
                frame += _event("message_delta", delta=end, usage={"output_tokens": tokens}) + _event("message_stop")
            if frame:
                yield frame
    except Exception as error:
        yield b"event: error\ndata: " + encode(to_http(error).anthropic()) + b"\n\n"
    finally:
        stream.close()


async def messages(service: Service, request: Request) -> ASGIApp:
    """Answers a request in Anthropic's protocol."""
    body = await read(request, MessagesRequest)
    if body.max_tokens is None:
        raise HttpError(400, "max_tokens: Field required", "max_tokens")
    chat = await beside(request, lambda: Chat(service, request, to_chat(body)))
    if body.thinking and body.thinking.get("type") in THINKS and service.dialect.reasoning is None:
        request.state.ignored = ["thinking", *(name for name in request.state.ignored if "enable_thinking" not in name)]
    headers = service.answer_headers(request)
    if body.stream:
        stream = await attended(request.receive, chat.submit())
        return EventStream(_frames(chat, stream), headers, service.options.stream_timeout)
    return answer(await attended(request.receive, _whole(chat)), headers=headers)


async def count_tokens(service: Service, request: Request) -> ASGIApp:
    """Counts the prompt tokens of a conversation."""
    given = await read(request, MessagesRequest)
    service.model_name(given.model)
    body = await beside(request, lambda: to_chat(given))
    turns, images = await load_images(service, body.messages)

    def count() -> int:
        arguments = template_arguments(body, False)
        return len(service.prompt_ids([for_template(message) for message in turns], arguments, images))

    return answer({"input_tokens": await beside(request, count)}, headers=service.answer_headers(request))
