"""Weights in the memory of another process: their description, how to open them, and how a producer packs them.

A bucket is a range of bytes that holds tensors. On a GPU its handle is that of a CUDA allocation; in host memory it is a
file of shared memory. Describing and opening needs no torch; packing CUDA tensors does, since they are torch's.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from .. import _core, hardware
from ..checks import as_int
from ..errors import DeviceError, WeightUpdateError

ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip
"""Tensor types by name. The update decides which of them a weight accepts."""
HANDLE_BYTES = 64
MOST = 1 << 62
"""Sizes and counts are below this, so that the sum of two fits into 64 bits."""
COUNTER = re.compile(r"/?torch_[0-9A-Za-z_]{1,200}")
"""Names of torch's reference-count files."""
_ALIGNMENT = 256

SharedTensor: TypeAlias = "tuple[str, int, int, str, tuple[int, ...], tuple[int, ...] | None]"
"""Name, descriptor, offset in the file, type, shape, strides in elements or None."""
MemoryTensor: TypeAlias = "tuple[str, int, str, tuple[int, ...], tuple[int, ...] | None]"
"""Name, address, type, shape, strides in elements or None."""
NamedTensors: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]]"


class MemoryUpdate(Protocol):
    """The methods of a WeightUpdate that this file uses."""

    @property
    def device(self) -> str:
        """Name of the engine's device."""

    def write_memory(self, items: Iterable[MemoryTensor], on_device: bool) -> None:
        """Checks all tensors, then writes them."""

    def write_shared(self, items: Iterable[SharedTensor]) -> None:
        """Like `write_memory`, for tensors in files; reads one tensor after the other."""

    def finish(self) -> None:
        """Waits until all writes are complete."""


class IpcItem(NamedTuple):
    """A tensor in a bucket: its checkpoint name, type ("bfloat16"), shape, offset in bytes, and strides in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None


class IpcBucket:
    """Tensors in memory of another process. It can be pickled; unpickling runs no code of the sender.

    Args:
        handle: On a GPU the 64 bytes of a CUDA IPC handle, or the descriptor (int) that cuMemExportToShareableHandle
            gave, received over a Unix socket. In host memory a path ("/proc/PID/fd/N", "/dev/shm/NAME") or a
            descriptor of shared memory. The caller keeps and closes a descriptor; a descriptor cannot be pickled.
        nbytes: Bytes of the memory, counted from the start of the allocation.
        items: Tuples (name, dtype, shape, offset) or (name, dtype, shape, offset, strides); offsets in bytes from the
            start of the allocation, strides in elements (row-major unless given).
        device_uuid: "GPU-..." of the memory's device; None: found when the bucket is opened; "": host memory.
        event: 64 bytes of a CUDA IPC event to wait for before the memory is read.
        counter: Shared-memory file and index of torch's reference count of the memory; the count is decremented after the
            bucket has been written.

    Raises:
        WeightUpdateError: An item does not lie within `nbytes`, or has an unknown type.
    """

    __slots__ = ("_memory", "counter", "device_uuid", "event", "handle", "items", "nbytes")

    def __init__(
        self,
        handle: bytes | int | str,
        nbytes: int,
        items: Iterable[Sequence[Any]],
        device_uuid: str | None,
        *,
        event: bytes | None = None,
        counter: tuple[str, int] | None = None,
    ) -> None:
        if isinstance(handle, bytes | bytearray) and len(handle) != HANDLE_BYTES:
            raise ValueError(f"handle must be {HANDLE_BYTES} bytes, a descriptor or a path, got {len(handle)} bytes")
        if not isinstance(handle, bytes | bytearray | int | str) or isinstance(handle, bool):
            raise TypeError(f"handle must be bytes, an int or a str, but is of type {type(handle).__name__}")
        self.handle = bytes(handle) if isinstance(handle, bytearray) else handle
        self.nbytes = as_int("nbytes", nbytes)
        if not 0 <= self.nbytes < MOST:
            raise ValueError(f"nbytes must be in [0, 2**62), got {nbytes}")
        if counter is not None and not COUNTER.fullmatch(counter[0]):
            raise ValueError(f"counter: wanted the name of a file of torch, such as '/torch_1_2_3', have {counter[0][:80]!r}")
        self.items = tuple(_item(item, self.nbytes) for item in items)
        self.device_uuid = device_uuid
        self.event = event
        self.counter = counter
        self._memory: object = None

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.handle, int):
            raise TypeError("a descriptor does not pickle: send it with socket.send_fds, or give a path")
        items = [tuple(item) for item in self.items]
        return _rebuild, (self.handle, self.nbytes, items, self.device_uuid, self.event, self.counter)

    def __repr__(self) -> str:
        where = "host memory" if self.device_uuid == "" else self.device_uuid or "a GPU"
        return f"IpcBucket({len(self.items)} tensors, {self.nbytes} bytes, {where})"


def _rebuild(
    handle: bytes | str, nbytes: int, items: Sequence[Any], uuid: str | None, event: bytes | None, counter: Any
) -> IpcBucket:
    return IpcBucket(handle, nbytes, items, uuid, event=event, counter=counter)


def _item(given: Sequence[Any], nbytes: int) -> IpcItem:
    name, dtype, shape, offset, strides = given if len(given) == 5 else (*given, None)
    item = IpcItem(
        str(name),
        str(dtype).removeprefix("torch."),
        tuple(int(n) for n in shape),
        int(offset),
        None if strides is None else tuple(int(n) for n in strides),
    )
    size = ITEM_BYTES.get(item.dtype)
    if size is None:
        message = f"weight {item.name!r}: wanted one of {', '.join(ITEM_BYTES)}, have {item.dtype}"
        raise WeightUpdateError(message, mismatched=[item.name])
    is_sized = all(0 <= n < MOST for n in (*item.shape, *(item.strides or ())))
    if not is_sized or item.offset < 0 or item.offset % size or _wrong_strides(item):
        message = f"weight {item.name!r}: shape {item.shape}, strides {item.strides} at byte {item.offset} is no tensor"
        raise WeightUpdateError(message, mismatched=[item.name])
    end = item.offset + span(item.shape, item.strides) * size
    if end > nbytes:
        message = f"weight {item.name!r}: wanted bytes {item.offset} to {end} of the bucket, have {nbytes}"
        raise WeightUpdateError(message, mismatched=[item.name])
    return item


def _wrong_strides(item: IpcItem) -> bool:
    return item.strides is not None and len(item.strides) != len(item.shape)


def span(shape: Sequence[int], strides: Sequence[int] | None) -> int:
    """Number of elements from a tensor's first to its last, both included."""
    if strides is None or 0 in shape:
        return math.prod(shape)
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


# ---- reading them ----------------------------------------------------------------------------------------------------


_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""O_NONBLOCK and O_NOCTTY: a FIFO without a writer, or a device, must not block the update."""


def _check_file(handle: object, descriptor: int, n_bytes: int) -> None:
    """Raises unless a descriptor is of a file or shared memory with at least `n_bytes` bytes."""
    have = os.fstat(descriptor)
    if not stat.S_ISREG(have.st_mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(have.st_mode), "no file")
        message = f"IPC bucket: wanted a file or shared memory, {handle!r} is {kind}; give the path that ipc_bucket() gives"
        raise DeviceError(message, operation="ipc_open")
    if have.st_size < n_bytes:
        raise ValueError(f"it has {have.st_size} bytes")


class _HostMemory:
    """A file of shared memory. It is read, never mapped: if the producer truncates it, this process must not get SIGBUS."""

    def __init__(self, bucket: IpcBucket) -> None:
        handle = bucket.handle
        if isinstance(handle, bytes):
            message = "IPC bucket: wanted a path or a descriptor of host memory, have a CUDA handle; give device_uuid"
            raise DeviceError(message, operation="ipc_open")
        self._is_own = isinstance(handle, str)
        try:
            self.descriptor = os.open(handle, _READ_FLAGS) if isinstance(handle, str) else handle
            try:
                _check_file(handle, self.descriptor, bucket.nbytes)
            except BaseException:
                self.close()
                raise
        except (OSError, ValueError) as error:
            raise _has_expired(bucket, str(error)) from error

    def close(self) -> None:
        if self._is_own:
            os.close(self.descriptor)


def _has_expired(bucket: IpcBucket, why: str) -> DeviceError:
    message = (
        f"IPC bucket: wanted {bucket.nbytes} bytes of shared memory, {bucket.handle!r} has expired or is smaller "
        f"({why}); keep the bucket until the update is over"
    )
    return DeviceError(message, operation="ipc_open")


@functools.lru_cache
def _uuid(device: str) -> str:
    return hardware.name_and_uuid(device)[1] or ""


def _open(bucket: IpcBucket, device: str) -> _HostMemory | _core.ImportedMemory:
    if bucket.device_uuid == "":
        return _HostMemory(bucket)
    have = bucket.device_uuid or "a GPU"
    if hardware.ordinal(device) < 0:
        message = f"IPC bucket: wanted host memory, have that of {have}; pack it with ipc_bucket() of CPU tensors"
        raise DeviceError(message, operation="ipc_open")
    if bucket.device_uuid is not None and bucket.device_uuid != _uuid(device):
        message = f"IPC bucket: wanted memory of {_uuid(device)}, have that of {have}; send it from the engine's device"
        raise DeviceError(message, operation="ipc_open")
    if isinstance(bucket.handle, str):
        message = "IPC bucket: wanted a CUDA handle or a descriptor, have a path; for host memory device_uuid is ''"
        raise DeviceError(message, operation="ipc_open")
    return _core.ImportedMemory(device, hardware.library(device), bucket.handle, bucket.nbytes, bucket.event)


def _find_all(buckets: Sequence[IpcBucket]) -> None:
    """Checks that all paths exist before the first is opened. A path below /proc may name a closed descriptor of this process,
    and an opened file could get that descriptor's number."""
    for bucket in buckets:
        if bucket.device_uuid == "" and isinstance(bucket.handle, str):
            try:
                os.stat(bucket.handle)
            except (OSError, ValueError) as error:
                raise _has_expired(bucket, str(error)) from error


def write(update: MemoryUpdate, buckets: Sequence[IpcBucket]) -> None:
    """Opens the buckets, writes their tensors and closes the buckets. The producer may reuse them when this returns.

    Args:
        update: The transaction.
        buckets: The buckets. All are opened and checked before the first byte is written.

    Raises:
        WeightUpdateError: A tensor fits no weight.
        DeviceError: A handle has expired, or is of another device or of this process.
    """
    for bucket in buckets:
        if not isinstance(bucket, IpcBucket):
            raise TypeError(f"bucket must be an IpcBucket, but is of type {type(bucket).__name__}")
    _find_all(buckets)
    opened: dict[object, tuple[int, _HostMemory | _core.ImportedMemory]] = {}
    with contextlib.ExitStack() as stack:
        shared: list[SharedTensor] = []
        on_device: list[MemoryTensor] = []
        for bucket in buckets:
            have = opened.get(bucket.handle)
            if have is None or have[0] < bucket.nbytes or bucket.event is not None:
                have = bucket.nbytes, stack.enter_context(contextlib.closing(_open(bucket, update.device)))
                opened[bucket.handle] = have
            for name, dtype, shape, offset, strides in bucket.items:
                if isinstance(have[1], _HostMemory):
                    shared.append((name, have[1].descriptor, offset, dtype, shape, strides))
                else:
                    on_device.append((name, have[1].address + offset, dtype, shape, strides))
        if shared:
            update.write_shared(shared)
        if on_device:
            update.write_memory(on_device, True)
        update.finish()
    for bucket in buckets:
        _count_down(bucket)


def _count_down(bucket: IpcBucket) -> None:
    """Decrements torch's reference count, so that the producer can free the memory. A missing file needs no decrement."""
    counter, bucket.counter = bucket.counter, None
    if counter is None:
        return
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/shm/" + counter[0].lstrip("/"), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "r+b") as file:
            at = 64 + 8 * counter[1]  # after the file's own count
            data = os.pread(file.fileno(), 8, at) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and at >= 64 else b""
            if len(data) == 8:
                os.pwrite(file.fileno(), struct.pack("=q", struct.unpack("=q", data)[0] - 1), at)


# ---- making them -----------------------------------------------------------------------------------------------------


def ipc_from_torch(
    reduced: Sequence[Any], name: str = "", *, items: Iterable[Sequence[Any]] | None = None, device_uuid: str | None = None
) -> IpcBucket:
    """Makes a bucket from the result of torch's `reduce_tensor`. It calls nothing in the tuple and does not need torch.

    Args:
        reduced: Result of `torch.multiprocessing.reductions.reduce_tensor(tensor)` for a CUDA tensor in the other process:
            the function and its arguments, or the arguments alone.
        name: Checkpoint name of the tensor.
        items: If the tensor is a buffer, the tensors in it: tuples (name, dtype, shape, offset), offsets in bytes from the
            start of the buffer.
        device_uuid: "GPU-..." of the tensor's device, if known.

    Returns:
        An IpcBucket. The update waits for the producer's event and lets the producer free the memory after writing.

    Raises:
        DeviceError: The tensor is not on a GPU, or lies in an expandable segment.
    """
    arguments = reduced[1] if len(reduced) == 2 and callable(reduced[0]) else reduced
    if len(arguments) < 15:
        message = f"ipc_from_torch: wanted reduce_tensor's tuple of a CUDA tensor, have {len(arguments)} arguments"
        raise DeviceError(message + "; for CPU tensors use ipc_bucket()", operation="ipc_open")
    _, shape, strides, first, _, dtype, _, handle, n_bytes, offset, _, file, index, event, is_recorded = arguments[:15]
    dtype = str(dtype).removeprefix("torch.")
    start = int(offset) + int(first) * ITEM_BYTES.get(dtype, 1)
    own = (name, dtype, tuple(shape), start, tuple(strides))
    counter = None if file is None else (file.decode() if isinstance(file, bytes) else str(file), int(index))
    return IpcBucket(
        _classic(bytes(handle)),
        int(offset) + int(n_bytes),
        [own] if items is None else [(n, t, s, start + o, *more) for n, t, s, o, *more in items],
        device_uuid,
        event=bytes(event) if is_recorded and event else None,
        counter=counter,
    )


def _classic(handle: bytes) -> bytes:
    """The 64 bytes of CUDA's handle in torch's handle, which may have a version and a kind in front."""
    if len(handle) == HANDLE_BYTES:
        return handle
    if len(handle) == HANDLE_BYTES + 2 and handle[1:2] == b"c":
        return handle[2:]
    kind = "an expandable segment" if handle[1:2] == b"e" else f"{len(handle)} bytes of another kind"
    message = f"IPC handle: wanted a CUDA IPC handle of 64 bytes, have {kind}"
    raise DeviceError(message + "; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", operation="ipc_open")


def named(tensors: NamedTensors) -> list[tuple[str, Any]]:
    """(name, detached tensor) pairs."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return [(name, _detached(name, tensor)) for name, tensor in pairs]


def _detached(name: str, tensor: Any) -> Any:
    if hasattr(tensor, "full_tensor"):
        message = f"weight {name!r}: wanted a whole tensor, have a DTensor; use full_tensor()"
        raise WeightUpdateError(message, mismatched=[name])
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def dtype_name(tensor: Any) -> str:
    """Type name of a torch tensor or a NumPy array, such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor without gaps."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def host_bytes(tensor: Any) -> Any:
    """The bytes of a tensor in host memory as a one-dimensional NumPy array; a copy if the tensor is not contiguous."""
    import numpy

    if not hasattr(tensor, "cpu"):
        return numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8)
    return tensor.contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()


def ipc_bucket(tensors: NamedTensors) -> IpcBucket:
    """Packs tensors into one buffer that another process can open.

    The buffer lives as long as the returned object; drop the object once the engine has answered. Send the object to the
    engine's process by pickle: over a pipe, a queue, a socket or Ray. For tensors in host memory the handle is a path below
    /proc of this process; the engine must run as the same user to open it.

    Args:
        tensors: Mapping or iterable of (checkpoint name, tensor): all torch CUDA tensors of one device, or all in host
            memory (torch or NumPy).

    Returns:
        An IpcBucket; the copies into its buffer are complete.

    Raises:
        DeviceError: The device memory has no IPC handle; the message names `expandable_segments:False`.
    """
    pairs = named(tensors)
    items, at = [], 0
    for name, tensor in pairs:
        items.append(IpcItem(name, dtype_name(tensor), tuple(tensor.shape), at))
        at += -(-num_bytes(items[-1].dtype, items[-1].shape) // _ALIGNMENT) * _ALIGNMENT
    devices = {str(getattr(tensor, "device", "cpu")) for _, tensor in pairs} or {"cpu"}
    if len(devices) > 1:
        raise ValueError(f"ipc_bucket: wanted tensors of one device, have {', '.join(sorted(devices))}")
    return _pack_device(pairs, items, at, devices.pop()) if not devices <= {"cpu"} else _pack_host(pairs, items, at)


class _Shared:
    """An unnamed file in memory; it lives as long as this object."""

    def __init__(self, n_bytes: int) -> None:
        self.descriptor = os.memfd_create("llmpy-bucket", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, n_bytes)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all data; one system call writes at most 2 GiB."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _pack_host(pairs: Sequence[tuple[str, Any]], items: Sequence[IpcItem], n_bytes: int) -> IpcBucket:
    shared = _Shared(n_bytes)
    if n_bytes:
        for item, (_, tensor) in zip(items, pairs, strict=True):
            _write_at(shared.descriptor, host_bytes(tensor).data, item.offset)
    bucket = IpcBucket(f"/proc/{os.getpid()}/fd/{shared.descriptor}", n_bytes, items, "")
    bucket._memory = shared
    return bucket


def _pack_device(pairs: Sequence[tuple[str, Any]], items: Sequence[IpcItem], n_bytes: int, device: str) -> IpcBucket:
    torch = sys.modules["torch"]
    memory = torch.empty(max(n_bytes, 1), dtype=torch.uint8, device=device)
    for item, (_, tensor) in zip(items, pairs, strict=True):
        part = memory[item.offset : item.offset + num_bytes(item.dtype, item.shape)]
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    torch.cuda.current_stream(memory.device).synchronize()
    index = f"cuda:{memory.device.index}"
    handle, offset, _ = _core.export_memory(index, hardware.library(index), memory.data_ptr())
    shifted = [item._replace(offset=offset + item.offset) for item in items]
    bucket = IpcBucket(handle, offset + n_bytes, shifted, _uuid(index))
    bucket._memory = memory
    return bucket
