"""Chooses the replica of a request."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ...distributed._beginnings import Owners, pieces

PIECE_TOKENS = 64
"""Tokens of one piece of a prompt; a replica is found by the whole pieces that prompts share."""
TOKEN_BYTES = 4
MAX_IMBALANCE = 16
"""A replica that has so many more unfinished samples than the least loaded gets no request for its cached beginning."""


class Router:
    """Sends a request to the replica that computed its longest beginning, or else to the replica with the least work.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._owners: Owners[int] = Owners()
        self._lock = threading.Lock()

    def choose(self, prompt: bytes, salt: bytes, loads: Mapping[int, int]) -> int:
        """The replica for a prompt.

        Args:
            prompt: Token ids as int32.
            salt: The request's cache salt; b"" = none.
            loads: Unfinished samples by replica; among equal loads the lowest number wins.
        """
        keys = pieces(prompt, PIECE_TOKENS * TOKEN_BYTES, salt)
        with self._lock:
            least = min(loads, key=lambda replica: (loads[replica], replica))
            owner = self._owners.find(keys, loads)
            chosen = least if owner is None or loads[owner] - loads[least] >= MAX_IMBALANCE else owner
            self._owners.note(keys, chosen)
        return chosen
