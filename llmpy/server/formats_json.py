"""Formats with JSON arguments: arguments are passed on as the model writes them."""

from __future__ import annotations

import json
import math
from typing import Any

from .scanning import Malformed, Scan, Schemas, Source

ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type", "index", "tool_call_id")


def decode(text: str) -> Any:
    """Parses a JSON value; None if the text is not JSON or has a number that is not finite."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _whole(source: Source, name: str, text: str) -> Scan[None]:
    """Yields a call with arguments that came before the name, or as JSON in a string."""
    value = decode(text)
    if isinstance(value, str):
        text, value = value, decode(value)
    if not isinstance(value, dict):
        raise Malformed
    yield source.tell("call", name)
    yield source.tell("arguments", text)


def _object(source: Source) -> Scan[None]:
    """{"name": ..., "arguments": {...}}; an unknown key makes it malformed."""
    name: str | None = None
    early: str | None = None
    is_told = False
    yield from source.expect("{")
    while True:
        yield from source.space()
        key = decode((yield from source.value()))
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key == "name" and name is None:
            name = decode((yield from source.value()))
            if not isinstance(name, str) or not name:
                raise Malformed
        elif key in ARGUMENTS and not is_told and early is None:
            while not source.text:
                yield from source.more()
            if name is not None and source.text[0] == "{":
                yield source.tell("call", name)
                yield from source.value(tells=True)
                is_told = True
            else:
                early = yield from source.value()
        elif key in _OTHER_KEYS:
            yield from source.value()
        else:
            raise Malformed
        yield from source.space()
        if (yield from source.expect(",", "}")) == "}":
            break
    if name is None:
        raise Malformed
    if not is_told:
        yield from _whole(source, name, early or "{}")


def _objects(source: Source) -> Scan[None]:
    """One call object, or a list of them."""
    yield from source.space()
    if (yield from source.accept("[")):
        yield from source.items(_object)
    else:
        yield from _object(source)


def hermes(source: Source, schemas: Schemas) -> Scan[None]:
    """{"name": ..., "arguments": {...}} in a tag: Hermes, Qwen 2.5 and 3."""
    yield from _objects(source)
    yield from source.space()
    yield from source.expect("</tool_call>")


def llama3(source: Source, schemas: Schemas) -> Scan[None]:
    """The whole text is {"name": ..., "parameters": {...}}, or several of them separated by semicolons: Llama 3."""
    while True:
        yield from source.space()
        yield from _object(source)
        yield from source.space()
        if not (yield from source.accept(";")):
            break
        yield from source.space()
        if not source.text:
            break
    if source.text:
        raise Malformed


def mistral(source: Source, schemas: Schemas) -> Scan[None]:
    """A list of objects, or NAME[ARGS]{...}: Mistral."""
    yield from source.space()
    while not source.text:
        yield from source.more()
    if source.text[0] in "[{":
        yield from _objects(source)
        return
    name = yield from source.name()
    if (yield from source.expect("[ARGS]", "[CALL_ID]")) == "[CALL_ID]":
        yield from source.until("[ARGS]")
    yield from _arguments(source, name)


def _arguments(source: Source, name: str) -> Scan[None]:
    """An object with only the arguments."""
    yield from source.space()
    while not source.text:
        yield from source.more()
    if source.text[0] != "{" or not name:
        raise Malformed
    yield source.tell("call", name)
    yield from source.value(tells=True)


def deepseek(source: Source, schemas: Schemas) -> Scan[None]:
    """function<sep>NAME and a block of JSON (V3, R1), or NAME<sep>{...} (V3.1), each call between marks: DeepSeek."""
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"
    yield from source.space()
    mark = yield from source.expect(begin)
    while mark == begin:
        name, _ = yield from source.until("<｜tool▁sep｜>")
        yield from source.space()
        while not source.text:
            yield from source.more()
        is_fenced = source.text[0] != "{"
        if is_fenced:
            name, _ = yield from source.until("```json")
        yield from _arguments(source, name.strip())
        yield from source.space()
        if is_fenced:
            yield from source.expect("```")
            yield from source.space()
        yield from source.expect("<｜tool▁call▁end｜>")
        yield from source.space()
        mark = yield from source.expect(begin, end)


def plamo(source: Source, schemas: Schemas) -> Scan[None]:
    """Requests, each with a name and JSON between tags: PLaMo."""
    begin, end = _plamo("begin_tool_request"), _plamo("end_tool_requests")
    yield from source.space()
    mark = yield from source.expect(begin)
    while mark == begin:
        yield from source.space()
        yield from source.expect(_plamo("begin_tool_name"))
        name, _ = yield from source.until(_plamo("end_tool_name"))
        yield from source.space()
        yield from source.expect(_plamo("begin_tool_arguments"))
        yield from source.accept("<|plamo:constrain|>json")
        yield from source.accept("<|plamo:msg|>")
        yield from _arguments(source, name.strip())
        for tag in ("end_tool_arguments", "end_tool_request"):
            yield from source.space()
            yield from source.expect(_plamo(tag))
        yield from source.space()
        mark = yield from source.expect(begin, end)


def _plamo(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"
