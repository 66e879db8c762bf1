"""Scans of text that arrives in pieces, written as generators.

A scan yields a piece as soon as it is certain, and None when it needs more text. Its result depends only on the text, not on
where the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one kind.

    Args:
        kind: Kind of the text; "call" opens a tool call, "arguments" continues the last one.
        text: The text; for "call" the function's name.
        behind: For content: the number of characters from its beginning to the end of the text so far.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    behind: int = 0


Scan: TypeAlias = Generator["Piece | None", None, Result]
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Function name -> schema of its parameters, for every function that may be called."""
Scanner: TypeAlias = "Callable[[Source, Schemas], Scan[None]]"

_PLAIN = re.compile(r"[^\"'(){}\[\]]+")
_IN_STRING = re.compile(r"[^\"'\\]+")
_SCALAR = re.compile(r"[^\s,}\])]*")
NAME = re.compile(r"[\w.-]+")
SLICE_CHARS = 4096


class Malformed(Exception):
    """The text is not a call."""


def slices(text: str) -> Iterator[str]:
    """Splits a text into slices, at least one. Reading copies the rest of a slice each time, so slices must be short."""
    for start in range(0, max(len(text), 1), SLICE_CHARS):
        yield text[start : start + SLICE_CHARS]


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest tail of the text that is the beginning of a marker."""
    longest = 0
    for marker in markers:
        place = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while place >= 0 and not marker.startswith(text[place:]):
            place = text.find(marker[0], place + 1)
        longest = max(longest, len(text) - place if place >= 0 else 0)
    return longest


class Source:
    """Text that is read from the front while more is appended."""

    def __init__(self) -> None:
        self.text = ""
        """The unread text; it is short, because a scan reads all it can."""
        self.ended = False
        """Whether the text is complete."""
        self.has_told = False
        """Whether a piece was yielded since `begin`."""
        self._read: list[str] = []

    @property
    def read(self) -> str:
        """The text read since the last piece."""
        return "".join(self._read)

    def begin(self, text: str) -> None:
        """Restarts with this text."""
        self.text, self.has_told, self._read = text, False, []

    def take(self, count: int) -> str:
        """Reads `count` characters."""
        part, self.text = self.text[:count], self.text[count:]
        self._read.append(part)
        return part

    def tell(self, kind: Literal["call", "arguments"], text: str) -> Piece:
        """Makes a piece for the text read since the last piece."""
        self.has_told, self._read = True, []
        return Piece(kind, text)

    def more(self) -> Scan[None]:
        """Waits for more text; raises Malformed at the end of the text."""
        if self.ended:
            raise Malformed
        yield None

    def space(self) -> Scan[None]:
        """Reads white space."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return
            yield None

    def accept(self, *options: str) -> Scan[str]:
        """Reads one of the options if the text begins with it; otherwise reads nothing and returns ""."""
        while True:
            found = next((option for option in options if self.text.startswith(option)), "")
            if found or self.ended or not any(option.startswith(self.text) for option in options):
                return self.take(len(found))
            yield None

    def expect(self, *options: str) -> Scan[str]:
        """Reads one of the options; raises Malformed if the text begins with none."""
        found = yield from self.accept(*options)
        if not found:
            raise Malformed
        return found

    def items(self, one: Callable[[Source], Scan[None]]) -> Scan[None]:
        """Reads items separated by commas, and the closing bracket."""
        while True:
            yield from self.space()
            yield from one(self)
            yield from self.space()
            if (yield from self.expect(",", "]")) == "]":
                return

    def until(self, *marks: str) -> Scan[tuple[str, str]]:
        """Reads through the first of the marks; returns the text before it, and the mark."""
        parts: list[str] = []
        while True:
            places = [(place, mark) for mark in marks if (place := self.text.find(mark)) >= 0]
            if places:
                place, mark = min(places)
                parts.append(self.take(place))
                return "".join(parts), self.take(len(mark))
            parts.append(self.take(len(self.text) - held_back(self.text, marks)))
            yield from self.more()

    def name(self) -> Scan[str]:
        """Reads the name of a function."""
        name = ""
        while True:
            found = NAME.match(self.text)
            name += "" if found is None else self.take(found.end())
            if self.text and not name:
                raise Malformed
            if self.text:
                return name
            yield from self.more()

    def value(self, tells: bool = False, quotes: str = '"') -> Scan[str]:
        """Reads a JSON value, or other text in brackets, verbatim.

        Args:
            tells: Whether the value is the arguments of a call, to yield while it arrives.
            quotes: Quote characters of strings in the value.
        """
        yield from self.space()
        end, whole = _End(quotes), ""
        while True:
            part = self.take(end.find(self.text))
            whole += part
            if tells and part:
                yield self.tell("arguments", part)
            if end.is_reached:
                return whole
            yield from self.more()


class _End:
    """Finds the end of a value in text that arrives in pieces, by brackets and quotes.

    Args:
        quotes: Quote characters of strings in the value.
    """

    def __init__(self, quotes: str) -> None:
        self.is_reached = False
        self._quotes, self._quote = quotes, ""
        self._depth = 0
        self._is_escaped = self._is_scalar = False

    def find(self, text: str) -> int:
        """Number of characters of this text that belong to the value."""
        place = 0
        if text and not self._depth and not self._quote and not self._is_scalar:
            self._is_scalar = text[0] not in self._quotes + "([{"
        if self._is_scalar:
            found = _SCALAR.match(text)
            place = found.end() if found is not None else 0
            self.is_reached = place < len(text)
            return place
        while place < len(text) and not self.is_reached:
            place = self._step(text, place)
        return place

    def _step(self, text: str, place: int) -> int:
        """Advances by one character, or by a run of plain characters."""
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        plain = (_IN_STRING if self._quote else _PLAIN).match(text, place)
        if plain is not None:
            return plain.end()
        char = text[place]
        if self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in self._quotes:
            self._quote = char
        else:
            self._depth += (char in "([{") - (char in ")]}")
        self.is_reached = not self._quote and self._depth <= 0
        return place + 1
