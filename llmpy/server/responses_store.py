"""The store of the newest responses, in memory: clients can continue from them and read them again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import HttpError

Items = list[dict[str, Any]]


@dataclass
class Kept:
    """A kept response.

    Args:
        whole: Returns the response in its current state.
        items: Returns the items of the conversation, including the answer.
        request_id: The engine's id of the request.
        size: Bytes of the response.
        task: The task of a background response.
    """

    whole: Callable[[], dict[str, Any]]
    items: Callable[[], Items]
    request_id: str
    size: int
    task: asyncio.Task[None] | None = None


class ResponseStore:
    """The kept responses of a server. An API key gives access only to its own responses.

    Args:
        most: Most responses.
        most_bytes: Most bytes of all responses together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self._most_bytes = most, most_bytes
        self._kept: dict[tuple[str | None, str], Kept] = {}
        self.size = 0
        """Bytes of all kept responses."""

    def add(self, key: str | None, id: str, kept: Kept) -> None:
        """Stores a response and drops the oldest finished ones beyond the limits."""
        self._drop((key, id))
        self._kept[key, id] = kept
        self.size += kept.size
        self._make_room()

    def grow(self, kept: Kept, size: int) -> None:
        """Adds bytes to the size of a response."""
        kept.size += size
        if any(one is kept for one in self._kept.values()):
            self.size += size
            self._make_room()

    def _make_room(self) -> None:
        """Drops the oldest finished responses until their number and size are within the limits."""
        for name, one in [*self._kept.items()]:
            if len(self._kept) <= self.most and self.size <= self._most_bytes:
                return
            if one.task is None or one.task.done():
                self._drop(name)

    def _drop(self, name: tuple[str | None, str]) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.size -= kept.size

    def get(self, key: str | None, id: str) -> Kept:
        """Finds a response.

        Raises:
            HttpError: 404, the store does not have it.
        """
        if (key, id) not in self._kept:
            hint = "" if self.most else "; the server keeps none, --keep-responses"
            raise HttpError(404, f"Response with id '{id[:100]}' not found{hint}.", "response_id")
        return self._kept[key, id]

    def remove(self, key: str | None, id: str) -> None:
        """Removes a response; cancels it if it runs in the background.

        Raises:
            HttpError: 404, the store does not have it.
        """
        kept = self.get(key, id)
        if kept.task is not None:
            kept.task.cancel()
        self._drop((key, id))
