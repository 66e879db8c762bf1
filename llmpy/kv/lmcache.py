"""Blocks of the prefix cache in a server of LMCache: `python -m lmcache.v1.server HOST PORT`."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

from . import Connector

__all__ = ["LMCache"]

_REQUEST, _REPLY = struct.Struct("=9i150s"), struct.Struct("=9i")
_PUT, _GET, _EXIST, _SUCCESS, _BINARY, _UINT8 = 1, 2, 3, 200, 4, 6
_AT_ONCE = 64
"""Questions that are sent before the first answer is read; the server answers one after the other."""


class LMCache(Connector):
    """Keeps blocks in a server of LMCache, by the messages of its release 0.5.6; LMCache itself is needed at the server alone.

    Tried against the server that keeps bytes in its memory, which removes nothing. A block is one of LMCache's binary objects.
    So engines of llmpy find each other's blocks; those of vLLM have another layout and are not found. Nothing is encrypted.

    Args:
        address: "HOST:PORT".
        deadline_s: Most seconds for a message.
        most_bytes: Most bytes of a block that is believed.
    """

    def __init__(self, address: str, deadline_s: float = 5.0, most_bytes: int = 1 << 28) -> None:
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ValueError(f"address must be 'HOST:PORT', got {address!r}")
        self.place, self.deadline_s, self.most_bytes = (host.removeprefix("lm://"), int(port)), deadline_s, most_bytes
        self._sockets: dict[int, socket.socket] = {}  # by thread: loads and saves come from different ones

    @contextlib.contextmanager
    def _talk(self) -> Iterator[socket.socket]:
        """This thread's connection. It is closed if anything goes wrong, because it may be in the middle of a message."""
        thread = threading.get_ident()
        if thread not in self._sockets:
            self._sockets[thread] = socket.create_connection(self.place, timeout=self.deadline_s)
            self._sockets[thread].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield self._sockets[thread]
        except BaseException:
            self._sockets.pop(thread).close()
            raise

    def match(self, names: list[bytes]) -> list[bool]:
        found: list[bool] = []
        with self._talk() as server:
            for at in range(0, len(names), _AT_ONCE):
                some = names[at : at + _AT_ONCE]
                server.sendall(b"".join(_request(_EXIST, name) for name in some))
                found += [_reply(server)[0] for _ in some]
        return found

    def load(self, name: bytes) -> bytearray | None:
        with self._talk() as server:
            server.sendall(_request(_GET, name))
            has, n_bytes = _reply(server)
            if not 0 <= n_bytes <= self.most_bytes:
                raise ValueError(f"LMCache at {self.place[0]}:{self.place[1]} answered with {n_bytes} bytes")
            return _read(server, n_bytes) if has else None

    def save(self, name: bytes, data: bytes) -> None:
        with self._talk() as server:
            server.sendall(_request(_PUT, name, len(data)))
            server.sendall(data)


def _request(command: int, name: bytes, length: int = 0) -> bytes:
    key = f"llmpy-{name[:16].hex()}@1@0@{name[16:].hex()}@uint8"
    return _REQUEST.pack(command, length, _BINARY, _UINT8, 0, length, 0, 0, 0, key.encode().ljust(150))


def _read(server: socket.socket, n_bytes: int) -> bytearray:
    data = bytearray(n_bytes)
    view = memoryview(data)
    while view:
        n = server.recv_into(view)
        if not n:
            raise ConnectionError("LMCache has closed the connection")
        view = view[n:]
    return data


def _reply(server: socket.socket) -> tuple[bool, int]:
    """Whether the server has the block, and the number of its bytes."""
    fields: tuple[int, ...] = _REPLY.unpack(_read(server, _REPLY.size))
    return fields[0] == _SUCCESS, fields[1]
