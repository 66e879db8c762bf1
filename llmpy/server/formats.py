"""Formats of tool calls and markers of reasoning; a model's chat template tells which it uses."""

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
"""Writes a grammar of calls. Arguments: the rules to add to; the parameter schema of every callable function; whether several
calls are allowed; the chat template. Returns a Lark expression; arguments may be `%json` with a schema."""


@dataclass(frozen=True)
class Format:
    """A format of tool calls.

    Args:
        open: Text that begins calls.
        scan: Reads the text after `open` up to the end of the calls; with `at_start` it reads `open` too.
        at_start: Calls are allowed only at the beginning of the answer.
        is_special: The markers are special tokens; they must be shown to the parser.
        grammar: Writes the grammar of calls, to force them; None: calls cannot be forced.
    """

    open: str
    scan: Scanner
    at_start: bool = False
    is_special: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Markers:
    """The markers around a model's reasoning.

    Args:
        open, close: The opening and the closing marker.
        is_special: The markers are special tokens; they must be shown to the parser.
    """

    open: str
    close: str
    is_special: bool = False


def _elsewhere(source: Source, schemas: Schemas) -> Scan[None]:
    """Placeholder: HarmonyParser parses harmony's messages."""
    yield from ()


HARMONY = Format("<|start|>", _elsewhere, is_special=True, grammar=grammars_json.harmony)
"""gpt-oss: messages in channels."""
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
"""Markers of reasoning by name."""
# The first text here that a chat template contains selects the format.
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
    """Registers a format of tool calls for servers created after this call.

    Args:
        name: Name for `tool_call_parser`; it replaces a format of the same name.
        form: The format.
        sign: Text in a chat template that selects the format, checked before all earlier signs. None = select by name only.
    """
    FORMATS[name] = form
    if sign is not None:
        _SIGNS.insert(0, (sign, name))


def register_reasoning(name: str, markers: Markers) -> None:
    """Registers markers of reasoning for servers created after this call.

    Args:
        name: Name for `reasoning_parser`; it replaces markers of the same name.
        markers: The markers; a chat template that contains the closing marker selects them.
    """
    REASONING[name] = markers


def tool_format(template: str) -> str | None:
    """Name of the tool call format for a chat template; None: no known format."""
    return next((name for sign, name in _SIGNS if sign in template), None)


def reasoning_format(template: str) -> str | None:
    """Name of the reasoning markers in a chat template; None: no known markers."""
    return next((name for name, markers in REASONING.items() if markers.close in template), None)
