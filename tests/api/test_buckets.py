"""Weights in memory of another process: buckets of host memory anywhere, CUDA IPC where there is a GPU."""

import contextlib
import gc
import os
import pickle
import pickletools
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_help import Process, Taken, raw

from llmpy import _core
from llmpy.errors import DeviceError, UnsupportedError, WeightUpdateError
from llmpy.rl import IpcBucket, IpcItem, ipc_bucket, ipc_from_torch
from llmpy.weights.buckets import _count_down, write

ONE = ("w", "float32", (2, 3), 0)

DEVICE = """
import torch
from llmpy.weights.buckets import host_bytes
from llmpy.rl import ipc_bucket
made = {f"layer.{i}.weight": torch.randn(257, 31 + i, device="cuda").to(torch.bfloat16) for i in range(4)}
made["half"] = torch.randn(5, device="cuda").to(torch.float16)
made["turned"] = torch.randn(100, 64, device="cuda").t()
made["parameter"] = torch.nn.Parameter(torch.randn(3, 3, device="cuda"))
bucket = ipc_bucket(made)
send((bucket, {name: host_bytes(tensor.detach().cpu()).tobytes() for name, tensor in made.items()}))
wait()
"""


def same(update: Taken, expected: dict[str, bytes]) -> bool:
    return {name: data for name, (data, *_) in update.written.items()} == expected


# ---- what a bucket is ------------------------------------------------------------------------------------------------


def test_a_bucket_pickles_without_code() -> None:
    item = ("w", torch.bfloat16, torch.Size([2, 3]), 256, (1, 2))
    bucket = IpcBucket(bytes(range(64)), 4096, [item], "GPU-1", event=b"e" * 64)
    data = pickle.dumps(bucket)
    names = {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name in ("SHORT_BINUNICODE", "GLOBAL")}
    of_torch = [name for name in names if str(name).startswith("torch") and name != "torch.bfloat16"]
    assert "llmpy.weights.buckets" in names and not of_torch
    other = pickle.loads(data)
    assert (other.handle, other.nbytes, other.device_uuid, other.event) == (bucket.handle, 4096, "GPU-1", b"e" * 64)
    assert other.items == (IpcItem("w", "bfloat16", (2, 3), 256, (1, 2)),)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (("w", "float32", (2, 3), 80), "weight 'w': wanted bytes 80 to 104 of the bucket, have 100"),
        (("w", "float32", (2, 3), 2), r"weight 'w': shape \(2, 3\), strides None at byte 2 is no tensor"),
        (("w", "float32", (2, 3), -4), "is no tensor"),
        (("w", "float32", (-2, 3), 0), "is no tensor"),
        (("w", "float32", (2, 3), 0, (1,)), "is no tensor"),
        (("w", "float32", (2, 3), 0, (40, 1)), "wanted bytes 0 to 172"),
        (("w", "complex64", (2,), 0), "weight 'w': wanted one of float32, .* have complex64"),
    ],
)
def test_items_lie_inside(item: tuple, text: str) -> None:
    with pytest.raises(WeightUpdateError, match=text) as caught:
        IpcBucket(b"h" * 64, 100, [item], "GPU-1")
    assert caught.value.mismatched == ["w"]


def test_handles_are_checked() -> None:
    with pytest.raises(ValueError, match="handle must be 64 bytes, a descriptor or a path, got 3 bytes"):
        IpcBucket(b"abc", 24, [ONE], None)
    with pytest.raises(TypeError, match="handle must be bytes, an int or a str, but is of type float"):
        IpcBucket(1.5, 24, [ONE], None)
    with pytest.raises(TypeError, match=r"send it with socket\.send_fds"):
        pickle.dumps(IpcBucket(3, 24, [ONE], ""))


@pytest.mark.parametrize("nbytes", [-1, -(2**70), 2**62, 2**64, 2**200])
def test_sizes_that_no_memory_has(nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"nbytes must be in \[0, 2\*\*62\)"):
        IpcBucket("/dev/shm/x", nbytes, [], "")
    with pytest.raises(WeightUpdateError, match="is no tensor"):
        IpcBucket("/dev/shm/x", 64, [("w", "float32", (0, nbytes), 0)], "")


OTHER_NAMES = ["../../etc/passwd", "/../../tmp/x", "torch_1/../../x", "", "/", "/dev/sda", "sem.x", "/torch_1\0"]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_counts_that_are_not_torchs(name: str) -> None:
    with pytest.raises(ValueError, match="counter: wanted the name of a file of torch"):
        IpcBucket(b"h" * 64, 24, [ONE], None, counter=(name, 0))


def test_a_count_goes_down_within_its_file() -> None:
    path = Path(f"/dev/shm/torch_{os.getpid()}_test")
    path.write_bytes(struct.pack("=10q", *range(10)))
    try:
        for index in (0, 1, 2, -1, -8, 1 << 40):
            _count_down(IpcBucket(b"h" * 64, 24, [ONE], None, counter=("/" + path.name, index)))
        assert struct.unpack("=10q", path.read_bytes()) == (*range(8), 7, 8)
    finally:
        path.unlink()


# ---- host memory -----------------------------------------------------------------------------------------------------


HOST = """
import ml_dtypes
import numpy as np
from llmpy.rl import ipc_bucket
random = np.random.default_rng(7)
made = {f"layer.{i}.weight": random.standard_normal((257, 31 + i)).astype(ml_dtypes.bfloat16) for i in range(4)}
made["half"] = random.standard_normal(5).astype(np.float16)
made["turned"] = random.standard_normal((100, 64)).astype(np.float32).T
made["empty"] = np.zeros((0, 3), np.float32)
bucket = ipc_bucket(made)
send((bucket, {name: array.tobytes() for name, array in made.items()}))
wait()
"""


def test_host_memory_of_another_process() -> None:
    with Process(HOST) as producer:
        bucket, expected = producer.get()
        update = Taken()
        write(update, [bucket])
        assert producer.end() == 0
    assert list(update.written) == list(expected) and same(update, expected)
    assert update.written["turned"][1:] == ("float32", (64, 100), None)
    assert update.written["half"][1] == "float16"
    with pytest.raises(DeviceError, match=r"wanted \d+ bytes of shared memory, '/proc/\d+/fd/\d+' has expired"):
        write(Taken(), [bucket])


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device", "a socket"])
@pytest.mark.parametrize("is_path", [True, False])
def test_what_is_no_memory(tmp_path: Path, kind: str, is_path: bool) -> None:
    """Files that are not memory are refused by name at once; a FIFO without a writer does not block."""
    path = tmp_path / "handle"
    with contextlib.ExitStack() as stack:
        if kind == "a FIFO":
            os.mkfifo(path)
        elif kind == "a directory":
            path.mkdir()
        elif kind == "a device":
            path = Path("/dev/zero")
        else:
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        handle: int | str = str(path)
        if not is_path and kind != "a socket":
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, handle)
        with pytest.raises(DeviceError, match=kind if handle != str(path) or kind != "a socket" else "has expired"):
            write(Taken(), [IpcBucket(handle, 8, [("w", "float32", (2,), 0)], "")])


def test_torchs_tensors_in_host_memory() -> None:
    made = {"a": torch.randn(5, 7).to(torch.bfloat16), "b": torch.nn.Parameter(torch.randn(6, 4)), "c": torch.randn(3, 9).t()}
    update = Taken()
    write(update, [ipc_bucket(iter(made.items()))])
    assert same(update, {name: raw(tensor.detach()) for name, tensor in made.items()})


def test_several_buckets_are_opened_before_any_is_written() -> None:
    first, second = ipc_bucket({"a": np.ones(3, np.float32)}), ipc_bucket({"b": np.ones(3, np.float32)})
    gone = pickle.loads(pickle.dumps(second))
    update = Taken()
    write(update, [first, second])
    assert set(update.written) == {"a", "b"}
    del second
    gc.collect()
    update = Taken()
    with pytest.raises(DeviceError, match="has expired"):
        write(update, [first, gone])
    assert not update.written


def test_a_buckets_memory_ends_with_it() -> None:
    gc.collect()  # objects of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    bucket = ipc_bucket({"a": np.ones(1 << 16, np.float32)})
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del bucket
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_and_named_files() -> None:
    data = np.arange(6, dtype=np.float32)
    descriptor = os.memfd_create("test")
    os.write(descriptor, bytes(64) + data.tobytes())
    left, right = socket.socketpair()
    socket.send_fds(left, [b"x"], [descriptor])
    _, (received,), _, _ = socket.recv_fds(right, 1, 1)
    update = Taken()
    write(update, [IpcBucket(received, 88, [("w", "float32", (2, 3), 64)], "")])
    assert update.written["w"][0] == data.tobytes()
    os.fstat(received)  # still the caller's
    with pytest.raises(DeviceError, match=r"wanted 89 bytes of shared memory, .* has expired or is smaller"):
        write(Taken(), [IpcBucket(received, 89, [("w", "float32", (2, 3), 64)], "")])
    path = f"/dev/shm/llmpy-test-{os.getpid()}"
    with open(path, "wb") as file:
        file.write(data.tobytes())
    try:
        write(update, [IpcBucket(path, 24, [("v", "float32", (3, 2), 0)], "")])
    finally:
        os.unlink(path)
    assert update.written["v"][0] == data.tobytes()
    for one in (descriptor, received):
        os.close(one)
    left.close()
    right.close()


def test_what_is_no_bucket_of_this_engine() -> None:
    with pytest.raises(TypeError, match="bucket must be an IpcBucket, but is of type dict"):
        write(Taken(), [{}])
    with pytest.raises(DeviceError, match=r"wanted host memory, have that of GPU-1; pack it with ipc_bucket\(\)"):
        write(Taken(), [IpcBucket(b"h" * 64, 24, [ONE], "GPU-1")])
    with pytest.raises(DeviceError, match="wanted a path or a descriptor of host memory, have a CUDA handle"):
        write(Taken(), [IpcBucket(b"h" * 64, 24, [ONE], "")])


def test_packing_refuses() -> None:
    class Sharded:
        dtype, shape = "float32", (2,)

        def full_tensor(self) -> None: ...

    with pytest.raises(WeightUpdateError, match=r"have a DTensor; use full_tensor\(\)"):
        ipc_bucket({"w": Sharded()})
    with pytest.raises(ValueError, match="wanted tensors of one device, have cpu, meta"):
        ipc_bucket([("a", torch.ones(2)), ("b", torch.ones(2, device="meta"))])
    assert ipc_bucket({}).items == ()
    write(Taken(), [ipc_bucket({})])


def test_the_core_wants_a_gpu() -> None:
    for attempt in (
        lambda: _core.ImportedMemory("cpu", "", b"h" * 64, 24, b"e" * 64),
        lambda: _core.ImportedMemory("cpu", "", 3, 24),
        lambda: _core.export_memory("cpu", "", 0),
        lambda: _core.NcclGroup("cpu", "", "", bytes(128), 0, 1),
    ):
        with pytest.raises(UnsupportedError, match="memory of other processes: wanted a CUDA device, have cpu"):
            attempt()
    for handle, event in ((b"h" * 63, None), (b"h" * 64, b"e"), (3, b"e")):
        with pytest.raises(ValueError, match="wanted 64 bytes"):
            _core.ImportedMemory("cpu", "", handle, 24, event)
    with pytest.raises(ValueError, match="id: wanted 128 bytes, have 1"):
        _core.NcclGroup("cpu", "", "", b"1", 0, 1)


# ---- torch's tuples --------------------------------------------------------------------------------------------------


def reduced(handle: bytes = b"h" * 64, event: object = b"e" * 64, is_recorded: bool = True) -> tuple:
    """The result of reduce_tensor for [4, 2] bfloat16 after five items of a storage at byte 512 of its allocation."""
    storage = (handle, 64, 512, False, b"/torch_1_2_3", 5, event, is_recorded)
    return torch.multiprocessing.reductions.rebuild_cuda_tensor, (
        torch.Tensor, torch.Size([4, 2]), (2, 1), 5, torch.storage.TypedStorage, torch.bfloat16, 0, *storage,
    )  # fmt: skip


def test_a_tuple_of_torch() -> None:
    for given in (reduced(), reduced()[1], reduced(b"\x02c" + b"h" * 64)):
        bucket = ipc_from_torch(given, "w", device_uuid="GPU-2")
        assert bucket.items == (IpcItem("w", "bfloat16", (4, 2), 522, (2, 1)),)
        assert (bucket.handle, bucket.nbytes, bucket.device_uuid) == (b"h" * 64, 576, "GPU-2")
        assert (bucket.event, bucket.counter) == (b"e" * 64, ("/torch_1_2_3", 5))
    assert ipc_from_torch(reduced(is_recorded=False)).event is None
    packed = ipc_from_torch(reduced(), items=[("a", "float32", (2,), 6), ("b", torch.bfloat16, (1,), 16)])
    assert [(item.name, item.offset) for item in packed.items] == [("a", 528), ("b", 538)]


def test_tuples_that_are_not_taken() -> None:
    with pytest.raises(DeviceError, match=r"have an expandable segment; set .*expandable_segments:False"):
        ipc_from_torch(reduced(b"\x02e" + b"h" * 200))
    cpu = torch.multiprocessing.reductions.reduce_tensor(torch.ones(2))
    with pytest.raises(DeviceError, match=r"wanted reduce_tensor's tuple of a CUDA tensor.*for CPU tensors use ipc_bucket\(\)"):
        ipc_from_torch(cpu)


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def test_cuda_memory_of_another_process(cuda: str) -> None:
    with Process(DEVICE) as producer:
        bucket, expected = producer.get()
        for _ in range(2):
            update = Taken(cuda)
            write(update, [bucket])
            assert same(update, expected)
        other = IpcBucket(bucket.handle, bucket.nbytes, bucket.items, "GPU-0000")
        with pytest.raises(DeviceError, match=r"wanted memory of GPU-.*, have that of GPU-0000; send it"):
            write(Taken(cuda), [other])
        beyond = IpcBucket(bucket.handle, 1 << 40, bucket.items, None)
        with pytest.raises(DeviceError, match=r"wanted 1099511627776 bytes behind it, have \d+"):
            write(Taken(cuda), [beyond])
        assert producer.end() == 0
    with pytest.raises(DeviceError, match="has expired") as caught:
        write(Taken(cuda), [bucket])
    assert caught.value.operation == "ipc_open"


def test_cuda_memory_of_this_process(cuda: str) -> None:
    with pytest.raises(DeviceError, match="have one of this process; pass the tensor itself"):
        write(Taken(cuda), [ipc_bucket({"w": torch.ones(5, device=cuda)})])


TUPLES = """
import torch
from torch.multiprocessing.reductions import reduce_tensor
from llmpy.weights.buckets import host_bytes
first = torch.randn(1000, device="cuda")
small = torch.randn(33, 7, device="cuda")  # behind it in torch's segment
large = torch.randn(64 << 20, device="cuda")
part = torch.randn(40, 50, device="cuda")[3:, 1::2]
made = [small, large, part]
expected = [host_bytes(tensor.cpu()).tobytes() for tensor in (small, large[:8], part)]
reduced = [(None, *arguments[1:4], None, str(arguments[5]), *arguments[6:]) for _, arguments in map(reduce_tensor, made)]
send((reduced, expected))
wait()
del large, made
torch.cuda.ipc_collect()
torch.cuda.empty_cache()
send(torch.cuda.memory_reserved())
"""


def test_torchs_tuples_from_another_process(cuda: str) -> None:
    with Process(TUPLES) as producer:
        given, expected = producer.get()
        for number, (arguments, data) in enumerate(zip(given, expected, strict=True)):
            update = Taken(cuda)
            write(update, [ipc_from_torch(arguments, "w")])
            have, dtype, shape, strides = update.written["w"]
            tensor = torch.frombuffer(bytearray(have), dtype=getattr(torch, dtype)).as_strided(shape, strides)
            assert raw(tensor)[: len(data)] == data, number
        producer.go()
        assert producer.get() < 64 << 20  # the producer was told that the large one is unused


EXPANDABLE = """
import torch
from torch.multiprocessing.reductions import reduce_tensor
from llmpy.rl import ipc_bucket, ipc_from_torch
tensor = torch.randn(1000, 1000, device="cuda")
for attempt in (lambda: ipc_bucket({"w": tensor}), lambda: ipc_from_torch(reduce_tensor(tensor), "w")):
    try:
        attempt()
        send("nothing was raised")
    except Exception as error:
        send((type(error).__name__, str(error)))
"""


def test_expandable_segments(cuda: str) -> None:
    with Process(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as producer:
        for _ in range(2):
            kind, text = producer.get()
            assert kind == "DeviceError" and "expandable_segments:False" in text


def test_what_is_no_handle(cuda: str) -> None:
    with pytest.raises(DeviceError, match="IPC handle: "):
        write(Taken(cuda), [IpcBucket(bytes(64), 24, [ONE], None)])
    descriptor = os.memfd_create("test")
    try:
        with pytest.raises(DeviceError, match="wanted the descriptor of a device allocation, have another"):
            write(Taken(cuda), [IpcBucket(descriptor, 24, [ONE], None)])
    finally:
        os.close(descriptor)


EXPORT = """
import ctypes, socket
import torch
cu = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")
size, word = ctypes.c_size_t, ctypes.c_ulonglong
n = 4 << 20
where = (ctypes.c_int * 2)(1, 0)
properties = (ctypes.c_int * 8)(1, 1, *where)
access = (ctypes.c_int * 3)(*where, 3)
handle, address, descriptor = word(), word(), ctypes.c_int()
codes = [
    cu.cuMemCreate(ctypes.byref(handle), size(n), properties, word(0)),
    cu.cuMemAddressReserve(ctypes.byref(address), size(n), size(0), word(0), word(0)),
    cu.cuMemMap(address, size(n), size(0), handle, word(0)),
    cu.cuMemSetAccess(address, size(n), access, size(1)),
    cu.cuMemsetD32_v2(address, 0x3F800000, size(n // 4)),
    cu.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, 1, word(0)),
    cu.cuCtxSynchronize(),
]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [b"x"], [descriptor.value])
send(codes)
wait()
"""


def test_a_descriptor_of_device_memory(cuda: str, tmp_path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with Process(EXPORT, path) as producer:
            connection, _ = listener.accept()
            with connection:
                _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
            assert not any(producer.get())
            update = Taken(cuda)
            write(update, [IpcBucket(descriptor, 3 << 20, [("w", "float32", (3 << 18,), 0)], None)])
            os.close(descriptor)
            assert update.written["w"][0] == np.ones(3 << 18, np.float32).tobytes()
