"""Converts a request of /v1/responses to a chat completion request."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from .errors import HttpError
from .protocol import ChatRequest, Common, ResponsesRequest

LOGPROBS = "message.output_text.logprobs"
SHARED = (
    *(field.name for field in msgspec.structs.fields(Common)),
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "truncation",
)
"""Fields with the same meaning in both protocols."""
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")

Messages = list[dict[str, Any]]
Items = list[dict[str, Any]]
Part = TypeVar("Part")


def to_chat(body: ResponsesRequest, items: Items) -> ChatRequest:
    """Converts a request to a chat completion request.

    Args:
        body: The request.
        items: The conversation.

    Raises:
        HttpError: 400, the request has a field or item that is not supported.
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in SHARED}
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "function":
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.get("name")}}
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatRequest(
        **fields,
        messages=system + messages_of(items),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        response_format=_format(_part(body, "text", "format", dict)),
        reasoning_effort=_part(body, "reasoning", "effort", str),
    )


def _part(body: ResponsesRequest, name: str, key: str, kind: type[Part]) -> Part | None:
    """A value in a field that is an object."""
    found = (getattr(body, name) or {}).get(key)
    if not isinstance(found, kind | None):
        raise HttpError(400, f"{name}.{key}: wanted {kind.__name__}, have {type(found).__name__}", name)
    return found


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise HttpError(400, f"tools: {str(tool.get('type'))[:60]!r} is not supported", "tools")
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in kept if tool.get(key) is not None}}


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def items_of(given: str | Items) -> Items:
    """The items of a request's input."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def messages_of(given: Items) -> Messages:
    """Converts items to messages for chat templates; reasoning and calls become parts of the assistant's message."""
    messages: Messages = []
    thought = ""
    for item in given:
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _text(item.get("content") or item.get("summary") or "")
        elif kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            message = {"role": role, "content": _content(item.get("content") or "")}
            messages.append(_with_thought(message, thought) if role == "assistant" else message)
            thought = ""
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant" or thought:
                messages.append(_with_thought({"role": "assistant", "content": ""}, thought))
                thought = ""
            function = {"name": item.get("name"), "arguments": item.get("arguments") or ""}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = _content(item.get("output") or "")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": result})
        else:
            raise HttpError(400, f"input: items of type {str(kind)[:60]!r} are not supported", "input")
    return messages


def _with_thought(message: dict[str, Any], thought: str) -> dict[str, Any]:
    return {**message, "reasoning_content": thought} if thought else message


def _content(content: Any) -> str | list[dict[str, Any]]:
    """The text of content; content parts if there are images among its parts."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content)
    return [part if _is_image(part) else {"type": "text", "text": _text([part])} for part in content]


def _is_image(part: object) -> bool:
    """Whether a part is an image; one of a stored file is refused."""
    if not (isinstance(part, dict) and part.get("type") == "input_image"):
        return False
    if not isinstance(part.get("image_url"), str):
        raise HttpError(400, "input_image: wanted an image_url; images as files of their own are not supported", "input")
    return True


def _text(content: Any) -> str:
    """The text of content: a string, or a list of text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXTS:
            raise HttpError(400, f"input: content of type {str(kind)[:60]!r} is not supported", "input")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
