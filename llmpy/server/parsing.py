"""From a model's text to what a chat answer tells apart: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one kind.

    Args:
        kind: What it belongs to; "call" opens a tool call, "arguments" goes on with the one opened last.
        text: The text; of "call" the function's name.
        call_id: Of "call": the id that the model gave it, None = one is made.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call_id: str | None = None


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


MakeParser = Callable[[], Parser]
