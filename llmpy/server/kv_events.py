"""Events of the prefix cache over ZeroMQ (extra `kvevents`): routers send a prompt to the server that has cached its prefix."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from ..async_engine import AsyncEngine
from ..errors import ConfigError, EngineClosedError
from ..outputs import KvEvent
from .errors import log

CAPACITY = 65536
"""Most unread events in the engine's ring."""
KEPT = 10_000
"""Number of batches kept for readers that request missed ones."""
POLL_MS = 10
BINDING = ("*", "0.0.0.0", "[::]", "lo")
MEDIUM, HOST_MEDIUM = "GPU", "CPU"
"""Name of the device's pool on every device, and of host memory."""

encode = msgspec.msgpack.encode


def attach(socket: zmq.Socket[bytes], address: str) -> None:
    """Binds an address of this machine (wildcard hosts, `lo`, ipc, inproc); connects to any other address.

    Raises:
        ConfigError: ZeroMQ refuses the address.
    """
    try:
        if binds(address):
            socket.bind(address.replace("://lo:", "://127.0.0.1:"))
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"{address}: {error}; --kv-events-address, e.g. tcp://lo:5557", option="kv_events_address") from None


def binds(address: str) -> bool:
    """Whether `attach` binds an address."""
    kind, _, rest = address.partition("://")
    return kind in ("ipc", "inproc") or rest.rpartition(":")[0] in BINDING


def is_open(address: str) -> bool:
    """Whether other machines can connect to a bound address. ZeroMQ does not authenticate readers."""
    kind, _, rest = address.partition("://")
    return kind == "tcp" and rest.rpartition(":")[0] in BINDING[:-1]


def check_addresses(*addresses: str | None) -> None:
    """Binds and releases the publisher's addresses, so that a wrong address fails before the model loads.

    Raises:
        ConfigError: ZeroMQ refuses an address.
    """
    with zmq.Context() as context:
        for address in filter(None, addresses):
            with context.socket(zmq.PUB) as socket:
                attach(socket, address)


def maps(events: list[KvEvent], block_size: int) -> list[dict[str, Any]]:
    """Events as maps for routers; consecutive blocks of one chain are merged into one event."""
    made: list[dict[str, Any]] = []
    for event in events:
        last = made[-1] if made and made[-1].get("medium") == MEDIUM else {}
        group = {"group_idx": event.group} if event.group else {}
        if event.kind == 0:
            ids = np.frombuffer(event.token_ids, np.int32).tolist()
            extra = [event.salt.decode(errors="replace")] if event.salt else []
            extra += [event.images[at : at + 16].hex() for at in range(0, len(event.images), 16)]
            follows = last.get("type") == "BlockStored" and last["block_hashes"][-1] == event.parent
            if follows and last.get("group_idx", 0) == event.group:
                last["block_hashes"].append(event.hash)
                last["token_ids"] += ids
                if "extra_keys" in last or extra:
                    last.setdefault("extra_keys", [None] * (len(last["block_hashes"]) - 1)).append(extra or None)
                continue
            stored = {"type": "BlockStored", "block_hashes": [event.hash], "parent_block_hash": event.parent, "token_ids": ids}
            lora = event.lora_request
            number, name = (None, None) if lora is None else (lora.adapter_id, lora.name)
            stored |= {"block_size": block_size, "lora_id": number, "medium": MEDIUM, "lora_name": name}
            keys = {"extra_keys": [extra]} if extra else {}
            made.append({**stored, **keys, **group})
        elif event.kind == 1:
            made.append({"type": "BlockRemoved", "block_hashes": [event.hash], "medium": MEDIUM, **group})
        elif event.kind == 3:
            stored = {"type": "BlockStored", "block_hashes": [event.hash], "parent_block_hash": None, "token_ids": []}
            stored |= {"block_size": block_size, "lora_id": None, "medium": HOST_MEDIUM, "lora_name": None}
            made.append({**stored, **group})
        elif event.kind == 4:
            made.append({"type": "BlockRemoved", "block_hashes": [event.hash], "medium": HOST_MEDIUM, **group})
        else:
            made.append({"type": "AllBlocksCleared"})
    return made


def arrays(events: list[dict[str, Any]]) -> list[list[Any]]:
    """Events as arrays, for routers older than mid-2026."""
    names = {
        "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }
    return [[event["type"], *(event[name] for name in names[event["type"]])] for event in events]


class KvEventPublisher:
    """A thread that reads an engine's events and publishes them in batches.

    Args:
        engine: An engine with `kv_event_capacity`.
        topic: `kv@<host>[:port]@<model>`.
        address: Address to publish at; see `attach`.
        replay_address: Address where readers request missed batches; None = no replay.
        style: Form of the events: "map" or "array".
    """

    def __init__(
        self,
        engine: AsyncEngine,
        topic: str,
        address: str,
        replay_address: str | None = None,
        style: Literal["map", "array"] = "map",
    ) -> None:
        self._engine, self._topic, self._style = engine, topic.encode(), style
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._next = self._sequence = 0
        self._ends = threading.Event()
        try:
            attach(self._publish, address)
            self._replay.set_hwm(KEPT + 1)  # a ROUTER drops messages beyond it; + 1 for the end marker
            if replay_address is not None:
                attach(self._replay, replay_address)
            self._thread = threading.Thread(target=self._run, name="llmpy-kv-events", daemon=True)
            self._thread.start()
        except BaseException:
            self._context.destroy(0)
            raise

    def close(self) -> None:
        """Publishes the remaining events and ends the thread; call it before the engine is closed."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(EngineClosedError):
            while not self._ends.is_set():
                self._publish_some()
            self._drain()
        self._context.destroy(linger=1000)

    def _publish_some(self) -> None:
        """Answers one replay request and publishes all events. An error loses one batch; readers see a gap in the numbers."""
        try:
            if self._replay.poll(POLL_MS):
                self._answer(self._replay.recv_multipart())
            while self._drain():
                pass
        except EngineClosedError:
            raise
        except BaseException:
            self._sequence += 1
            with contextlib.suppress(BaseException):
                log.exception("KV events: a batch is lost")
            time.sleep(POLL_MS / 1000)

    def _drain(self) -> bool:
        """Publishes what there is, in one batch for consecutive events of a replica; returns whether there was anything."""
        start, (self._next, events) = self._next, self._engine.kv_events(self._next)
        if not events:
            return False
        if events[0].number != start:  # events were overwritten: skip a number, so that readers see a gap
            self._sequence += 1
        for replica, own in groupby(events, attrgetter("replica")):
            self._send(replica, list(own))
        return True

    def _send(self, replica: int, events: list[KvEvent]) -> None:
        """Publishes one batch. Its third field is the cache, as vLLM's `data_parallel_rank`, where there are several."""
        config = self._engine.config
        found = maps(events, config.block_size)
        rank = [replica] if config.data_parallel_size > 1 or config.enable_dp_attention else []
        payload = encode([time.time(), found if self._style == "map" else arrays(found), *rank])
        self._publish.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
        self._kept.append((self._sequence, payload))
        self._sequence += 1

    def _answer(self, frames: list[bytes]) -> None:
        """Sends the batches from a sequence number on, then an end marker."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        who, start = frames[:2], int.from_bytes(frames[2], "big")
        for sequence, payload in list(self._kept):
            if sequence >= start:
                self._replay.send_multipart([*who, sequence.to_bytes(8, "big"), payload])
        self._replay.send_multipart([*who, (-1).to_bytes(8, "big", signed=True), b""])
