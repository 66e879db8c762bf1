"""The trainer's side of a weight group."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core, hardware
from ..errors import DeviceError
from ..options import parse_size
from ..weights.buckets import NamedTensors, dtype_name, host_bytes, named, num_bytes
from ..weights.group import ID_KEY, MAX_BUFFERS, SENDER_KEY, TCP_ID, Deadline, NcclChannel, find_nccl, packed, update_key
from ..weights.tcp_store import StoreServer

if TYPE_CHECKING:
    from typing import Self

Metadata = Sequence[tuple[str, str, Sequence[int]]]
"""Name, type and shape of every tensor."""


class SendReport(NamedTuple):
    """Statistics of `WeightSender.send`."""

    num_tensors: int
    num_bytes: int
    seconds: float


def weight_metadata(tensors: NamedTensors) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, types and shapes of tensors, as arguments of `receive`.

    Args:
        tensors: Mapping or iterable of (name, tensor).

    Returns:
        Three lists: names, types, shapes.
    """
    pairs = named(tensors)
    return [name for name, _ in pairs], [dtype_name(t) for _, t in pairs], [list(t.shape) for _, t in pairs]


class WeightSender:
    """Rank 0 of a weight group: starts the store, waits for the engines, and broadcasts weights to them.

    Args:
        master_address, master_port: Address of the store; the engines need the same. Port 0: any free port, which
            `.master_port` then returns.
        world_size: Number of ranks: this one and one per engine.
        device: "cuda:N" sends over NCCL from that device, "cpu" over TCP; None: torch's current CUDA device, or "cpu".
        timeout: Most seconds to wait for the engines.
        buffer_bytes, num_buffers: Size and number of the packing buffers; must equal the engines' values.

    Raises:
        DeviceError: NCCL is missing.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        *,
        device: object = None,
        timeout: float = 300.0,
        buffer_bytes: int | str = "1GiB",
        num_buffers: int = 2,
    ) -> None:
        if world_size < 2 or not 1 <= num_buffers <= MAX_BUFFERS:
            message = f"wanted a world_size of 2 or more and 1 to {MAX_BUFFERS} buffers, have {world_size}, {num_buffers}"
            raise ValueError(message)
        self.world_size, self.timeout = world_size, timeout
        self.buffer_bytes, self.num_buffers = parse_size("buffer_bytes", buffer_bytes), num_buffers
        self.device = _device_name(device)
        self._num_updates = 0
        self._channel: _TcpSender | _NcclSender | None = None
        self._id = _core.nccl_id(hardware.library(self.device), find_nccl()) if hardware.ordinal(self.device) >= 0 else b""
        self._listener = None if self._id else socket.create_server((master_address, 0), family=_family(master_address))
        self._store = StoreServer(master_address, master_port)
        self.master_port = self._store.port
        self._store.set(SENDER_KEY, b"1")
        if self._listener is not None:
            port = self._listener.getsockname()[1]
            self._store.set(ID_KEY, TCP_ID + f"{master_address} {port}".encode())
        else:
            self._store.set(ID_KEY, self._id)

    def connect(self) -> None:
        """Waits until all engines have joined; the first `send` does this if needed.

        Raises:
            DeviceError: The engines have not joined within `timeout`.
        """
        if self._channel is not None:
            return
        deadline = self._deadline()
        if self._listener is not None:
            self._channel = _TcpSender(self._listener, self.world_size - 1, deadline)
        else:
            self._channel = _NcclSender(self.device, self._id, self.world_size, self.num_buffers, deadline)

    def send(self, tensors: NamedTensors, metadata: Metadata | None = None) -> SendReport:
        """Broadcasts tensors, in order, to engines that call `update_weights(group)` or `receive(group, ...)`.

        Args:
            tensors: Mapping or iterable of (checkpoint name, tensor): torch tensors (on any device), or NumPy arrays if the
                group is on the CPU.
            metadata: (name, type, shape) of all tensors, if `tensors` makes them one by one; None: the tensors are collected
                first.

            Returns:
                Number of tensors, bytes, and seconds.

            Raises:
                DeviceError: An engine has disconnected, or has not answered within `timeout`. The group has ended.
        """
        start = time.monotonic()
        pairs: Iterable[tuple[str, Any]] = named(tensors) if metadata is None else _named_one_by_one(tensors)
        if metadata is None:
            names, dtypes, shapes = weight_metadata(pairs)
            metadata = list(zip(names, dtypes, shapes, strict=True))
        coming = [(name, str(dtype).removeprefix("torch."), list(shape)) for name, dtype, shape in metadata]
        sizes = [num_bytes(dtype, shape) for _, dtype, shape in coming]
        try:
            self.connect()
            assert self._channel is not None
            announced = {"tensors": coming, "buffer_bytes": self.buffer_bytes}
            self._store.set(update_key(self._num_updates), json.dumps(announced).encode())
            self._num_updates += 1
            chunks = packed(sizes, self.buffer_bytes)
            self._channel.send(_checked(pairs, coming), sizes, chunks, self._deadline())
        except BaseException:
            self.close()
            raise
        return SendReport(len(sizes), sum(sizes), time.monotonic() - start)

    def _deadline(self) -> Deadline:
        return Deadline(self.timeout, "an engine", self._has_lost_one)

    def _has_lost_one(self) -> bool:
        """Whether an engine has left the store. Over TCP this is False: each engine's data connection reports its failure, and
        another engine may have left regularly."""
        return self._store.num_lost > 0 and not isinstance(self._channel, _TcpSender)

    def close(self) -> None:
        """Ends the group. Waiting engines get an error."""
        if self._channel is not None:
            self._channel.close()
        if self._listener is not None:
            self._listener.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


def _device_name(device: object) -> str:
    """ "cpu" or "cuda:N"."""
    torch = sys.modules.get("torch")
    if device is None:
        device = "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
    name = str(device)
    if name == "cuda":
        name = f"cuda:{torch.cuda.current_device()}" if torch is not None else "cuda:0"
    if name != "cpu" and not name.startswith("cuda:"):
        raise ValueError(f"device must be 'cpu' or 'cuda:N', got {device!r}")
    return name


def _named_one_by_one(tensors: NamedTensors) -> Iterator[tuple[str, Any]]:
    for pair in tensors.items() if hasattr(tensors, "items") else tensors:
        yield named([pair])[0]


def _checked(pairs: Iterable[tuple[str, Any]], metadata: Sequence[tuple[str, str, list[int]]]) -> Iterator[Any]:
    """Yields the tensors; raises if one differs from its metadata."""
    iterator = iter(pairs)
    for expected in metadata:
        name, tensor = next(iterator, ("nothing", None))
        if tensor is None or (name, dtype_name(tensor), list(tensor.shape)) != expected:
            raise ValueError(f"send: wanted {expected}, have {name!r}; metadata and tensors differ")
        yield tensor


class _TcpSender:
    """Sends every broadcast to each engine in turn, over TCP."""

    def __init__(self, listener: socket.socket, n_engines: int, deadline: Deadline) -> None:
        self._connections: list[socket.socket] = []
        try:
            while len(self._connections) < n_engines:
                listener.settimeout(min(deadline.left(), 0.1))
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    self._connections.append(connection)
                    connection.settimeout(deadline.left())
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.recv(4, socket.MSG_WAITALL)
        except BaseException:
            self.close()
            raise

    def send(self, tensors: Iterator[Any], sizes: Sequence[int], chunks: Sequence[range], deadline: Deadline) -> None:
        for chunk in chunks:
            header = struct.pack("=Q", sum(sizes[i] for i in chunk))
            for i in [-1, *chunk]:
                part = header if i < 0 else host_bytes(next(tensors))
                for connection in self._connections:
                    connection.settimeout(deadline.left())
                    try:
                        connection.sendall(part)
                    except OSError as error:
                        deadline.fail("has not answered in time" if isinstance(error, TimeoutError) else "has gone")
        for connection in self._connections:
            connection.settimeout(deadline.left())
            try:
                has_all = connection.recv(1) == b"\1"
            except OSError as error:
                deadline.fail("has not answered in time" if isinstance(error, TimeoutError) else "has gone")
            if not has_all:
                deadline.fail("has gone")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _NcclSender:
    """Packs tensors into torch buffers; packs the next buffer while one is broadcast."""

    def __init__(self, device: str, id: bytes, world_size: int, n_buffers: int, deadline: Deadline) -> None:
        self._torch = sys.modules.get("torch")
        if self._torch is None:
            raise DeviceError("WeightSender: wanted torch, whose CUDA tensors are sent, have none; import it first")
        self._device, self._n_buffers = device, n_buffers
        self._channel = NcclChannel(device, id, 0, world_size, deadline)
        self._buffers: list[Any] = [None] * n_buffers

    def send(self, tensors: Iterator[Any], sizes: Sequence[int], chunks: Sequence[range], deadline: Deadline) -> None:
        torch: Any = self._torch
        most = max((sum(sizes[i] for i in chunk) for chunk in chunks), default=0)
        with torch.cuda.device(self._device):
            for slot in range(min(self._n_buffers, len(chunks))):  # allocate all before the first broadcast
                if self._buffers[slot] is None or self._buffers[slot].numel() < most:
                    self._buffers[slot] = torch.empty(most, dtype=torch.uint8, device=self._device)
            for turn, chunk in enumerate(chunks):
                slot = turn % self._n_buffers
                if turn >= self._n_buffers:
                    self._channel.wait(slot, deadline)
                at = 0
                for i in chunk:
                    tensor = next(tensors)
                    part = self._buffers[slot][at : at + sizes[i]]
                    part.copy_(tensor.to(self._device).contiguous().reshape(-1).view(torch.uint8))
                    at += sizes[i]
                torch.cuda.current_stream().synchronize()
                self._channel.broadcast(slot, self._buffers[slot].data_ptr(), at, deadline)
            for turn in range(max(0, len(chunks) - self._n_buffers), len(chunks)):
                self._channel.wait(turn % self._n_buffers, deadline)

    def close(self) -> None:
        self._channel.close()
