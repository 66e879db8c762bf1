"""Which messages of a conversation fit the context: the oldest turns go first; system messages and the last turn stay.

`llmpy chat` uses it, and the server for requests with `truncation: "auto"`, among them those of its page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Message = TypeVar("Message", bound=Mapping[str, Any])

SHARE = 4
"""A quarter of the context is kept free for an answer, unless the answer is limited to less."""


def prompt_room(max_model_len: int, max_tokens: int | None) -> int:
    """Most tokens of a conversation, so that an answer has room behind it.

    Args:
        max_model_len: Longest sequence.
        max_tokens: Most tokens of the answer; None = no limit of its own.
    """
    free = max_model_len // SHARE
    return max_model_len - (free if max_tokens is None else min(free, max_tokens))


def fitted(messages: Sequence[Message], count: Callable[[list[Message]], int], most: int) -> list[Message]:
    """The messages that fit.

    Args:
        messages: A conversation. A turn begins with a message of the user.
        count: Tokens of messages as a prompt; fewer messages have fewer.
        most: Tokens that the prompt may have.

    Returns:
        All messages, or those that stay when as few of the oldest turns as possible are dropped. The last turn stays though
        it may be too long.
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
