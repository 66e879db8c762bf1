"""Which engine holds which prefix: the blocks of its cache, as its events tell, and those that sent prompts will make."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BLOCK_SIZE = 16
"""Tokens of a block until an engine's events tell its size."""
GUESS_S = 3.0
"""Seconds after which a block that a sent prompt should have made must have been told by an event."""
NEVER = float("-inf")
MAX_GUESSES = 1 << 18
"""Most blocks of sent prompts that no event can tell; those that were used least recently go first."""


def _medium(event: Mapping[str, Any]) -> int:
    """A bit for where a block is: the pool, or memory behind it."""
    return 1 if event.get("medium") in (None, "GPU") else 2


def salted(salt: str | None, adapter: str | None) -> str | None:
    """The salt that keeps the prompts of adapters apart."""
    return salt if adapter is None else f"{adapter} {salt or ''}"


def root_of(salt: str | None) -> int:
    """The key before the first block of a prompt; see `salted`."""
    return hash(("root", salt or ""))


def chain(ids: Sequence[int], size: int, root: int) -> list[int]:
    """Keys of the full blocks of a prompt; a key stands for all tokens up to the block's end.

    Args:
        ids: Token ids, or bytes of a text.
        size: Tokens of a block.
        root: Key before the first block.
    """
    data, step = (ids, size) if isinstance(ids, bytes) else (array("q", ids).tobytes(), 8 * size)
    keys = []
    for end in range(step, len(data) + 1, step):
        root = hash((root, data[end - step : end]))
        keys.append(root)
    return keys


class Blocks:
    """What the cache of one engine holds.

    Args:
        has_events: Whether the engine tells its blocks. Without events all prompts that were sent to it count as held.
    """

    def __init__(self, has_events: bool = False) -> None:
        self.has_events = has_events
        self.size = BLOCK_SIZE
        self._keys: dict[Any, int] = {}
        self._media: dict[Any, int] = {}
        self._held: dict[int, int] = {}
        self._guesses: OrderedDict[int, float] = OrderedDict()
        self._sent: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Forgets all blocks."""
        for table in (self._keys, self._media, self._held, self._guesses, self._sent):
            table.clear()

    def matched(self, keys: Iterable[int], now: float) -> int:
        """Number of leading blocks of a prompt that the engine holds.

        Args:
            keys: From `chain`.
            now: Seconds of a clock that `guess` shares.
        """
        n = 0
        for key in keys:
            if key not in self._held and key not in self._sent and self._guesses.get(key, NEVER) < now:
                break
            n += 1
        return n

    def guess(self, keys: Iterable[int], now: float, is_told: bool = True) -> None:
        """Notes the blocks of a prompt that is sent to the engine.

        Args:
            keys: From `chain`.
            now: Seconds.
            is_told: Whether events can tell these blocks.
        """
        lasts = not (self.has_events and is_told)
        table = self._sent if lasts else self._guesses
        for key in keys:
            table[key] = now + GUESS_S
            table.move_to_end(key)
        while len(self._sent) > MAX_GUESSES:
            self._sent.popitem(last=False)
        while self._guesses and next(iter(self._guesses.values())) < now:
            self._guesses.popitem(last=False)

    def take(self, event: Mapping[str, Any]) -> None:
        """Follows one event of the engine, in the form of `llmpy.server.kv_events.maps`."""
        if event.get("group_idx"):  # layers that need less than the whole prefix
            return
        if event["type"] == "BlockStored":
            self._store(event)
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self._remove(name, _medium(event))
        elif event["type"] == "AllBlocksCleared":
            self.clear()

    def _store(self, event: Mapping[str, Any]) -> None:
        names, parent, ids = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
        extras = [extra or () for extra in event.get("extra_keys") or ()]
        extras += [()] * (len(names) - len(extras))
        key: int | None = None
        if ids:
            self.size = event.get("block_size") or self.size
            salt = extras[0][0] if extras[0] else None
            key = self._keys.get(parent) if parent is not None else root_of(salted(salt, event.get("lora_name")))
            if key is None:  # the block before it is not known
                return
            extras[0] = extras[0][1:] if parent is None else extras[0]
        for i, name in enumerate(names):
            self._media[name] = self._media.get(name, 0) | _medium(event)
            if key is None:
                continue
            (key,) = chain(ids[i * self.size : (i + 1) * self.size], self.size, key)
            if extras[i]:  # images, whose tokens do not tell them
                key = hash((key, repr(extras[i])))
            if self._keys.get(name) != key:
                self._forget(name)
                self._keys[name] = key
                self.hold(key)

    def _remove(self, name: Any, medium: int) -> None:
        left = self._media.get(name, 0) & ~medium
        if left:
            self._media[name] = left
        else:
            self._media.pop(name, None)
            self._forget(name)

    def _forget(self, name: Any) -> None:
        key = self._keys.pop(name, None)
        if key is not None:
            self.release(key)

    def hold(self, key: int) -> None:
        """Counts a block that the engine has stored."""
        self._held[key] = self._held.get(key, 0) + 1

    def release(self, key: int) -> None:
        """Counts a block that the engine has removed."""
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
