"""Responses that are kept, so that others can go on from them and ask for them again; in memory, the newest ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
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
        task: Makes it, where nobody waits for it.
    """

    whole: Callable[[], dict[str, Any]]
    items: Callable[[], Items]
    request_id: str
    task: asyncio.Task[None] | None = None


class ResponseStore:
    """The responses of a server. Those of one API key are not seen with another.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[tuple[str | None, str], Kept] = {}

    def add(self, key: str | None, id: str, kept: Kept) -> None:
        """Keeps a response; the oldest ones that are finished go."""
        self._kept[key, id] = kept
        surplus = max(len(self._kept) - self.most, 0)
        done = (name for name, one in self._kept.items() if one.task is None or one.task.done())
        for name in [*islice(done, surplus)]:
            del self._kept[name]

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
        del self._kept[key, id]
