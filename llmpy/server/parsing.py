"""Parsers that split a model's text into content, reasoning and tool calls.

A parser gets one sample's text in pieces. Its results do not depend on where the text is cut: a tail that may be the
beginning of a marker is held back until more text arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

from .formats import Format, Markers
from .formats_json import decode
from .scanning import Malformed, Piece, Scan, Schemas, Source, held_back, slices

__all__ = ["Parser", "Piece", "PlainParser", "ReasoningParser", "ToolParser"]

MAX_AGAIN = 64 << 10
"""Most characters of one answer that are scanned again, because calls may begin inside text that only looked like calls."""


class Parser(Protocol):
    """Parses one sample's text while it arrives."""

    def push(self, text: str) -> list[Piece]:
        """Adds text and returns the new pieces; text that may belong to a marker is held back."""

    def finish(self) -> list[Piece]:
        """Ends the text and returns the pieces that were held back."""


class PlainParser:
    """Returns all text as content."""

    def push(self, text: str) -> list[Piece]:
        """Returns the text as content."""
        return [Piece("content", text, len(text))] if text else []

    def finish(self) -> list[Piece]:
        """Returns nothing; this parser holds no text back."""
        return []


class ReasoningParser:
    """Returns text between two markers at the beginning as reasoning; another parser gets the rest.

    Args:
        markers: The opening and the closing marker.
        is_open: Whether the prompt ends with the opening marker.
        rest: Parser of the rest.
    """

    def __init__(self, markers: Markers, is_open: bool, rest: Parser) -> None:
        self._open, self._close = markers.open, markers.close
        self._state: Literal["before", "inside", "after"] = "inside" if is_open else "before"
        self._rest, self._held = rest, ""
        self._space: list[str] = []
        self._drops_lines = False

    def push(self, text: str) -> list[Piece]:
        """Returns reasoning, then the other parser's pieces of the rest."""
        text, self._held = self._held + text, ""
        if self._state == "before":
            start = text.lstrip()
            self._space.append(text[: len(text) - len(start)])
            if self._open.startswith(start):  # the text is a beginning of the marker so far
                self._held = start
                return []
            self._state = "inside" if start.startswith(self._open) else "after"
            text = start[len(self._open) :] if self._state == "inside" else "".join(self._space) + start
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
        """Passes text to the other parser, without the empty lines after reasoning."""
        if self._drops_lines:
            text = text.lstrip("\n")
            self._drops_lines = not text
        return self._rest.push(text)

    def finish(self) -> list[Piece]:
        """Returns the held tail, which was not a marker."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return _reasoning(held) + self._rest.finish()
        space = "".join(self._space) if self._state == "before" else ""
        return self._rest.push(space + held) + self._rest.finish()


def _reasoning(text: str) -> list[Piece]:
    return [Piece("reasoning", text)] if text else []


class ToolParser:
    """Finds calls by a format; other text is content, without the white space around calls.

    Args:
        form: The model's tool call format.
        schemas: Parameter schemas of the functions that may be called.
        holds: True: return calls when the text after an opening mark is complete; malformed calls become content. False:
            return a call as it arrives; if it turns out malformed after the beginning of its arguments, it stays a call.
    """

    def __init__(self, form: Format, schemas: Schemas, holds: bool) -> None:
        self._form, self._schemas, self._holds = form, schemas, holds
        self._source = Source()
        self._scan: Scan[None] | None = None
        self._coming: deque[str] = deque()
        self._has_ended = False
        self._calls: list[Piece] = []
        self._whole: list[str] = []
        self._space: list[str] = []
        self._gap = ""
        self._num_again = 0
        self._has_begun = self._drops_space = False

    def push(self, text: str) -> list[Piece]:
        """Returns content at once, and the parts of calls that are certain."""
        source = self._source
        pieces: list[Piece] = []
        self._coming.extend(slices(text))
        while self._coming:
            part = self._coming.popleft()
            source.text += part
            source.ended = self._has_ended and not self._coming
            if self._scan is not None and self._holds:
                self._whole.append(part)
            while self._find(pieces) if self._scan is None else self._advance(pieces):
                pass
        return pieces

    def finish(self) -> list[Piece]:
        """Returns a call that the end of the text completes, and the tail."""
        self._has_ended = True
        pieces = self.push("")
        self._content(self._source.text, 0, pieces)
        self._source.text = ""
        return pieces

    def _find(self, pieces: list[Piece]) -> bool:
        """Adds content up to the beginning of calls; returns whether calls begin. White space is held until text follows."""
        form, source = self._form, self._source
        if self._drops_space:
            source.text = source.text.lstrip()
        before, found, after = source.text.partition(form.open)
        is_alone = form.at_start and (self._has_begun or bool(found and before.strip()))
        if is_alone:
            self._content(source.text, 0, pieces)
            source.text = ""
            return False
        num_chars = len(source.text)
        if not found:
            keep = 0 if source.ended or (form.at_start and before.strip()) else held_back(before, [form.open])
            before, source.text = before[: len(before) - keep], before[len(before) - keep :]
        body = before.rstrip()
        if body:
            self._content(body, num_chars - len(body), pieces)
        self._space.append(before[len(body) :])
        if found:
            self._gap, self._space = "".join(self._space), []
            source.begin(form.open + after if form.at_start else after)
            self._whole = [source.text]
            self._scan = form.scan(source, self._schemas)
        return bool(found)

    def _content(self, text: str, after: int, pieces: list[Piece]) -> None:
        """Adds content with the held white space before it; `after` characters of received text follow it."""
        text, self._space = "".join(self._space) + text, []
        if text:
            self._has_begun, self._drops_space = True, False
            pieces.append(Piece("content", text, len(text) + after + sum(map(len, self._coming))))

    def _advance(self, pieces: list[Piece]) -> bool:
        """Continues scanning calls; returns whether the calls have ended."""
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
        """Adds the complete calls; if one has arguments that are not an object, the text is content."""
        if self._holds and not _are_calls(self._calls):
            self._content(self._written(), len(self._source.text), pieces)
            return
        pieces += self._calls
        self._drops_space = True

    def _refuse(self, pieces: list[Piece]) -> None:
        """Adds malformed calls as content, except for text that was already returned as a call."""
        source = self._source
        if self._holds and self._calls:
            self._content(self._written(), len(self._source.text), pieces)
        elif source.has_told:
            self._content(source.read, len(source.text), pieces)
        else:
            self._num_again += len(source.read)
            self._content(self._opened(), len(source.read) + len(source.text), pieces)
            if self._num_again > MAX_AGAIN:
                self._content(source.read, len(source.text), pieces)
                return
            self._coming.extendleft(reversed([*slices(source.read + source.text)]))
            source.text = ""

    def _opened(self) -> str:
        """The text that was read before the calls: white space and the opening mark."""
        return self._gap + ("" if self._form.at_start else self._form.open)

    def _written(self) -> str:
        """`_opened()` and the text that the scan has read."""
        whole = "".join(self._whole)
        return self._opened() + whole[: len(whole) - len(self._source.text)]


def _are_calls(pieces: Sequence[Piece]) -> bool:
    """Whether all arguments are JSON objects."""
    texts: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            texts.append([])
        else:
            texts[-1].append(piece.text)
    return bool(texts) and all(isinstance(decode("".join(parts)), dict) for parts in texts)
