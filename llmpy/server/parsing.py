"""From a model's text to what a chat answer tells apart: content, reasoning, tool calls.

A parser takes one sample's text as it comes. What it gives is the same however the text is cut: a tail that may be the
beginning of a marker is held back until more has come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .formats import Format


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one kind.

    Args:
        kind: What it belongs to; "call" opens a tool call, "arguments" goes on with the one opened last.
        text: The text; of "call" the function's name.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class Parser(Protocol):
    """Takes one sample's text apart while it comes."""

    def push(self, text: str) -> list[Piece]:
        """What new text gives; text that may belong to a marker is held back."""

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""


class PlainParser:
    """Everything is content."""

    def push(self, text: str) -> list[Piece]:
        """The text itself."""
        return [Piece("content", text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest tail of a text that is the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-n:]) for marker in markers):
            return n
    return 0


class ReasoningParser:
    """Text between two markers at the beginning is reasoning; what follows goes to another parser.

    Args:
        markers: The opening and the closing one.
        is_open: The prompt has opened the reasoning already.
        rest: Takes what follows.
    """

    def __init__(self, markers: tuple[str, str], is_open: bool, rest: Parser) -> None:
        self._open, self._close = markers
        self._state: Literal["before", "inside", "after"] = "inside" if is_open else "before"
        self._rest, self._held = rest, ""
        self._drops_lines = False

    def push(self, text: str) -> list[Piece]:
        """Reasoning, then what the other parser makes of the rest."""
        text, self._held = self._held + text, ""
        if self._state == "before":
            start = text.lstrip()
            if self._open.startswith(start):  # nothing but the beginning of the marker so far
                self._held = text
                return []
            self._state = "inside" if start.startswith(self._open) else "after"
            text = start[len(self._open) :] if self._state == "inside" else text
        if self._state == "after":
            return self._pass_on(text)
        inside, found, after = text.partition(self._close)
        if not found:
            keep = held_back(text, [self._close])
            self._held = text[len(text) - keep :]
            return _reasoning(text[: len(text) - keep])
        self._state = "after"
        self._drops_lines = True
        return _reasoning(inside) + self._pass_on(after)

    def _pass_on(self, text: str) -> list[Piece]:
        """To the other parser, without the empty lines behind reasoning."""
        if self._drops_lines:
            text = text.lstrip("\n")
            self._drops_lines = not text
        return self._rest.push(text)

    def finish(self) -> list[Piece]:
        """The tail, which was no marker."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return _reasoning(held) + self._rest.finish()
        return self._rest.push(held) + self._rest.finish()


def _reasoning(text: str) -> list[Piece]:
    return [Piece("reasoning", text)] if text else []


class ToolParser:
    """Calls between markers; the rest is content, without the white space around calls.

    Args:
        form: How the model writes calls.
    """

    def __init__(self, form: Format) -> None:
        self._form = form
        self._held = ""
        self._is_inside = self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        """Content at once; a call when it is complete."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Takes what is decided from the text that is held; whether there may be more."""
        form, text = self._form, self._held
        if self._is_inside:
            inside, found, self._held = text.partition(form.close) if form.close else (text, "", text)
            if not found:
                self._held = text
                return False
            self._is_inside = False
            pieces += self._calls(inside, form.open + inside + found)
            return True
        if form.at_start and self._has_begun:
            return self._content(text, pieces)
        before, found, after = text.partition(form.open)
        if found and not (form.at_start and before.strip()):
            self._is_inside, self._held = True, after
            self._content(before.rstrip(), pieces)
            self._held = after
            return True
        keep = 0 if form.at_start and text.strip() else held_back(text, [form.open])
        body = text[: len(text) - keep].rstrip()
        if body:
            self._content(body, pieces)
            self._held = text[len(body) :]
        return False

    def _content(self, text: str, pieces: list[Piece]) -> bool:
        self._held = ""
        if text:
            self._has_begun = True
            pieces.append(Piece("content", text))
        return False

    def _calls(self, inside: str, whole: str) -> list[Piece]:
        """The calls in a text, which is content if it is malformed."""
        calls = self._form.parse(inside)
        if not calls:
            return [Piece("content", whole)]
        return [
            piece
            for name, arguments in calls
            for piece in (Piece("call", name), Piece("arguments", json.dumps(arguments, ensure_ascii=False)))
        ]

    def finish(self) -> list[Piece]:
        """A call that the end completes, or the tail, which was no marker."""
        held, self._held = self._held, ""
        if self._is_inside:
            self._is_inside = False
            whole = self._form.open + held
            return self._calls(held, whole) if not self._form.close or held.strip() else [Piece("content", whole)]
        return [Piece("content", held)] if held else []
