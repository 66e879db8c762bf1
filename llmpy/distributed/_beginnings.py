"""Beginnings of prompts, and who has computed them: what a router needs to send a request to where its prefix is cached."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

FIELDS = ("model", "cache_salt", "tools", "system", "messages", "prompt", "input", "token_ids")
"""Fields of a request that its cached blocks depend on, in the order in which they come in a prompt."""
PIECE_BYTES = 512
MAX_PIECES = 128

Owner = TypeVar("Owner")


def beginnings(body: bytes) -> tuple[bytes, ...]:
    """Keys of the beginnings of a request's prompt, one for every 512 bytes, the shortest first.

    Args:
        body: JSON of a request in any of the server's protocols.

    Returns:
        Keys; two requests share as many of them as they share whole pieces. Nothing for what is no such request.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(fields, dict):
        return ()
    text = b"".join(msgspec.json.encode(fields[name]) for name in FIELDS if name in fields)
    chain, keys = hashlib.blake2b(digest_size=8), []
    for piece in range(min(len(text) // PIECE_BYTES, MAX_PIECES)):
        chain.update(text[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES])
        keys.append(chain.digest())
    return tuple(keys)


class Owners(Generic[Owner]):
    """Who computed a beginning last. The beginnings that nobody asked for longest are forgotten.

    Args:
        most: Beginnings that are remembered.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        self._most = most
        self._owners: OrderedDict[bytes, Owner] = OrderedDict()

    def note(self, keys: Iterable[bytes], owner: Owner) -> None:
        """Remembers who computes these beginnings."""
        for key in keys:
            self._owners[key] = owner
            self._owners.move_to_end(key)
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def find(self, keys: Sequence[bytes], among: Container[Owner]) -> Owner | None:
        """Who of those given computed the longest of these beginnings; None = nobody computed any."""
        for key in reversed(keys):
            owner = self._owners.get(key)
            if owner is not None and owner in among:
                return owner
        return None
