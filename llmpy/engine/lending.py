"""Pools of GPUs that engines of other processes of this host copy prompts from, over a local socket."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from .. import _core

    Ids = Sequence[int] | npt.NDArray[np.int32]

logger = logging.getLogger("llmpy")
MESSAGE_S = 5.0
"""Most seconds for a message."""
MOST_BYTES = 64 << 20
"""Most bytes of a question."""


def as_bytes(ids: Ids) -> bytes:
    """Ids as the core takes them."""
    import numpy

    return bytes(numpy.asarray(ids, "int32").tobytes())


def core_params(cache_salt: str | None) -> dict[str, Any]:
    """What the core needs for the keys of a prompt's blocks."""
    salt = {} if cache_salt is None else {"salt": cache_salt.encode("utf-8", "surrogatepass")}
    return {"seed": 0, **salt}


def _address(engine_id: str) -> str:
    """A name without a file: it goes with its socket."""
    return f"\0llmpy-pool-{engine_id}"


def _read(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("the other process has closed the connection")
        found += part
    return bytes(found)


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", given)[1]) == os.getuid()


class Lender:
    """Answers processes of this user that ask for prompts of one engine, one after the other, on a thread of its own.

    Args:
        thread: The engine's thread.
        engine_id: What handles name.
        fingerprint: What the bytes of a block depend on.
    """

    def __init__(self, thread: _core.EngineThread, engine_id: str, fingerprint: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(engine_id))
        self._listener.listen()
        # The thread holds no reference to the lender, so an engine that is dropped ends it.
        self._end = weakref.finalize(self, self._listener.shutdown, socket.SHUT_RDWR)
        work = threading.Thread(target=_serve, args=(self._listener, thread, fingerprint), name="llmpy-lend", daemon=True)
        work.start()

    def close(self) -> None:
        """Ends the thread."""
        self._end()


def _serve(listener: socket.socket, thread: _core.EngineThread, fingerprint: bytes) -> None:
    with listener:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                try:
                    _answer(connection, thread, fingerprint)
                except Exception as error:  # the reader finds the connection closed, and computes
                    logger.info("a prompt was not lent: %s", error)


def _answer(connection: socket.socket, thread: _core.EngineThread, fingerprint: bytes) -> None:
    connection.settimeout(MESSAGE_S)
    if not _is_own(connection):
        return
    size = int.from_bytes(_read(connection, 4), "little")
    if size > MOST_BYTES:
        return
    asked = json.loads(_read(connection, size))
    if asked["fingerprint"] == fingerprint.hex():
        thread.lend_prompt(connection.fileno(), as_bytes(asked["ids"]), core_params(asked["cache_salt"]))


def borrow(
    thread: _core.EngineThread, engine_id: str, fingerprint: bytes, ids: Ids, cache_salt: str | None
) -> int:
    """Copies a prompt's blocks out of the pool of another process.

    Args:
        thread: The engine's thread that gets them.
        engine_id: Of the engine that has computed them.
        fingerprint: Of the engine that gets them.
        ids, cache_salt: The prompt.

    Returns:
        Leading tokens whose blocks are there now.

    Raises:
        OSError: No process listens, or the process has died.
        LlmpyError: It does not lend them.
    """
    question = json.dumps({"fingerprint": fingerprint.hex(), "ids": list(map(int, ids)), "cache_salt": cache_salt}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(MESSAGE_S)
        connection.connect(_address(engine_id))
        connection.sendall(len(question).to_bytes(4, "little") + question)
        return thread.borrow_prompt(connection.fileno(), as_bytes(ids), core_params(cache_salt))
