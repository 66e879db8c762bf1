"""Grammars of calls with JSON arguments that fit the function's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..structured.lark import Rules, schema_text
from .scanning import Schemas


def _arguments(schema: Mapping[str, Any]) -> str:
    return f"%json {schema_text({**schema, 'type': 'object'})}"


def _call(rules: Rules, name: str, schema: Mapping[str, Any], key: str = "arguments") -> str:
    """{"name": ..., "arguments": {...}}"""
    begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f'{rules.text(begin)} {_arguments(schema)} "}}"'


def repeated(rules: Rules, one: str, between: str, many: bool) -> str:
    """One call, or several separated by a text."""
    return f"{one} ({rules.text(between)} {one})*" if many else one


def hermes(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """{"name": ..., "arguments": {...}} in tags."""
    call = rules.any(_call(rules, *item) for item in functions.items())
    one = rules.rule(f"{rules.text('<tool_call>' + chr(10))} {call} {rules.text(chr(10) + '</tool_call>')}")
    return repeated(rules, one, "\n", many)


def llama3(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """One {"name": ..., "parameters": {...}}."""
    return rules.any(_call(rules, name, schema, "parameters") for name, schema in functions.items())


def mistral(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """A list of objects after a mark, or NAME[ARGS]{...}, depending on the chat template."""
    mark = rules.text("[TOOL_CALLS]")
    if "[ARGS]" in template:
        one = rules.any(f"{mark} {rules.text(name + '[ARGS]')} {_arguments(schema)}" for name, schema in functions.items())
        return f"{one}+" if many else one
    call = rules.any(_call(rules, *item) for item in functions.items())
    return f'{mark} " "? "[" {repeated(rules, call, ", ", many)} "]"'


def deepseek(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """Names and JSON between marks; the JSON is fenced if the chat template fences it."""
    fenced = "```json" in template
    begin = "<｜tool▁call▁begin｜>" + ("function<｜tool▁sep｜>" if fenced else "")
    middle, end = ("\n```json\n", "\n```<｜tool▁call▁end｜>") if fenced else ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    one = rules.any(
        f"{rules.text(begin + name + middle)} {_arguments(schema)} {rules.text(end)}" for name, schema in functions.items()
    )
    calls = repeated(rules, one, "\n", many) if fenced else f"{one}+" if many else one
    return f"{rules.text('<｜tool▁calls▁begin｜>')} {calls} {rules.text('<｜tool▁calls▁end｜>')}"


def plamo(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """Requests, each with a name and JSON between tags."""

    def tag(name: str) -> str:
        return f"<|plamo:{name}:plamo|>"

    one = rules.any(
        f"{rules.text(tag('begin_tool_request') + tag('begin_tool_name') + name + tag('end_tool_name'))} "
        f"{rules.text(tag('begin_tool_arguments'))} {_arguments(schema)} "
        f"{rules.text(tag('end_tool_arguments') + tag('end_tool_request'))}"
        for name, schema in functions.items()
    )
    begin, end = rules.text(tag("begin_tool_requests")), rules.text(tag("end_tool_requests"))
    return f"{begin} {one}{'+' if many else ''} {end}"


def harmony(rules: Rules, functions: Schemas, many: bool, template: str) -> str:
    """One message to a function in the commentary channel."""
    return rules.any(
        f"{rules.text(f'<|channel|>commentary to=functions.{name} ')} ({rules.text('<|constrain|>json')})? "
        f"{rules.text('<|message|>')} {_arguments(schema)}"
        for name, schema in functions.items()
    )
