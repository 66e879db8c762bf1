"""How models write tool calls and mark reasoning; which format a model uses is read from its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..structured.lark import Rules
from . import grammars_json, grammars_python, grammars_text
from .formats_json import deepseek, hermes, llama3, mistral, plamo
from .formats_text import glm, lfm2, olmo3, pythonic, qwen_coder
from .scanning import Scan, Scanner, Schemas, Source

THINK = ("<think>", "</think>")
Grammar: TypeAlias = Callable[[Rules, Schemas, bool, str], str]
"""Writes calls as a grammar: rules to add to; the parameters' schema of every function that may be called; whether there may be
several calls; the chat template. Returns an expression of Lark, in which arguments may be `%json` and a schema."""


@dataclass(frozen=True)
class Format:
    """A way to write tool calls.

    Args:
        open: What begins calls.
        scan: Reads what follows, and at the start of an answer `open` too, up to the end of the calls.
        at_start: Calls stand only at the very beginning.
        is_special: The markers are special tokens, which have to be shown for the parser to see them.
        grammar: What calls are, so that they can be forced; None: they cannot.
    """

    open: str
    scan: Scanner
    at_start: bool = False
    is_special: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Markers:
    """What a model puts around its reasoning.

    Args:
        open, close: The marks.
        is_special: They are special tokens, which have to be shown for the parser to see them.
    """

    open: str
    close: str
    is_special: bool = False


def _elsewhere(source: Source, schemas: Schemas) -> Scan[None]:
    """Harmony's messages are told apart by a parser of their own."""
    yield from ()


HARMONY = Format("<|start|>", _elsewhere, is_special=True, grammar=grammars_json.harmony)
"""Channels of messages: gpt-oss."""
FORMATS = {
    "hermes": Format("<tool_call>", hermes, grammar=grammars_json.hermes),
    "llama3": Format("{", llama3, at_start=True, grammar=grammars_json.llama3),
    "mistral": Format("[TOOL_CALLS]", mistral, is_special=True, grammar=grammars_json.mistral),
    "deepseek": Format("<｜tool▁calls▁begin｜>", deepseek, is_special=True, grammar=grammars_json.deepseek),
    "glm": Format("<tool_call>", glm, grammar=grammars_text.glm),
    "qwen_coder": Format("<tool_call>", qwen_coder, grammar=grammars_text.qwen_coder),
    "plamo": Format("<|plamo:begin_tool_requests:plamo|>", plamo, is_special=True, grammar=grammars_json.plamo),
    "pythonic": Format("[", pythonic, at_start=True, grammar=grammars_python.pythonic),
    "lfm2": Format("<|tool_call_start|>", lfm2, is_special=True, grammar=grammars_python.lfm2),
    "olmo3": Format("<function_calls>", olmo3, grammar=grammars_python.olmo3),
    "harmony": HARMONY,
}
"""Formats by name."""
REASONING = {
    "think": Markers(*THINK),
    "plamo": Markers("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", is_special=True),
    "seed": Markers("<seed:think>", "</seed:think>"),
    "mistral": Markers("[THINK]", "[/THINK]", is_special=True),
    "cohere": Markers("<|START_THINKING|>", "<|END_THINKING|>", is_special=True),
}
"""Marks of reasoning by name."""
# The first of these that a chat template holds tells its format.
_SIGNS = [
    ("<|channel|>", "harmony"),
    ("<|plamo:begin_tool_request", "plamo"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen_coder"),
    ("<function_calls>", "olmo3"),
    ("<|tool_call_start|>", "lfm2"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|python_start|>", "pythonic"),
    ('"parameters"', "llama3"),
]


def register_tool_format(name: str, form: Format, sign: str | None = None) -> None:
    """Makes a way to write calls known to servers that are made from now on.

    Args:
        name: What `tool_call_parser` calls it; one that is taken is replaced.
        form: The format.
        sign: Text in a chat template that tells it; it goes before all signs so far. None = only by name.
    """
    FORMATS[name] = form
    if sign is not None:
        _SIGNS.insert(0, (sign, name))


def register_reasoning(name: str, markers: Markers) -> None:
    """Makes marks of reasoning known to servers that are made from now on.

    Args:
        name: What `reasoning_parser` calls them; one that is taken is replaced.
        markers: The marks; a chat template that holds the closing one tells them.
    """
    REASONING[name] = markers


def tool_format(template: str) -> str | None:
    """Name of the way that a model with this chat template writes calls; None: it has no calls that we know."""
    return next((name for sign, name in _SIGNS if sign in template), None)


def reasoning_format(template: str) -> str | None:
    """Name of the marks of reasoning in a chat template."""
    return next((name for name, markers in REASONING.items() if markers.close in template), None)
