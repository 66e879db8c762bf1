"""A key-value store over TCP with the protocol of torch.distributed's TCPStore, so that either side may be torch's.

A message is one command byte and its arguments. Numbers are little-endian. An eight-byte length precedes each text and value.
Keys begin with "/", except the key that counts the joined members.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from contextlib import suppress

from ..errors import DeviceError

_VALIDATE, _SET, _GET, _ADD, _CHECK, _WAIT, _DELETE, _CANCEL, _PING = 0, 1, 3, 4, 5, 6, 8, 12, 13
_MAGIC = 0x3C85F7CE
_JOINED = "init/"
_DONE, _CANCELLED = b"\0", b"\1"
MAX_KEY_BYTES = 4096
MAX_MEMBER_BYTES = 64 << 10
"""Longest value that a member may store; ids and addresses take a few hundred bytes."""
MAX_VALUE_BYTES = 16 << 20
"""Longest value that a client accepts; the announcement of an update has every tensor's name and shape."""
MAX_KEYS = 4096
"""Keys beyond which a member may not add another."""
MAX_CONNECTIONS = 4096
RETRY_S = 0.05
"""Seconds before the store accepts connections again after an error such as a lack of descriptors."""
logger = logging.getLogger("llmpy")


def _bytes(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    parts = []
    while n_bytes:
        part = connection.recv(min(n_bytes, 1 << 20))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _receive_value(connection: socket.socket, most_bytes: int) -> bytes:
    (n_bytes,) = struct.unpack("=Q", _receive(connection, 8))
    if n_bytes > most_bytes:
        raise ConnectionError(f"store: wanted at most {most_bytes} bytes, have {n_bytes}")
    return _receive(connection, n_bytes)


def is_gone(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    try:
        return _has_input(connection) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _has_input(connection: socket.socket) -> bool:
    """Whether a read would return at once. Does not wait for the socket's timeout, as a read would."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class StoreClient:
    """A member's connection to the store.

    Args:
        host, port: Address of the store; the store may start later.
        timeout: Seconds to wait for the store.

    Raises:
        DeviceError: The store does not answer in time.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            try:
                self.connection = socket.create_connection((host, port), max(end - time.monotonic(), 0.01))
                break
            except OSError as error:
                if time.monotonic() + 0.1 > end:
                    message = f"weight group: wanted a store at {host}:{port} within {timeout:g} s, have none ({error})"
                    raise DeviceError(message, operation="init_weight_group") from error
                time.sleep(0.1)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(timeout)
        try:
            self._send(_VALIDATE, struct.pack("=I", _MAGIC))
            self._send(_ADD, _bytes(_JOINED.encode()) + struct.pack("=q", 1))
            _receive(self.connection, 8)
        except OSError as error:
            self.close()
            message = f"weight group: {host}:{port} is no store ({error})"
            raise DeviceError(message, operation="init_weight_group") from error

    def _send(self, command: int, arguments: bytes) -> None:
        self.connection.sendall(bytes([command]) + arguments)

    def set(self, key: str, value: bytes) -> None:
        """Stores a value."""
        self._send(_SET, _bytes(b"/" + key.encode()) + _bytes(value))

    def has(self, key: str) -> bool:
        """Whether a key has a value."""
        self._send(_CHECK, struct.pack("=Q", 1) + _bytes(b"/" + key.encode()))
        return _receive(self.connection, 1) == _DONE

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a key's value. After a TimeoutError only `close` may be called."""
        name = _bytes(b"/" + key.encode())
        self.connection.settimeout(max(timeout, 0.001))
        self._send(_WAIT, struct.pack("=Q", 1) + name)
        if _receive(self.connection, 1) != _DONE:
            raise ConnectionError("the store has ended the wait")
        self._send(_GET, name)
        return _receive_value(self.connection, MAX_VALUE_BYTES)

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()


class StoreServer:
    """The store. It runs on its own threads.

    Args:
        host, port: Address to listen on; port 0: any free port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.create_server((host, port), family=_family(host, port))
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self.num_lost = 0
        """Number of members that have disconnected."""
        try:
            threading.Thread(target=self._accept, name="llmpy-store", daemon=True).start()
        except BaseException:
            self._listener.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        """Stores a value."""
        with self._changed:
            self._values[b"/" + key.encode()] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all connections."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
                self._admit(connection)
            except BaseException as error:
                if not self._is_closed:
                    logger.warning("weight group: the store could not take a connection (%s)", error)
                    time.sleep(RETRY_S)

    def _admit(self, connection: socket.socket) -> None:
        """Serves a connection on a thread, or closes it."""
        try:
            with self._changed:
                if len(self._connections) >= MAX_CONNECTIONS:
                    raise ConnectionError(f"wanted at most {MAX_CONNECTIONS} connections")
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="llmpy-store", daemon=True).start()
        except BaseException:
            connection.close()
            self._connections.discard(connection)
            raise

    def _serve(self, connection: socket.socket) -> None:
        has_joined = False
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, 5) == bytes([_VALIDATE]) + struct.pack("=I", _MAGIC):
                while command := connection.recv(1):
                    has_joined |= self._answer(connection, command[0])
        except OSError:
            pass  # the member has disconnected, or the store was closed
        except BaseException as error:
            logger.warning("weight group: a member's message failed (%s: %s)", type(error).__name__, error)
        finally:
            connection.close()
            with self._changed:
                self._connections.discard(connection)
                self.num_lost += has_joined

    def _answer(self, connection: socket.socket, command: int) -> bool:
        """Answers one message. Returns whether the message was from a member that joins."""
        if command == _PING:
            connection.sendall(_receive(connection, 4))
        elif command in (_WAIT, _CHECK):
            (n_keys,) = struct.unpack("=Q", _receive(connection, 8))
            keys = [_receive_value(connection, MAX_KEY_BYTES) for _ in range(min(n_keys, 1024))]
            connection.sendall(self._wait(connection, keys) if command == _WAIT else bytes([not self._has(keys)]))
        elif command in (_SET, _GET, _ADD, _DELETE):
            key = _receive_value(connection, MAX_KEY_BYTES)
            value = _receive(connection, 8) if command == _ADD else b""
            if command == _SET:
                value = _receive_value(connection, MAX_MEMBER_BYTES)
            connection.sendall(self._change(command, key, value))
            return key == _JOINED.encode() and command == _ADD
        else:
            raise ConnectionError(f"command {command}")
        return False

    def _change(self, command: int, key: bytes, value: bytes) -> bytes:
        """The answer to a command about one key."""
        with self._changed:
            if command == _GET:
                return _bytes(self._values.get(key, b""))
            if command == _DELETE:
                return struct.pack("=q", self._values.pop(key, None) is not None)
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise ConnectionError(f"store: wanted at most {MAX_KEYS} keys")
            if command == _SET:
                self._values[key] = value
                answer = b""
            else:
                number = int(self._values.get(key, b"0")) + struct.unpack("=q", value)[0]
                self._values[key] = str(number).encode()
                answer = struct.pack("=q", number)
            self._changed.notify_all()
            return answer

    def _has(self, keys: list[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _wait(self, connection: socket.socket, keys: list[bytes]) -> bytes:
        """Waits until all keys have values or the client gives up."""
        while True:
            with self._changed:
                if self._has(keys) or (self._changed.wait(0.05) and self._has(keys)):
                    return _DONE
            if _has_input(connection):
                if connection.recv(1) != bytes([_CANCEL]):
                    raise ConnectionError("gone while waiting")
                return _CANCELLED


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
