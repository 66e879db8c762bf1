"""Formats without JSON arguments: each argument is converted to JSON when it is complete."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from .formats_json import decode
from .scanning import Malformed, Scan, Schemas, Source


class _Writer:
    """Writes arguments as a JSON object, one after the other."""

    def __init__(self, source: Source, schema: Mapping[str, Any]) -> None:
        found = schema.get("properties")
        self._source = source
        self._properties: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        self._begun = False

    def add(self, key: str, text: str) -> Scan[None]:
        """Adds an argument. The text is a JSON value, unless the schema's type is string or the text is not JSON."""
        known = self._properties.get(key)
        kind = known.get("type") if isinstance(known, Mapping) else None
        value = None if kind == "string" else decode(text)
        written = text.strip() == "null" and kind != "string"
        pair = f"{_dump(key)}: {_dump(value if value is not None or written else text)}"
        yield self._source.tell("arguments", (", " if self._begun else "{") + pair)
        self._begun = True

    def end(self) -> Scan[None]:
        """Ends the object."""
        yield self._source.tell("arguments", "}" if self._begun else "{}")


def _dump(value: Any) -> str:
    """Writes JSON.

    Raises:
        Malformed: JSON cannot represent the value: infinity, a set, too deep nesting.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise Malformed from None


def glm(source: Source, schemas: Schemas) -> Scan[None]:
    """NAME, then pairs of <arg_key> and <arg_value>: GLM-4.5 and later."""
    yield from source.space()
    name = yield from source.name()
    yield from source.space()
    mark = yield from source.expect("<arg_key>", "</tool_call>")
    writer = _Writer(source, schemas.get(name, {}))
    yield source.tell("call", name)
    while mark == "<arg_key>":
        key, _ = yield from source.until("</arg_key>")
        yield from source.space()
        yield from source.expect("<arg_value>")
        text, _ = yield from source.until("</arg_value>")
        yield from writer.add(key.strip(), text)
        yield from source.space()
        mark = yield from source.expect("<arg_key>", "</tool_call>")
    yield from writer.end()


def qwen_coder(source: Source, schemas: Schemas) -> Scan[None]:
    """<function=NAME> with <parameter=KEY> inside: Qwen3-Coder."""
    yield from source.space()
    yield from source.expect("<function=")
    name = yield from source.name()
    yield from source.expect(">")
    writer = _Writer(source, schemas.get(name, {}))
    yield source.tell("call", name)
    while True:
        yield from source.space()
        if (yield from source.expect("<parameter=", "</function>")) == "</function>":
            break
        key, _ = yield from source.until(">")
        text, _ = yield from source.until("</parameter>")
        yield from writer.add(key, text.removeprefix("\n").removesuffix("\n"))
    yield from writer.end()
    yield from source.space()
    yield from source.expect("</tool_call>")


def _literal(text: str) -> Any:
    """Parses a Python literal."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _call(source: Source) -> Scan[None]:
    """NAME(key=value, ...) with Python literals as values; yielded when complete."""
    name = yield from source.name()
    yield from source.space()
    yield from source.expect("(")
    arguments: dict[str, Any] = {}
    while True:
        yield from source.space()
        if (yield from source.accept(")")):
            break
        key = yield from source.name()
        yield from source.space()
        yield from source.expect("=")
        arguments[key] = _literal((yield from source.value(quotes="'\"")))
        yield from source.space()
        if (yield from source.expect(",", ")")) == ")":
            break
    text = _dump(arguments)
    yield source.tell("call", name)
    yield source.tell("arguments", text)


def pythonic(source: Source, schemas: Schemas) -> Scan[None]:
    """[NAME(key=value, ...), ...]: Llama 4."""
    yield from source.expect("[")
    yield from source.items(_call)


def lfm2(source: Source, schemas: Schemas) -> Scan[None]:
    """[NAME(key=value, ...), ...] between marks: LFM2."""
    yield from pythonic(source, schemas)
    yield from source.expect("<|tool_call_end|>")


def olmo3(source: Source, schemas: Schemas) -> Scan[None]:
    """NAME(key=value, ...) on separate lines between tags: OLMo 3."""
    while True:
        yield from source.space()
        yield from _call(source)
        yield from source.space()
        if (yield from source.accept("</function_calls>")):
            return
