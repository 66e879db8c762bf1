"""Prefixes of prompts and the replicas that computed them, so that a router can send a request to its cached prefix."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Generic, TypeVar

FIELDS = ("model", "cache_salt", "tools", "system", "messages", "prompt", "input", "token_ids")
"""Fields of a request that determine its cached blocks, in the order of their appearance in a prompt."""
PIECE_BYTES = 512
MAX_PIECES = 128

Owner = TypeVar("Owner")


def beginnings(body: bytes) -> tuple[bytes, ...]:
    """Keys of the prefixes of a request's prompt, one for every 512 bytes, the shortest first.

    Args:
        body: JSON of a request in any of the server's protocols.

    Returns:
        Keys; two requests share one key for each shared piece of 512 bytes. Empty if the body is not such a request.
    """
    import msgspec  # of the extra "server"; replicas of one process do without it

    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(fields, dict):
        return ()
    text = b"".join(msgspec.json.encode(fields[name]) for name in FIELDS if name in fields)
    return pieces(text, PIECE_BYTES)


def pieces(prompt: bytes, piece_bytes: int, salt: bytes = b"") -> tuple[bytes, ...]:
    """Keys of the prefixes of a prompt, one for every whole piece, the shortest first; at most 128.

    Args:
        prompt: The bytes of the prompt.
        piece_bytes: Bytes of one piece.
        salt: Prompts with unlike salts share no key.
    """
    chain, keys = hashlib.blake2b(salt, digest_size=8), []
    for piece in range(min(len(prompt) // piece_bytes, MAX_PIECES)):
        chain.update(prompt[piece * piece_bytes : (piece + 1) * piece_bytes])
        keys.append(chain.digest())
    return tuple(keys)


class Owners(Generic[Owner]):
    """Maps a prefix to the owner that computed it last. The least recently used prefixes are dropped.

    Args:
        most: Most prefixes.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        self._most = most
        self._owners: OrderedDict[bytes, Owner] = OrderedDict()

    def note(self, keys: Iterable[bytes], owner: Owner) -> None:
        """Records that `owner` computes these prefixes."""
        for key in keys:
            self._owners[key] = owner
            self._owners.move_to_end(key)
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def find(self, keys: Sequence[bytes], among: Container[Owner]) -> Owner | None:
        """The owner in `among` that computed the longest of these prefixes; None = no owner in `among` computed one."""
        for key in reversed(keys):
            owner = self._owners.get(key)
            if owner is not None and owner in among:
                return owner
        return None
