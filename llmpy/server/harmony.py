"""gpt-oss's messages: each has a header with a channel and an optional recipient, then its text."""

from __future__ import annotations

import re

from .formats_json import decode
from .scanning import Piece, held_back, slices

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TEXT = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
"""Tokens that end a text. The last two begin the next header, so a message without an end token is accepted."""


class HarmonyParser:
    """Parses messages: one with a recipient is a call, one in channel `analysis` is reasoning, others are content.

    Args:
        holds: Return a call only when it is complete; a call without a JSON object as arguments becomes content.
    """

    def __init__(self, holds: bool) -> None:
        self._holds = holds
        self._held = ""
        self._left = 0
        self._begun: list[str] = []
        self._header = ""
        self._kind: str | None = None
        self._call: list[str] = []
        self._name = ""

    def push(self, text: str) -> list[Piece]:
        """Adds text and returns the new pieces."""
        pieces: list[Piece] = []
        self._left = len(text)
        for part in slices(text):
            self._held += part
            self._left -= len(part)
            while self._step(pieces):
                pass
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        is_first = not self._header and not self._begun
        if self._kind is None and is_first and self._held and not "<|".startswith(self._held[:2]):
            self._kind = "content"  # text without a header
        if self._kind is None:
            header, found, rest = self._held.partition(_TEXT)
            keep = 0 if found else held_back(self._held, [_TEXT])
            self._begun += [header[: len(header) - keep]] if len(header) > keep else []
            self._held = rest if found else header[len(header) - keep :]
            if found:
                self._header, self._begun = "".join(self._begun), []
                self._begin(pieces)
            return bool(found)
        places = [(place, mark) for mark in _ENDS if (place := self._held.find(mark)) >= 0]
        if not places:
            keep = held_back(self._held, _ENDS)
            self._tell(self._held[: len(self._held) - keep], pieces)
            self._held = self._held[len(self._held) - keep :]
            return False
        place, mark = min(places)
        self._tell(self._held[:place], pieces)
        self._held = self._held[place:]
        self._end(pieces)
        self._held = self._held if mark in _ENDS[3:] else self._held.removeprefix(mark)
        return True

    def _begin(self, pieces: list[Piece]) -> None:
        """Begins a message after its complete header."""
        recipient = _RECIPIENT.search(self._header)
        if recipient is not None:
            self._kind, self._name, self._call = "call", recipient[1].removeprefix("functions."), []
            if not self._holds:
                pieces.append(Piece("call", self._name))
        else:
            self._kind = "reasoning" if "analysis" in self._header else "content"

    def _tell(self, text: str, pieces: list[Piece]) -> None:
        """Adds a piece for `text`, which is the beginning of the held text."""
        if not text:
            return
        if self._kind == "call" and self._holds:
            self._call.append(text)
        elif self._kind == "call":
            pieces.append(Piece("arguments", text))
        else:
            pieces.append(Piece("reasoning" if self._kind == "reasoning" else "content", text, len(self._held) + self._left))

    def _end(self, pieces: list[Piece]) -> None:
        """Ends a message; the held text follows the message."""
        if self._kind == "call" and self._holds:
            arguments = "".join(self._call)
            if isinstance(decode(arguments), dict):
                pieces += [Piece("call", self._name), Piece("arguments", arguments)]
            else:
                whole = self._header + _TEXT + arguments
                pieces.append(Piece("content", whole, len(whole) + len(self._held) + self._left))
        self._kind = None

    def finish(self) -> list[Piece]:
        """Ends the last message. A header without text is dropped; text without a header is content."""
        pieces: list[Piece] = []
        held = self._held
        if self._kind is not None:
            self._tell(held, pieces)
            self._held = ""
            self._end(pieces)
        elif not self._header and (held := "".join(self._begun) + held):
            pieces.append(Piece("content", held, len(held)))
        self._held = ""
        return pieces
