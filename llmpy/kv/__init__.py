"""Stores for blocks of the prefix cache outside the engine: what a connector has to do, and one that keeps blocks in memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["Connector", "Memory"]


class Connector(ABC):
    """A store behind the cache in host memory: `LLM(..., kv_connector=store)`.

    The engine calls the methods from two threads of its own, one loads and one saves, never inside a step. A method that
    raises, or answers in the wrong form, costs a computation and is counted in `stats().disk_errors`. Behind a call that takes
    longer than `deadline_s` nobody waits. What `load` gives must be the bytes that were saved under this name: the engine
    cannot tell.

    A name has 34 bytes: 16 that stand for weights, program, types and device, 16 of the block's key, and 2 of its group. Keys
    are the same in engines with the same `prefix_cache_seed`. One connector may serve several engines at a time.
    """

    deadline_s: float = 10.0

    @abstractmethod
    def match(self, names: list[bytes]) -> Sequence[bool]:
        """Whether the store has each of the blocks.

        Args:
            names: Names of blocks; those of one group follow each other from the beginning of a prompt on.

        Returns:
            As many truth values.
        """

    @abstractmethod
    def load(self, name: bytes) -> bytes | bytearray | memoryview | None:
        """The bytes of a block; None = it is not there."""

    @abstractmethod
    def save(self, name: bytes, data: bytes) -> None:
        """Keeps a block.

        Args:
            name: Its name.
            data: Its bytes.
        """

    def clear(self, fingerprint: bytes) -> None:  # noqa: B027
        """Removes blocks, because somebody has reset the prefix cache. By default nothing is removed.

        Args:
            fingerprint: The first 16 bytes of their names.
        """


class Memory(Connector):
    """Keeps blocks in this process's memory, for several engines of one process or for later ones.

    Args:
        limit: Most bytes of the blocks; those that were used least recently go first.
    """

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"limit must be above 0, got {limit}")
        self.limit = limit
        self.used = 0
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, names: list[bytes]) -> list[bool]:
        with self._lock:
            return [name in self._blocks for name in names]

    def load(self, name: bytes) -> bytes | None:
        with self._lock:
            if name in self._blocks:
                self._blocks.move_to_end(name)
            return self._blocks.get(name)

    def save(self, name: bytes, data: bytes) -> None:
        with self._lock:
            self.used += len(data) - len(self._blocks.pop(name, b""))
            self._blocks[name] = data
            while self.used > self.limit:
                self.used -= len(self._blocks.popitem(last=False)[1])

    def clear(self, fingerprint: bytes) -> None:
        with self._lock:
            for name in [name for name in self._blocks if name.startswith(fingerprint)]:
                self.used -= len(self._blocks.pop(name))

