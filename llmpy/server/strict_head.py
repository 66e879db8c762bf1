"""Refuses bare line feeds in request heads if uvicorn parses them with h11; httptools refuses them itself."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BARE = re.compile(rb"(?<!\r)\n")


def strict(protocol: type[asyncio.Protocol]) -> Any:
    """A uvicorn protocol that refuses heads with bare line feeds; the httptools protocol needs no change."""
    return Strict if protocol is H11Protocol else protocol


class Strict(H11Protocol):
    """One connection."""

    def handle_events(self) -> None:
        """Checks the next head, then continues as h11 does."""
        if self.conn.their_state is h11.IDLE and BARE.search(self.conn.trailing_data[0].partition(b"\r\n\r\n")[0]):
            self.send_400_response("wanted lines that end with CR LF")
            return
        super().handle_events()
