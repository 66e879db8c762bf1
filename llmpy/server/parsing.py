"""From a model's text to what a chat answer tells apart: content, reasoning, tool calls.

A parser takes one sample's text as it comes. What it gives is the same however the text is cut: a tail that may be the
beginning of a marker is held back until more has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from .formats import Format, Markers
from .formats_json import decode
from .scanning import Malformed, Piece, Scan, Schemas, Source

__all__ = ["Parser", "Piece", "PlainParser", "ReasoningParser", "ToolParser", "held_back"]


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
        return [Piece("content", text, len(text))] if text else []

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest tail of a text that is the beginning of a marker."""
    longest = 0
    for marker in markers:
        place = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while place >= 0 and not marker.startswith(text[place:]):
            place = text.find(marker[0], place + 1)
        longest = max(longest, len(text) - place if place >= 0 else 0)
    return longest


class ReasoningParser:
    """Text between two markers at the beginning is reasoning; what follows goes to another parser.

    Args:
        markers: The opening and the closing one.
        is_open: The prompt has opened the reasoning already.
        rest: Takes what follows.
    """

    def __init__(self, markers: Markers, is_open: bool, rest: Parser) -> None:
        self._open, self._close = markers.open, markers.close
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
    """Calls where a format has them; the rest is content, without the white space around calls.

    Args:
        form: How the model writes calls.
        schemas: Of the functions that may be called.
        holds: Calls are given when all that a mark opens is complete, and are content where it is malformed. Else a call is
            given as it comes, and what turns out to be malformed behind the beginning of its arguments stays a call.
    """

    def __init__(self, form: Format, schemas: Schemas, holds: bool) -> None:
        self._form, self._schemas, self._holds = form, schemas, holds
        self._source = Source()
        self._scan: Scan[None] | None = None
        self._calls: list[Piece] = []
        self._whole = self._gap = ""
        self._has_begun = self._drops_space = False

    def push(self, text: str) -> list[Piece]:
        """Content at once; of calls what is sure."""
        self._source.text += text
        if self._scan is not None and self._holds:
            self._whole += text
        pieces: list[Piece] = []
        while self._find(pieces) if self._scan is None else self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """A call that the end completes, and the tail."""
        self._source.ended = True
        pieces = self.push("")
        self._content(self._source.text, 0, pieces)
        self._source.text = ""
        return pieces

    def _find(self, pieces: list[Piece]) -> bool:
        """Content up to where calls begin; whether they do."""
        form, source = self._form, self._source
        if self._drops_space:
            source.text = source.text.lstrip()
        before, found, after = source.text.partition(form.open)
        if form.at_start and (self._has_begun or (found and before.strip())):
            self._content(source.text, 0, pieces)
            source.text = ""
            return False
        if found:
            said = before.rstrip()
            self._content(said, len(source.text) - len(said), pieces)
            self._gap = before[len(said) :]
            source.text = form.open + after if form.at_start else after
            source.read, source.has_told, self._whole = "", False, source.text
            self._scan = form.scan(source, self._schemas)
            return True
        keep = 0 if source.ended or (form.at_start and source.text.strip()) else held_back(source.text, [form.open])
        body = source.text[: len(source.text) - keep].rstrip()
        if body:
            source.text = source.text[len(body) :]
            self._content(body, len(source.text), pieces)
        return False

    def _content(self, text: str, after: int, pieces: list[Piece]) -> None:
        """Adds content, behind which so many characters have come."""
        if text:
            self._has_begun, self._drops_space = True, False
            pieces.append(Piece("content", text, len(text) + after))

    def _advance(self, pieces: list[Piece]) -> bool:
        """Goes on with calls; whether they are over."""
        assert self._scan is not None
        told = self._calls if self._holds else pieces
        try:
            for piece in self._scan:
                if piece is None:
                    return False
                told.append(piece)
        except Malformed:
            self._refuse(pieces)
        else:
            self._settle(pieces)
        self._scan, self._calls, self._has_begun = None, [], True
        return True

    def _settle(self, pieces: list[Piece]) -> None:
        """The calls are complete."""
        source = self._source
        if self._holds and not _are_calls(self._calls):
            after = len(source.text)
            self._content(self._opened() + self._whole[: len(self._whole) - after], after, pieces)
            return
        pieces += self._calls
        self._drops_space = True

    def _refuse(self, pieces: list[Piece]) -> None:
        """They are none: content, as far as nothing else was given for it."""
        source = self._source
        if self._holds and self._calls:
            after = len(source.text)
            self._content(self._opened() + self._whole[: len(self._whole) - after], after, pieces)
        elif source.has_told:
            self._content(source.read, len(source.text), pieces)
        else:
            source.text = source.read + source.text
            self._content(self._opened(), len(source.text), pieces)

    def _opened(self) -> str:
        """What was read before the calls."""
        return self._gap + ("" if self._form.at_start else self._form.open)


def _are_calls(pieces: Sequence[Piece]) -> bool:
    """Whether all arguments are JSON objects."""
    texts: list[str] = []
    for piece in pieces:
        if piece.kind == "call":
            texts.append("")
        else:
            texts[-1] += piece.text
    return bool(texts) and all(isinstance(decode(text), dict) for text in texts)
