"""How the router chooses an engine: the one that computes the least before the first token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .prefixes import Blocks, chain, root_of

POLICIES = ("prefix", "load", "round-robin")
RUNNING_TOKENS = 64
"""Tokens of a prompt that cost a new request as much as one request that runs already (benchmarks/routing.py)."""


@dataclass
class Prompt:
    """A prompt as the policy sees it.

    Args:
        ids: Its token ids, or the bytes of its text; () = unknown.
        salt: Its `cache_salt`.
        per_token: How many of `ids` make a token.
        is_told: Whether KV events tell its blocks: not those of text.
    """

    ids: Sequence[int] = ()
    salt: str | None = None
    per_token: int = 1
    is_told: bool = True
    _keys: dict[int, list[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids) // self.per_token

    def keys(self, size: int) -> list[int]:
        """Keys of its blocks of `size` tokens."""
        if size not in self._keys:
            root = root_of(self.salt) if self.per_token == 1 else root_of(f"text {self.salt}")
            self._keys[size] = chain(self.ids, size * self.per_token, root)
        return self._keys[size]


@dataclass(eq=False)
class Load:
    """What one engine does.

    Args:
        blocks: What its cache holds.
        running: Requests that the router has sent to it and that have not ended.
        others: Requests of other clients, as the engine tells.
        pending: Tokens of prompts that have no first token yet.
        chosen: Number of the last choice that fell on it.
    """

    blocks: Blocks = field(default_factory=Blocks)
    running: int = 0
    others: int = 0
    pending: int = 0
    chosen: int = 0

    def cached(self, prompt: Prompt, now: float) -> int:
        """Leading tokens of a prompt that its cache holds; the last token is always computed."""
        size = self.blocks.size
        found = self.blocks.matched(prompt.keys(size), now) * size
        return min(found, (prompt.tokens - 1) // size * size) if found else 0

    def sends(self, prompt: Prompt, now: float) -> None:
        """Notes that a prompt is sent to it."""
        self.blocks.guess(prompt.keys(self.blocks.size), now, prompt.is_told)

    def cost(self, prompt: Prompt, now: float) -> int:
        """Tokens to compute until the prompt's first token, and what running requests add to that time."""
        return prompt.tokens - self.cached(prompt, now) + self.pending + RUNNING_TOKENS * (self.running + self.others)


Kind = TypeVar("Kind", bound=Load)


class Chooser:
    """Chooses engines by a policy.

    Args:
        policy: "prefix": least cost. "load": least requests. "round-robin": one after the other.
    """

    def __init__(self, policy: str = "prefix") -> None:
        self.policy = policy
        self._number = 0

    def choose(self, loads: Iterable[Kind], prompt: Prompt, now: float) -> Kind | None:
        """The engine for a prompt; of equal ones that which was not chosen for the longest time.

        Args:
            loads: The engines that may serve it.
            prompt: The prompt.
            now: Seconds, as in `Blocks.guess`.
        """
        if self.policy == "prefix":
            best = min(loads, key=lambda load: (load.cost(prompt, now), load.chosen), default=None)
        elif self.policy == "load":
            best = min(loads, key=lambda load: (load.running + load.others, load.chosen), default=None)
        else:
            best = min(loads, key=lambda load: load.chosen, default=None)
        if best is not None:
            self._number += 1
            best.chosen = self._number
        return best
