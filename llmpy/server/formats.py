"""How models write tool calls and mark reasoning; which format a model uses is read from its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Format:
    """A way to write tool calls.

    Args:
        open: What begins calls.
        close: What ends them; "" = the end of the text.
        parse: The calls in the text between them; [] = it is malformed.
        at_start: Calls stand only at the very beginning.
        is_special: The markers are special tokens, which have to be shown for the parser to see them.
    """

    open: str
    close: str
    parse: Callable[[str], Calls]
    at_start: bool = False
    is_special: bool = False


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _objects(value: Any, key: str) -> Calls:
    """Calls written as {"name": ..., KEY: {...}}, one or a list of them."""
    calls: Calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return []
        arguments = item.get(key, item.get("arguments", {}))
        arguments = _decode(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            return []
        calls.append((item["name"], arguments))
    return calls


def hermes(text: str) -> Calls:
    """{"name": ..., "arguments": {...}} in a tag: Hermes, Qwen 2.5 and 3."""
    return _objects(_decode(text), "arguments")


def llama3(text: str) -> Calls:
    """The whole text is {"name": ..., "parameters": {...}}, several with semicolons between them: Llama 3."""
    calls: Calls = []
    for part in ("{" + text).split(";\n") if ";\n" in text else ["{" + text]:
        found = _objects(_decode(part.strip().rstrip(";")), "parameters")
        if not found:
            return []
        calls += found
    return calls


def mistral(text: str) -> Calls:
    """A list of objects, or NAME[ARGS]{...}: Mistral."""
    named = re.fullmatch(r"\s*([\w.-]+)\[ARGS\](.*)", text, re.DOTALL)
    if named is None:
        return _objects(_decode(text), "arguments")
    arguments = _decode(named[2])
    return [(named[1], arguments)] if isinstance(arguments, dict) else []


def deepseek(text: str) -> Calls:
    """function<sep>NAME and a block of JSON (V3, R1), or NAME<sep>{...} (V3.1), each between marks of its own: DeepSeek."""
    calls: Calls = []
    for part in re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", text, re.DOTALL):
        first, _, second = part.partition("<｜tool▁sep｜>")
        fenced = re.fullmatch(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", second, re.DOTALL)
        name, body = (fenced[1], fenced[2]) if fenced else (first.strip(), second)
        arguments = _decode(body)
        if not name or not isinstance(arguments, dict):
            return []
        calls.append((name, arguments))
    return calls


def glm(text: str) -> Calls:
    """NAME, then pairs of <arg_key> and <arg_value>: GLM-4.5 and later. A value that is no JSON is text."""
    name, *_ = re.split(r"\s|<", text.strip(), maxsplit=1)
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.DOTALL)
    return [(name, {key.strip(): _value(value) for key, value in pairs})] if name else []


def qwen_coder(text: str) -> Calls:
    """<function=NAME> with <parameter=KEY> inside: Qwen3-Coder. A value that is no JSON is text."""
    found = re.fullmatch(r"\s*<function=([^>]+)>(.*?)</function>\s*", text, re.DOTALL)
    if found is None:
        return []
    pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL)
    return [(found[1], {key: _value(value) for key, value in pairs})]


def _value(text: str) -> Any:
    value = _decode(text)
    return text if value is None and text.strip() != "null" else value


FORMATS = {
    "hermes": Format("<tool_call>", "</tool_call>", hermes),
    "llama3": Format("{", "", llama3, at_start=True),
    "mistral": Format("[TOOL_CALLS]", "", mistral, is_special=True),
    "deepseek": Format("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", deepseek, is_special=True),
    "glm": Format("<tool_call>", "</tool_call>", glm),
    "qwen_coder": Format("<tool_call>", "</tool_call>", qwen_coder),
}
# The first of these that a chat template holds tells its format.
_SIGNS = (
    ("<arg_key>", "glm"),
    ("<function=", "qwen_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ('"parameters"', "llama3"),
)


def tool_format(template: str) -> Format | None:
    """How a model with this chat template writes calls; None: it has no calls that we know."""
    return next((FORMATS[name] for sign, name in _SIGNS if sign in template), None)


def reasoning_markers(template: str) -> tuple[str, str] | None:
    """The marks of reasoning in a chat template."""
    return THINK if THINK[1] in template else None
