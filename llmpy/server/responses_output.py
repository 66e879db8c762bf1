"""The output of /v1/responses: reasoning, messages and calls as items, and the events of their changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .chat import Message
from .logprobs import TextLogprobs
from .parsing import Piece

Item = dict[str, Any]


class Output:
    """The items of one answer in order. The last item is open until another begins. Every change is an event.

    Args:
        id: Suffix of the items' ids.
    """

    def __init__(self, id: str) -> None:
        self.items: list[Item] = []
        self._id = id
        self._is_open = False
        self._number = 0
        self.logprobs: TextLogprobs | None = None
        """Logprobs of the answer's text if requested."""
        self._texts: list[str] = []

    def event(self, kind: str, **fields: Any) -> bytes:
        """An event in the form of server-sent events."""
        made = {"type": kind, **fields, "sequence_number": self._number}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(made) + b"\n\n"

    def take(self, pieces: list[Piece], message: Message) -> bytes:
        """Adds pieces.

        Args:
            pieces: The new pieces.
            message: The message, which already includes the pieces.

            Returns:
                The events.
        """
        frame = b""
        number = len(message.calls) - sum(piece.kind == "call" for piece in pieces)
        for piece in pieces:
            if piece.kind == "call":
                call = message.calls[number]
                number += 1
                frame += self._begin(_call(f"fc_{self._id}_{len(self.items)}", call["id"], piece.text))
            elif piece.kind == "arguments":
                self._texts.append(piece.text)
                frame += self._delta("response.function_call_arguments.delta", piece.text, {})
            else:
                frame += self._text(piece, message.num_chars - piece.behind)
        return frame

    def _text(self, piece: Piece, start: int) -> bytes:
        """Adds a piece of text; `start` is its first character in the answer."""
        is_thought = piece.kind == "reasoning"
        kind, prefix = ("reasoning", "rs") if is_thought else ("message", "msg")
        frame = b""
        if not self._is_open or self.items[-1]["type"] != kind:
            frame = self._begin(_textual(kind, f"{prefix}_{self._id}_{len(self.items)}"))
        self._texts.append(piece.text)
        if is_thought:
            return frame + self._delta("response.reasoning_text.delta", piece.text, {"content_index": 0})
        logprobs = [] if self.logprobs is None else self.logprobs.take(start, start + len(piece.text))
        self.items[-1]["content"][0]["logprobs"] += logprobs
        return frame + self._delta("response.output_text.delta", piece.text, {"content_index": 0, "logprobs": logprobs})

    def _delta(self, kind: str, text: str, rest: Mapping[str, Any]) -> bytes:
        return self.event(kind, **self._place(), **rest, delta=text) if text else b""

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: Item) -> bytes:
        frame = self.close("completed")
        self.items.append(item)
        self._is_open = True
        parts = item.get("content") or []
        bare = {**item, "content": []} if parts else item
        frame += self.event("response.output_item.added", output_index=len(self.items) - 1, item=bare)
        for part in parts:
            frame += self.event("response.content_part.added", **self._place(), content_index=0, part=part)
        return frame

    def settle(self) -> None:
        """Stores the collected text in the open item."""
        if self._texts:
            item = self.items[-1]
            holder, key = (item, "arguments") if item["type"] == "function_call" else (item["content"][0], "text")
            holder[key] += "".join(self._texts)
            self._texts.clear()

    def finish(self, status: str) -> bytes:
        """Ends the answer; an empty answer gets an empty message."""
        frame = b"" if self.items else self._text(Piece("content", ""), 0)
        if self.items[-1]["type"] == "message" and self.logprobs is not None:
            self.items[-1]["content"][0]["logprobs"] += self.logprobs.rest()
        return frame + self.close(status)

    def close(self, status: str) -> bytes:
        """Ends the open item, if any."""
        if not self._is_open:
            return b""
        self._is_open = False
        self.settle()
        item = self.items[-1]
        item["status"] = status
        frame = b""
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            frame = self.event("response.function_call_arguments.done", **self._place(), **done)
        for part in item.get("content") or []:
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            rest = {key: part[key] for key in ("text", "logprobs") if key in part}
            frame += self.event(f"response.{kind}.done", **self._place(), content_index=0, **rest)
            frame += self.event("response.content_part.done", **self._place(), content_index=0, part=part)
        return frame + self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)


def _call(id: str, call_id: str, name: str) -> Item:
    return {"type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": "", "status": "in_progress"}


def _textual(kind: str, id: str) -> Item:
    item: Item = {"type": kind, "id": id, "status": "in_progress"}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {**item, "role": "assistant", "content": [part]}
