"""Receives weights that a trainer broadcasts: an engine joins the trainer's group, gets a list of tensors, then packets.

The trainer is rank 0. A store at its address (with the protocol of torch's TCPStore) holds the id of an NCCL group, as
between vLLM and its trainers, or the address of a plain TCP socket. The trainer appends tensors to a packet until the total
exceeds the buffer size (the last tensor is included) and sends the packet as bytes. While one packet is copied into the
weights, the next is received.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import pickletools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .. import _core, hardware
from ..checks import as_float, as_int
from ..engine.cores import check_one_device
from ..engine.jobs import beside
from ..errors import DeviceError, InvalidRequestError, UnsupportedError, WeightUpdateError
from ..options import parse_size
from .buckets import ITEM_BYTES, MemoryTensor, MemoryUpdate, num_bytes
from .tcp_store import StoreClient, is_gone

if TYPE_CHECKING:
    import numpy

    from ..config import EngineConfig
    from .calls import Weights

ID_KEY = "broadcast_from/0/0"
"""Store key of the NCCL group's id; vLLM's trainers use the same key."""
SENDER_KEY = "llmpy/sender"
"""Store key that a llmpy.rl.WeightSender sets; such a trainer also announces the tensors of an update."""
TCP_ID = b"llmpy tcp "
MAX_BUFFERS = 7
"""The core's number of slots minus one; the last slot is for aligned copies."""
_ID_BYTES = 128
_SLICE_S = 0.1
"""Seconds of one piece of a wait. Between pieces Ctrl-C and a lost peer are noticed."""


def update_key(number: int) -> str:
    """Store key of a WeightSender's announcement of an update."""
    return f"llmpy/update/{number}"


def packed(sizes: Sequence[int], buffer_bytes: int) -> list[range]:
    """Packs tensors: each range of tensor indices is one broadcast."""
    found, first, total = [], 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total > buffer_bytes:
            found.append(range(first, i + 1))
            first, total = i + 1, 0
    if first < len(sizes):
        found.append(range(first, len(sizes)))
    return found


class Deadline:
    """The end of a wait.

    Args:
        seconds: Seconds from now.
        what: Name of the awaited peer in the error.
        gone: Returns whether the peer has gone.
    """

    def __init__(self, seconds: float, what: str, gone: Callable[[], bool]) -> None:
        self.seconds, self.what, self._gone = seconds, what, gone
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline.

        Raises:
            DeviceError: The deadline has passed, or the peer has gone.
        """
        if self._gone():
            self.fail("has gone")
        left = self._end - time.monotonic()
        if left <= 0:
            self.fail(f"has not answered within {self.seconds:g} s (timeout=)")
        return left

    def until(self, step: Callable[[float], bool]) -> None:
        """Calls `step` with a piece of time until it returns True."""
        while not step(min(self.left(), _SLICE_S)):
            pass

    def fail(self, why: str) -> NoReturn:
        """Raises the error."""
        raise DeviceError(f"weight group: {self.what} {why}; the group has ended, make another", operation="receive")


class Channel(Protocol):
    """A connection that brings bytes from the trainer."""

    on_device: bool

    def reserve(self, n_slots: int, n_bytes: int, n_copied: int) -> None:
        """Allocates the memory of an update, for packets and aligned copies, before any broadcast is started."""

    def start(self, slot: int, n_bytes: int, deadline: Deadline) -> None:
        """Starts to receive the next broadcast into a slot's buffer."""

    def wait(self, slot: int, deadline: Deadline) -> int:
        """Waits until the slot's buffer is full and returns its address."""

    def aligned(self, address: int, n_bytes: int) -> int:
        """Copies bytes of a buffer to an aligned address and returns it; valid until the next call."""

    def finish(self) -> None:
        """Ends an update after all of its packets have arrived."""

    def close(self) -> None:
        """Closes the connection."""


class NcclChannel:
    """Broadcasts over NCCL, from and to memory of one device.

    Args:
        device: "cuda:N".
        id: The group's id, 128 bytes made by rank 0.
        rank, world_size: Rank of this process and number of ranks.
        deadline: Time limit for all ranks to join.
    """

    on_device = True

    def __init__(self, device: str, id: bytes, rank: int, world_size: int, deadline: Deadline) -> None:
        self._group = _core.NcclGroup(device, hardware.library(device), find_nccl(), id, rank, world_size)
        self._lock = threading.Lock()  # another thread may close the group between two waits, not during one
        self._is_closing = False
        self._addresses = [0] * MAX_BUFFERS
        try:
            self._settle(deadline)
            self._group.greet()
            self._settle(deadline)
            self.wait(0, deadline)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._is_closing:
                message = "weight group: the group has ended; make another with init_weight_group()"
                raise DeviceError(message, operation="receive")
            yield

    def _settle(self, deadline: Deadline) -> None:
        def settled(seconds: float) -> bool:
            with self._open():
                return self._group.settle(seconds)

        deadline.until(settled)

    def reserve(self, n_slots: int, n_bytes: int, n_copied: int) -> None:
        """Allocates device memory. During a broadcast an allocation might wait for it, and it might never end."""
        with self._open():
            for slot in range(n_slots):
                self._group.buffer(slot, n_bytes)
            if n_copied:
                self._group.buffer(MAX_BUFFERS, n_copied)

    def start(self, slot: int, n_bytes: int, deadline: Deadline) -> None:
        """Starts to receive the next broadcast into a slot's buffer."""
        with self._open():
            address = self._group.buffer(slot, n_bytes)
        self.broadcast(slot, address, n_bytes, deadline)

    def broadcast(self, slot: int, address: int, n_bytes: int, deadline: Deadline) -> None:
        """Enqueues a broadcast from rank 0's memory to the other ranks."""
        self._addresses[slot] = address
        with self._open():
            self._group.broadcast(slot, address, n_bytes)
        self._settle(deadline)

    def wait(self, slot: int, deadline: Deadline) -> int:
        """Waits until the broadcast is complete and returns the address of the buffer."""

        def done(seconds: float) -> bool:
            with self._open():
                return self._group.wait(slot, seconds)

        deadline.until(done)
        return self._addresses[slot]

    def aligned(self, address: int, n_bytes: int) -> int:
        """Copies bytes to an aligned address and returns it."""
        with self._open():
            return self._group.copy(MAX_BUFFERS, address, n_bytes)

    def finish(self) -> None:
        """Does nothing: the trainer's broadcast has ended, too."""

    def close(self) -> None:
        """Closes the group and aborts broadcasts in flight."""
        self._is_closing = True
        with self._lock:
            self._group.close()


class TcpChannel:
    """Receives bytes over a socket into host memory. The size of a broadcast precedes its bytes."""

    on_device = False

    def __init__(self, host: str, port: int, rank: int, deadline: Deadline) -> None:
        try:
            self._connection = socket.create_connection((host, port), deadline.left())
            self._connection.sendall(struct.pack("=I", rank))
        except OSError as error:
            deadline.fail(f"cannot be reached at {host}:{port} ({error})")
        self._buffers: dict[int, numpy.ndarray[Any, Any]] = {}
        self._copy: object = None
        self._sizes = [0] * MAX_BUFFERS

    def reserve(self, n_slots: int, n_bytes: int, n_copied: int) -> None:
        """Does nothing: host memory is allocated when needed."""

    def start(self, slot: int, n_bytes: int, deadline: Deadline) -> None:
        """Records the size of the next broadcast."""
        self._sizes[slot] = n_bytes

    def wait(self, slot: int, deadline: Deadline) -> int:
        """Waits until the bytes have arrived and returns their address."""
        import numpy

        n_bytes = self._sizes[slot]
        if slot not in self._buffers or self._buffers[slot].nbytes < n_bytes:
            self._buffers[slot] = numpy.empty(max(n_bytes, 1), numpy.uint8)
        header = bytearray(8)
        self._fill(memoryview(header), deadline)
        (coming,) = struct.unpack("=Q", header)
        if coming != n_bytes:
            deadline.fail(f"sends {coming} bytes where {n_bytes} are expected; names, types, shapes or buffer_bytes differ")
        buffer = self._buffers[slot]
        self._fill(buffer.data[:n_bytes], deadline)
        return int(buffer.ctypes.data)

    def aligned(self, address: int, n_bytes: int) -> int:
        """Copies bytes to an aligned address and returns it."""
        import numpy

        copy = numpy.empty(n_bytes, numpy.uint8)
        ctypes.memmove(copy.ctypes.data, address, n_bytes)
        self._copy = copy
        return int(copy.ctypes.data)

    def finish(self) -> None:
        """Tells the trainer that all bytes have arrived; the trainer only knows that it has sent them."""
        with contextlib.suppress(OSError):  # the trainer has gone, but all bytes have arrived
            self._connection.sendall(b"\1")

    def _fill(self, view: memoryview, deadline: Deadline) -> None:
        while view.nbytes:
            self._connection.settimeout(min(deadline.left(), _SLICE_S))
            try:
                n = self._connection.recv_into(view)
            except TimeoutError:
                continue
            except OSError as error:
                deadline.fail(f"has gone ({error})")
            if not n:
                deadline.fail("has gone")
            view = view[n:]

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def find_nccl() -> str:
    """Path of the NCCL library; raises DeviceError if there is none."""
    found = hardware.nccl_library()
    if not found:
        message = "NCCL: wanted libnccl.so.2, have none; install nvidia-nccl-cu13, or name its folder in LLMPY_LIB_PATH"
        raise DeviceError(message, operation="nccl_open")
    return found


def _nccl_id(value: bytes) -> bytes:
    """The id in rank 0's stored value: bytes, or a pickled object that holds them. The pickle is parsed, not loaded."""
    if len(value) == _ID_BYTES:
        return value
    try:
        found = [argument for _, argument, _ in pickletools.genops(value) if isinstance(argument, bytes)]
    except Exception as error:  # a torn pickle makes genops raise many types
        raise DeviceError(f"weight group: the store holds no NCCL id ({error})", operation="init_weight_group") from error
    found = [argument for argument in found if len(argument) == _ID_BYTES]
    if len(found) != 1:
        message = f"weight group: wanted an NCCL id of {_ID_BYTES} bytes in the store, have {len(value)} bytes without one"
        raise DeviceError(message, operation="init_weight_group")
    return found[0]


class WeightGroup:
    """A broadcast group of a trainer and its engines; made by `init_weight_group`, ended by `destroy_weight_group`.

    Args:
        device: The engine's device.
        name: Name of the group for `destroy_weight_group`.
        master_address, master_port: Address of the trainer's store.
        rank, world_size: Rank of the engine and number of ranks; the trainer is rank 0.
        timeout: Most seconds to wait for the trainer.
        buffer_bytes, num_buffers: Must equal the trainer's.
    """

    def __init__(
        self,
        device: str,
        name: str,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        timeout: float,
        buffer_bytes: int,
        num_buffers: int,
    ) -> None:
        self.name, self.rank, self.world_size, self.timeout = name, rank, world_size, timeout
        self.buffer_bytes, self.num_buffers = buffer_bytes, num_buffers
        self.closed = False
        self._num_updates = 0
        self._channel: Channel | None = None
        self._store = StoreClient(master_address, master_port, timeout)
        try:
            self._channel = self._join(device, self._deadline(timeout))
        except OSError as error:
            self.close()
            message = f"weight group {name!r}: the trainer at {master_address}:{master_port} has gone ({error})"
            raise DeviceError(message, operation="init_weight_group") from error
        except BaseException:
            self.close()
            raise

    def _deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, f"the trainer of {self.name!r}", self._is_gone)

    def _is_gone(self) -> bool:
        """Whether a WeightSender has ended. Other trainers are not checked: they may close their store after joining."""
        return self._is_ours and is_gone(self._store.connection)

    _is_ours = False

    def _join(self, device: str, deadline: Deadline) -> Channel:
        try:
            value = self._store.get(ID_KEY, deadline.left())
        except TimeoutError:
            deadline.fail("has not made its group in time (timeout=)")
        self._is_ours = self._store.has(SENDER_KEY)
        if value.startswith(TCP_ID):
            host, _, port = value[len(TCP_ID) :].decode().rpartition(" ")
            return TcpChannel(host, int(port), self.rank, deadline)
        if hardware.ordinal(device) < 0:
            message = "weight group: the trainer sends over NCCL, the engine is on the CPU; make WeightSender with device='cpu'"
            raise DeviceError(message, operation="init_weight_group")
        return NcclChannel(device, _nccl_id(value), self.rank, self.world_size, deadline)

    def close(self) -> None:
        """Leaves the group and closes its connections."""
        self.closed = True
        if self._channel is not None:
            self._channel.close()
        self._store.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank} of {self.world_size}"
        return f"WeightGroup({self.name!r}, {state})"

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _announced(self, deadline: Deadline) -> dict[str, Any]:
        """A WeightSender's announcement of its next update."""
        try:
            found: dict[str, Any] = json.loads(self._store.get(update_key(self._num_updates), deadline.left()))
        except TimeoutError:
            deadline.fail(f"has not sent an update within {deadline.seconds:g} s (timeout=)")
        except OSError as error:
            deadline.fail(f"has gone ({error})")
        return found

    def _check_announced(self, tensors: Sequence[MemoryTensor], deadline: Deadline) -> None:
        found = self._announced(deadline)
        theirs = [(name, dtype, tuple(shape)) for name, dtype, shape in found["tensors"]]
        ours = [(name, dtype, shape) for name, _, dtype, shape, _ in tensors]
        unlike = [pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]]
        if unlike:
            deadline.fail(f"sends {unlike[0][0]} where {unlike[0][1]} is expected")
        if len(theirs) != len(ours):
            deadline.fail(f"sends {len(theirs)} tensors where {len(ours)} are expected")
        if found["buffer_bytes"] != self.buffer_bytes:
            deadline.fail(f"packs {found['buffer_bytes']} bytes together, the engine {self.buffer_bytes} (buffer_bytes=)")

    def _receive(self, update: MemoryUpdate, tensors: Sequence[MemoryTensor], deadline: Deadline) -> None:
        channel = self._channel
        assert channel is not None
        sizes = [num_bytes(dtype, shape) for _, _, dtype, shape, _ in tensors]
        chunks = packed(sizes, self.buffer_bytes)
        places = [at for chunk in chunks for at in accumulate((sizes[j] for j in chunk[:-1]), initial=0)]
        odd = {j for j, place in enumerate(places) if place % ITEM_BYTES[tensors[j][2]]}
        largest = max((sum(sizes[j] for j in chunk) for chunk in chunks), default=0)
        channel.reserve(min(self.num_buffers, len(chunks)), largest, max((sizes[j] for j in odd), default=0))
        started = 0
        for i, chunk in enumerate(chunks):
            while started < min(i + self.num_buffers, len(chunks)):
                channel.start(started % self.num_buffers, sum(sizes[j] for j in chunks[started]), deadline)
                started += 1
            address = channel.wait(i % self.num_buffers, deadline)
            found: list[MemoryTensor] = []
            for j in chunk:
                name, _, dtype, shape, _ = tensors[j]
                if j in odd:  # misaligned: it follows an odd number of items of a smaller type
                    copy = channel.aligned(address + places[j], sizes[j])
                    update.write_memory([(name, copy, dtype, shape, None)], channel.on_device)
                    update.finish()
                else:
                    found.append((name, address + places[j], dtype, shape, None))
            update.write_memory(found, channel.on_device)
            update.finish()
        channel.finish()
        self._num_updates += 1


def _find(update: GroupedUpdate, group: WeightGroup | str) -> WeightGroup:
    if isinstance(group, str):
        if group not in update.groups:
            raise InvalidRequestError(f"there is no weight group {group!r}; call init_weight_group()", parameter="group")
        group = update.groups[group]
    if not isinstance(group, WeightGroup):
        raise TypeError(f"group must be a WeightGroup or its name, but is of type {type(group).__name__}")
    if group.closed:
        raise DeviceError(f"weight group {group.name!r} has ended; make another with init_weight_group()", operation="receive")
    return group


class GroupedUpdate(MemoryUpdate, Protocol):
    """The methods of a WeightUpdate that this file uses."""

    @property
    def groups(self) -> dict[str, WeightGroup]:
        """The engine's groups by name."""

    def check_memory(self, items: Iterable[MemoryTensor]) -> None:
        """Raises WeightUpdateError if a tensor fits no weight; reads no data."""


def receive(
    update: GroupedUpdate,
    group: WeightGroup | str,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    timeout: float | None = None,
) -> None:
    """Receives tensors that the trainer broadcasts, and writes them as they arrive.

    Args:
        update: The transaction.
        group: A WeightGroup or its name.
        names, dtypes, shapes: The tensors that the trainer sends, in its order.
        timeout: Seconds until everything has arrived; None: the group's timeout.

    Raises:
        WeightUpdateError: A tensor fits no weight; nothing was received.
        DeviceError: The trainer has gone, has not answered in time, or sends other sizes. The group has ended.
    """
    found = _find(update, group)
    if not len(names) == len(dtypes) == len(shapes):
        message = f"receive: wanted as many types and shapes as names, have {len(names)}, {len(dtypes)}, {len(shapes)}"
        raise WeightUpdateError(message)
    tensors = [_tensor(*one) for one in zip(names, dtypes, shapes, strict=True)]
    update.check_memory(tensors)
    _run(update, found, timeout, tensors)


def receive_all(update: GroupedUpdate, group: WeightGroup | str, *, timeout: float | None = None) -> None:
    """Receives the next update of a llmpy.rl.WeightSender, which announces the tensors that it sends.

    Args:
        update: The transaction.
        group: A WeightGroup or its name.
        timeout: Seconds until everything has arrived; None: the group's timeout.

    Raises:
        UnsupportedError: The trainer is no WeightSender.
        WeightUpdateError: A tensor fits no weight. The group has ended, because the trainer sends anyway.
        DeviceError: As for `receive`.
    """
    found = _find(update, group)
    if not found._is_ours:
        message = "update_weights(group): the trainer does not say what it sends; use begin_update() and receive()"
        raise UnsupportedError(message)
    _run(update, found, timeout, None)


def _run(update: GroupedUpdate, group: WeightGroup, timeout: float | None, tensors: Sequence[MemoryTensor] | None) -> None:
    deadline = group._deadline(group.timeout if timeout is None else as_float("timeout", timeout))
    try:
        if tensors is None:
            announced = group._announced(deadline)["tensors"]
            tensors = [_tensor(*one) for one in announced]
            update.check_memory(tensors)
        elif group._is_ours:
            group._check_announced(tensors, deadline)
        group._receive(update, tensors, deadline)
    except BaseException:
        group.close()
        if update.groups.get(group.name) is group:
            del update.groups[group.name]
        raise


def _tensor(name: str, dtype: str, shape: Sequence[int]) -> MemoryTensor:
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise WeightUpdateError(f"weight {name!r}: wanted one of {', '.join(ITEM_BYTES)}, have {dtype}", mismatched=[name])
    return name, 0, dtype, tuple(int(n) for n in shape), None


# ---- the engines' calls ----------------------------------------------------------------------------------------------


class _Groups:
    """Joins and leaves the groups of an engine."""

    _weights: Weights
    config: EngineConfig

    def _join_group(
        self, address: str, port: int, rank: int, size: int, name: str, timeout: float, buffer_bytes: int | str, buffers: int
    ) -> WeightGroup:
        rank, size = as_int("rank_offset", rank), as_int("world_size", size)
        if not 1 <= rank < size:
            message = f"rank_offset must be from 1 to world_size - 1 (the trainer is rank 0), got {rank} of {size}."
            raise InvalidRequestError(message, parameter="rank_offset", value=rank)
        n_bytes = parse_size("buffer_bytes", buffer_bytes)
        if n_bytes < 1 or not 1 <= as_int("num_buffers", buffers) <= MAX_BUFFERS:
            message = f"buffer_bytes must be positive, num_buffers from 1 to {MAX_BUFFERS}, got {buffer_bytes} and {buffers}."
            raise InvalidRequestError(message, parameter="num_buffers", value=buffers)
        if not math.isfinite(as_float("timeout", timeout)) or timeout <= 0:
            raise InvalidRequestError(f"timeout must be a positive time, got {timeout}.", parameter="timeout", value=timeout)
        if name in self._weights.groups:
            message = f"there is a weight group {name!r}; call destroy_weight_group() first"
            raise InvalidRequestError(message, parameter="name", value=name)
        check_one_device(self._weights.model)
        if self.config.nnodes > 1 and hardware.ordinal(self._weights.device) >= 0:
            raise UnsupportedError(
                "init_weight_group() is not supported yet for GPUs of several hosts (nnodes); update the weights from tensors "
                "in host memory or a directory"
            )
        group = WeightGroup(self._weights.device, name, address, port, rank, size, timeout, n_bytes, buffers)
        self._weights.groups[name] = group
        return group

    def _end_group(self, name: str) -> None:
        if name not in self._weights.groups:
            raise InvalidRequestError(f"there is no weight group {name!r}", parameter="name", value=name)
        self._weights.groups.pop(name).close()

    def _close_weight_groups(self) -> None:
        for name in list(self._weights.groups):
            self._end_group(name)


class WeightGroups(_Groups):
    """Calls of LLM for weight groups."""

    def init_weight_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        *,
        name: str = "default",
        timeout: float = 300.0,
        buffer_bytes: int | str = "1GiB",
        num_buffers: int = 2,
    ) -> WeightGroup:
        """Joins the trainer's group and waits until all ranks have joined.

        Args:
            master_address, master_port: Address of the trainer's store.
            rank_offset: The engine's rank: one per engine, from 1 on; the trainer is rank 0.
            world_size: Number of ranks, the trainer included.
            name: Name of the group for `destroy_weight_group` and `receive`.
            timeout: Most seconds to wait for the trainer, here and in every update.
            buffer_bytes, num_buffers: Size and number of packet buffers; must equal the trainer's.

        Returns:
            The group, for `update_weights(group)` or `receive(group, ...)`.

        Raises:
            InvalidRequestError: The rank is impossible, or the name is taken.
            DeviceError: The trainer does not answer in time, or NCCL is missing.
        """
        return self._join_group(master_address, master_port, rank_offset, world_size, name, timeout, buffer_bytes, num_buffers)

    def destroy_weight_group(self, name: str = "default") -> None:
        """Leaves a group.

        Args:
            name: As given to `init_weight_group`.

        Raises:
            InvalidRequestError: No group has this name.
        """
        self._end_group(name)


class AsyncWeightGroups(_Groups):
    """Calls of AsyncEngine for weight groups."""

    async def init_weight_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        *,
        name: str = "default",
        timeout: float = 300.0,
        buffer_bytes: int | str = "1GiB",
        num_buffers: int = 2,
    ) -> WeightGroup:
        """Joins the trainer's group on a helper thread; arguments and errors as for `LLM.init_weight_group`."""
        return await beside(
            self._join_group,
            master_address,
            master_port,
            rank_offset,
            world_size,
            name,
            timeout,
            buffer_bytes,
            num_buffers,
        )

    async def destroy_weight_group(self, name: str = "default") -> None:
        """Leaves a group.

        Args:
            name: As given to `init_weight_group`.

        Raises:
            InvalidRequestError: No group has this name.
        """
        await beside(self._end_group, name)
