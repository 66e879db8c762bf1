"""Truncates a conversation to the context: drops the oldest turns first, keeps system messages and the last turn.

`llmpy chat` uses this, and the server for requests with `truncation: "auto"`, such as those of its page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Message = TypeVar("Message", bound=Mapping[str, Any])

SHARE = 4
"""1/SHARE of the context is kept free for an answer, or less if the answer has a lower limit."""


def prompt_room(max_model_len: int, max_tokens: int | None) -> int:
    """Most tokens of a conversation that leave room for an answer.

    Args:
        max_model_len: Longest sequence, in tokens.
        max_tokens: Most tokens of the answer; None = no limit.
    """
    free = max_model_len // SHARE
    return max_model_len - (free if max_tokens is None else min(free, max_tokens))


def fitted(messages: Sequence[Message], count: Callable[[list[Message]], int], most: int) -> list[Message]:
    """The messages that fit.

    Args:
        messages: A conversation. A turn begins with a user message.
        count: Counts the prompt tokens of messages; fewer messages must have fewer tokens.
        most: Most tokens of the prompt.

    Returns:
        All messages, or the rest after dropping as few of the oldest turns as possible. The last turn stays even if it is too
        long.
    """
    kept = list(messages)
    head = next((i for i, message in enumerate(kept) if message.get("role") not in ("system", "developer")), len(kept))
    starts = [i for i in range(head, len(kept)) if kept[i].get("role") == "user"]
    if len(starts) < 2 or count(kept) <= most:
        return kept
    low, high = 1, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if count(kept[:head] + kept[starts[middle] :]) <= most:
            high = middle
        else:
            low = middle + 1
    return kept[:head] + kept[starts[low] :]
