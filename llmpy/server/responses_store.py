"""Responses that are kept, so that others can go on from them and ask for them again; in memory, the newest ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import HttpError

Items = list[dict[str, Any]]


@dataclass
class Kept:
    """A response.

    Args:
        whole: Gives it as it is now.
        items: Gives the conversation up to its end.
        request_id: What the engine calls its request.
        size: Bytes that it takes.
        task: Makes it, where nobody waits for it.
    """

    whole: Callable[[], dict[str, Any]]
    items: Callable[[], Items]
    request_id: str
    size: int
    task: asyncio.Task[None] | None = None


class ResponseStore:
    """The responses of a server. Those of one API key are not seen with another.

    Args:
        most: How many are kept.
        most_bytes: How many bytes they may take together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self._most_bytes = most, most_bytes
        self._kept: dict[tuple[str | None, str], Kept] = {}
        self.size = 0
        """Bytes of all that are kept."""

    def add(self, key: str | None, id: str, kept: Kept) -> None:
        """Keeps a response; the oldest ones that are finished go."""
        self._drop((key, id))
        self._kept[key, id] = kept
        self.size += kept.size
        self._make_room()

    def grow(self, kept: Kept, size: int) -> None:
        """A response takes so many bytes more."""
        kept.size += size
        if any(one is kept for one in self._kept.values()):
            self.size += size
            self._make_room()

    def _make_room(self) -> None:
        """Drops the oldest ones that are finished, as long as there are too many, or they are too long together."""
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
        """A response.

        Raises:
            HttpError: 404, it is not kept.
        """
        if (key, id) not in self._kept:
            hint = "" if self.most else "; the server keeps none, --keep-responses"
            raise HttpError(404, f"Response with id '{id[:100]}' not found{hint}.", "response_id")
        return self._kept[key, id]

    def remove(self, key: str | None, id: str) -> None:
        """Forgets a response; where it is being made in the background that ends.

        Raises:
            HttpError: 404, it is not kept.
        """
        kept = self.get(key, id)
        if kept.task is not None:
            kept.task.cancel()
        self._drop((key, id))
