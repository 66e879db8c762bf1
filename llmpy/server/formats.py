"""How models write tool calls and mark reasoning; which format a model uses is read from its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from .formats_json import deepseek, hermes, llama3, mistral, plamo
from .formats_text import glm, lfm2, olmo3, pythonic, qwen_coder
from .scanning import Scan, Scanner, Schemas, Source

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Format:
    """A way to write tool calls.

    Args:
        open: What begins calls.
        scan: Reads what follows, and at the start of an answer `open` too, up to the end of the calls.
        at_start: Calls stand only at the very beginning.
        is_special: The markers are special tokens, which have to be shown for the parser to see them.
    """

    open: str
    scan: Scanner
    at_start: bool = False
    is_special: bool = False


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


HARMONY = Format("<|start|>", _elsewhere, is_special=True)
"""Channels of messages: gpt-oss."""
FORMATS = {
    "hermes": Format("<tool_call>", hermes),
    "llama3": Format("{", llama3, at_start=True),
    "mistral": Format("[TOOL_CALLS]", mistral, is_special=True),
    "deepseek": Format("<｜tool▁calls▁begin｜>", deepseek, is_special=True),
    "glm": Format("<tool_call>", glm),
    "qwen_coder": Format("<tool_call>", qwen_coder),
    "plamo": Format("<|plamo:begin_tool_requests:plamo|>", plamo, is_special=True),
    "pythonic": Format("[", pythonic, at_start=True),
    "lfm2": Format("<|tool_call_start|>", lfm2, is_special=True),
    "olmo3": Format("<function_calls>", olmo3),
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
