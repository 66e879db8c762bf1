"""Follows the KV events of an engine over ZeroMQ (extra `kvevents`), as `llmpy serve` and vLLM publish them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .prefixes import Blocks

REPLAY_S = 2.0
FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Places of the fields in events that are arrays."""
END = (1 << 64) - 1
"""Number behind the last batch of a replay: -1."""

decode = msgspec.msgpack.decode


def as_map(event: Any) -> dict[str, Any]:
    """An event by the names of its fields; engines send maps or arrays."""
    if isinstance(event, dict):
        return event
    return {"type": event[0], **dict(zip(FIELDS.get(event[0], ()), event[1:], strict=False))}


class Follower:
    """Keeps `blocks` like the cache of an engine.

    Args:
        blocks: What the engine's cache holds.
        address: Where it publishes.
        replay_address: Where it answers with batches that were missed; None = nowhere.
    """

    def __init__(self, blocks: Blocks, address: str, replay_address: str | None = None) -> None:
        self._blocks, self._address, self._replay_address = blocks, address, replay_address
        self._next, self._stamp = 0, 0.0
        self.num_events = 0
        self.num_gaps = 0

    async def run(self) -> None:
        """Follows the events until it is cancelled."""
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.connect(self._address)
            socket.subscribe(b"")
            await self._replay(context)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
        finally:
            context.destroy(linger=0)

    async def _take(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        stamp = decode(payload)[0]
        if number < self._next:
            if stamp <= self._stamp:  # a replay has brought this batch
                return
            self.forget()  # the engine has begun again
        if number > self._next:
            self.num_gaps += bool(self._next)
            await self._replay(context)
        if number >= self._next:
            if number > self._next:  # what was missed cannot be had
                self._blocks.clear()
            self._apply(number, payload)

    def forget(self) -> None:
        """Begins again with an empty cache."""
        self._blocks.clear()
        self._next = 0

    def _apply(self, number: int, payload: bytes) -> None:
        self._blocks.has_events = True
        self._next = number + 1
        self._stamp, events, *_ = decode(payload)
        for event in events:
            self.num_events += 1
            self._blocks.take(as_map(event))

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Asks for the batches from the next one on."""
        if self._replay_address is None:
            return
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_address)
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            async with asyncio.timeout(REPLAY_S):
                while True:
                    *_, number, payload = await socket.recv_multipart()
                    found = int.from_bytes(number, "big")
                    if found == END:
                        break
                    if found == self._next or (found > self._next and not len(self._blocks)):
                        self._apply(found, payload)
        except TimeoutError:
            pass
        finally:
            socket.close(linger=0)
