"""Weights that a trainer broadcasts: the store, the packing, TCP anywhere, and NCCL where there are GPUs."""

import ctypes
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from memory_help import Process, Taken, raw
from torch.distributed import DistStoreError, TCPStore

from llmpy import _core, hardware
from llmpy.errors import DeviceError, InvalidRequestError, UnsupportedError, WeightUpdateError
from llmpy.rl import WeightSender, weight_metadata
from llmpy.weights.group import ID_KEY, Deadline, NcclChannel, WeightGroup, _nccl_id, packed, receive, receive_all
from llmpy.weights.tcp_store import StoreClient, StoreServer

HOST = "127.0.0.1"
PATIENCE = 600
"""A timeout in seconds that no test reaches, because errors end waits earlier."""


def tensors(device: str = "cpu") -> dict[str, object]:
    generator = torch.Generator(device).manual_seed(3)
    made: dict[str, object] = {
        f"layer.{i}": torch.randn(5, 7 + i, device=device, generator=generator).to(torch.bfloat16) for i in range(6)
    }
    made["vector"] = torch.randn(3, device=device, generator=generator)  # after an odd number of bfloat16
    made["turned"] = torch.randn(4, 6, device=device, generator=generator).t()
    return made


def expected(device: str = "cpu") -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in tensors(device).items()}


def data(update: Taken) -> dict[str, bytes]:
    return {name: value[0] for name, value in update.written.items()}


# ---- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torchs_client_and_our_store(use_libuv: bool) -> None:
    store = StoreServer(HOST, 0)
    theirs = TCPStore(HOST, store.port, is_master=False, timeout=timedelta(seconds=60), use_libuv=use_libuv)
    theirs.set("a", b"value")
    assert theirs.get("a") == b"value" and theirs.add("n", 3) == 3 and theirs.add("n", 4) == 7
    assert theirs.check(["a", "n"]) and not theirs.check(["a", "b"])
    threading.Timer(0.2, store.set, ("late", b"now")).start()
    assert theirs.get("late") == b"now"
    with pytest.raises(DistStoreError):
        theirs.wait(["never"], timedelta(milliseconds=100))
    assert theirs.delete_key("a") and not theirs.check(["a"]) and not theirs.delete_key("a")
    ours = StoreClient(HOST, store.port, 60)
    ours.set("b", b"")
    assert theirs.get("b") == b"" and ours.has("b") and not ours.has("c") and ours.get("late", 60) == b"now"
    assert store.num_lost == 0
    ours.close()
    wait_for(lambda: store.num_lost == 1)
    store.close()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torchs_store_and_our_client(use_libuv: bool) -> None:
    reserved = socket.socket()
    reserved.bind((HOST, 0))
    port = reserved.getsockname()[1]
    found: list[bytes] = []

    def join() -> None:
        client = StoreClient(HOST, port, 60)
        found.append(client.get(ID_KEY, 60))
        client.set("answer", b"yes")
        client.close()

    thread = threading.Thread(target=join)
    thread.start()
    listener = {"master_listen_fd": reserved.detach(), "use_libuv": use_libuv}
    theirs = TCPStore(HOST, port, world_size=2, is_master=True, timeout=timedelta(seconds=60), **listener)
    theirs.set(ID_KEY, b"id")
    assert theirs.get("answer") == b"yes"
    thread.join()
    assert found == [b"id"]


def test_a_store_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match=r"wanted a store at 127.0.0.1:1 within 0.3 s, have none"):
        StoreClient(HOST, 1, 0.3)
    store = StoreServer(HOST, 0)
    client = StoreClient(HOST, store.port, 60)
    with pytest.raises(TimeoutError):
        client.get("never", 0.1)
    store.close()
    client.close()


def test_the_store_survives_nonsense() -> None:
    store = StoreServer(HOST, 0)
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\xce\xf7\x85\x3c\x63", b"\x00\xce\xf7\x85\x3c\x01" + b"\xff" * 16):
        with socket.create_connection((HOST, store.port)) as connection, suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    client = StoreClient(HOST, store.port, 60)
    client.set("a", b"1")
    assert client.get("a", 60) == b"1"
    client.close()
    store.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ids_are_read_without_unpickling() -> None:
    class ncclUniqueId(ctypes.Structure):  # as vLLM's trainers pickle it
        _fields_ = [("internal", ctypes.c_byte * 128)]

    id = bytes(range(128))
    globals()["ncclUniqueId"], ncclUniqueId.__qualname__ = ncclUniqueId, "ncclUniqueId"
    assert _nccl_id(id) == id
    assert _nccl_id(pickle.dumps(id)) == id
    assert _nccl_id(pickle.dumps(ncclUniqueId.from_buffer_copy(id))) == id
    del globals()["ncclUniqueId"]
    for wrong in (b"short", pickle.dumps("text"), pickle.dumps([id, id[::-1]]), b"\x80\x04."):
        with pytest.raises(DeviceError, match="NCCL id"):
            _nccl_id(wrong)


def test_packing() -> None:
    sizes = [5, 5, 101, 1, 100, 1]
    assert [list(chunk) for chunk in packed(sizes, 100)] == [[0, 1, 2], [3, 4], [5]]  # as soon as the total exceeds it
    assert [list(chunk) for chunk in packed([100], 100)] == [[0]]
    assert packed([], 100) == []
    assert [i for chunk in packed(sizes, 1) for i in chunk] == list(range(6))


# ---- over TCP --------------------------------------------------------------------------------------------------------


def join(
    sender: WeightSender, rank: int = 1, device: str = "cpu", timeout: float = PATIENCE, buffer_bytes: int = 100
) -> WeightGroup:
    return WeightGroup(
        device, "default", HOST, sender.master_port, rank, sender.world_size, timeout, buffer_bytes, sender.num_buffers
    )


@contextmanager
def running(function: Callable[[], object]):
    """Runs a function on a thread; returns a list that gets its result or error."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    thread.join(60)
    assert not thread.is_alive()


def sender(world_size: int = 2, **options: object) -> WeightSender:
    return WeightSender(HOST, 0, world_size, **{"device": "cpu", "timeout": PATIENCE, "buffer_bytes": 100, **options})


ENGINE = """
import sys
from memory_help import Taken
from llmpy.weights.group import WeightGroup, receive, receive_all
port, rank, world_size, metadata = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
group = WeightGroup("cpu", "default", "127.0.0.1", port, rank, world_size, 60, 100, 2)
for turn in range(2):
    update = Taken()
    receive(update, group, *metadata) if metadata else receive_all(update, group)
    send({name: value[0] for name, value in update.written.items()})
group.close()
"""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_announced", [False, True])
def test_other_processes_receive(world_size: int, is_announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    metadata = None if is_announced else weight_metadata(tensors())
    with sender(world_size) as trainer:
        ranks = range(1, world_size)
        engines = [Process(ENGINE, trainer.master_port, rank, world_size, metadata, PYTHONPATH=path) for rank in ranks]
        for _ in range(2):
            report = trainer.send(tensors())
            assert report.num_tensors == 8 and report.num_bytes == sum(map(len, expected().values()))
            assert all(engine.get() == expected() for engine in engines)
        assert [engine.end() for engine in engines] == [0] * len(engines)


def test_tensors_are_made_one_by_one() -> None:
    alive: list[int] = []

    def made():
        for name, tensor in tensors().items():
            alive.append(1)
            yield name, tensor

    names, dtypes, shapes = weight_metadata(tensors())
    with sender() as trainer, running(lambda: trainer.send(made(), list(zip(names, dtypes, shapes, strict=True)))) as sent:
        update = Taken()
        receive_all(update, join(trainer))
    assert data(update) == expected() and sent[0].num_tensors == 8
    with sender() as trainer, running(lambda: trainer.send(made(), [("layer.0", "float32", (5, 7))])) as sent:
        group = join(trainer)
        with pytest.raises(DeviceError):
            receive_all(Taken(), group)
    assert isinstance(sent[0], ValueError) and "metadata and tensors differ" in str(sent[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda n, d, s: (n, d, [[5, 8], *s[1:]]), r"sends \('layer.0', 'bfloat16', \(5, 7\)\) where .*\(5, 8\)\) is expected"),
        (lambda n, d, s: (n, ["float16", *d[1:]], s), r"where \('layer.0', 'float16', \(5, 7\)\) is expected"),
        (lambda n, d, s: (n[:-1], d[:-1], s[:-1]), "sends 8 tensors where 7 are expected"),
    ],
)
def test_sizes_unlike(change: Callable, text: str) -> None:
    with sender() as trainer, running(lambda: trainer.send(tensors())) as sent:
        group, update = join(trainer), Taken()
        update.groups["default"] = group
        with pytest.raises(DeviceError, match=text):
            receive(update, "default", *change(*weight_metadata(tensors())))
        assert group.closed and not update.groups and not update.written
        with pytest.raises(DeviceError, match=r"weight group 'default' has ended; make another with init_weight_group\(\)"):
            receive_all(update, group)
    assert isinstance(sent[0], DeviceError) and "an engine has gone" in str(sent[0])


def test_buffers_unlike() -> None:
    with sender(buffer_bytes=200) as trainer, running(lambda: trainer.send(tensors())):
        group = join(trainer)
        with pytest.raises(DeviceError, match=r"packs 200 bytes together, the engine 100 \(buffer_bytes=\)"):
            receive(Taken(), group, *weight_metadata(tensors()))


def test_a_trainer_that_has_gone() -> None:
    script = """
from llmpy.rl import WeightSender
import numpy as np
trainer = WeightSender("127.0.0.1", 0, 2, device="cpu", buffer_bytes=100)
send(trainer.master_port)
def made():
    yield "a", np.ones(1000, np.uint8)
    send("half")
    wait()
trainer.send(made(), [("a", "uint8", [1000]), ("b", "uint8", [1000])])
"""
    with Process(script) as other:
        group = WeightGroup("cpu", "default", HOST, other.get(), 1, 2, PATIENCE, 100, 2)
        update = Taken()
        update.groups["default"] = group
        with running(lambda: receive_all(update, group)) as found:
            other.get()
            wait_for(lambda: "a" in update.written)
            other.end(kill=True)
        assert isinstance(found[0], DeviceError) and "the trainer of 'default' has gone" in str(found[0])
        assert not update.groups


def test_a_trainer_that_does_not_answer() -> None:
    with sender() as trainer, running(trainer.connect):
        group = join(trainer)
        start = time.monotonic()
        with pytest.raises(DeviceError, match=r"has not sent an update within 0.3 s \(timeout=\)"):
            receive_all(Taken(), group, timeout=0.3)
        assert 0.2 < time.monotonic() - start < PATIENCE / 2 and group.closed


def test_engines_that_do_not_come_or_have_gone() -> None:
    with pytest.raises(DeviceError, match=r"an engine has not answered within 0.3 s"):
        sender(timeout=0.3).send(tensors())
    with sender() as trainer, running(trainer.connect):
        group = join(trainer)
    group.close()
    big = {f"w{i}": np.zeros(8 << 20, np.uint8) for i in range(4)}
    with sender() as trainer:
        with running(trainer.connect):
            join(trainer).close()
        with pytest.raises(DeviceError, match="an engine has gone; the group has ended"):
            trainer.send(big)


def test_what_does_not_fit_is_refused_before_it_is_sent() -> None:
    class Picky(Taken):
        def check_memory(self, items) -> None:
            raise WeightUpdateError("weight 'layer.0' is not part of it")

    with sender() as trainer, running(lambda: trainer.send(tensors())):
        group, update = join(trainer), Taken()
        with pytest.raises(WeightUpdateError):
            receive(Picky(), group, *weight_metadata(tensors()))
        assert not group.closed  # nothing was received yet
        receive(update, group, *weight_metadata(tensors()))
        assert data(update) == expected()
    with sender() as trainer, running(lambda: trainer.send(tensors())):
        group = join(trainer)
        with pytest.raises(WeightUpdateError):
            receive_all(Picky(), group)
        assert group.closed  # the trainer sends what the engine will not read


def test_arguments() -> None:
    update = Taken()
    with pytest.raises(InvalidRequestError, match=r"there is no weight group 'x'; call init_weight_group\(\)"):
        receive_all(update, "x")
    with pytest.raises(TypeError, match="group must be a WeightGroup or its name"):
        receive_all(update, 3)
    with pytest.raises(ValueError, match="wanted a world_size of 2 or more"):
        WeightSender(HOST, 0, 1, device="cpu")
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda:N', got 'tpu'"):
        WeightSender(HOST, 0, 2, device="tpu")
    with sender() as trainer, running(trainer.connect):
        group = join(trainer)
        with pytest.raises(WeightUpdateError, match="wanted as many types and shapes as names, have 1, 0, 1"):
            receive(update, group, ["a"], [], [[1]])
        with pytest.raises(WeightUpdateError, match="weight 'a': wanted one of float32"):
            receive(update, group, ["a"], ["complex64"], [[1]])
        group.close()


def test_trainers_of_others_say_less() -> None:
    """A store without a WeightSender: only the caller knows the sizes."""
    store = StoreServer(HOST, 0)
    with socket.create_server((HOST, 0)) as listener:
        store.set(ID_KEY, b"llmpy tcp " + f"{HOST} {listener.getsockname()[1]}".encode())
        with running(listener.accept) as found:
            group = WeightGroup("cpu", "default", HOST, store.port, 1, 2, PATIENCE, 100, 2)
        with found[0][0]:
            with pytest.raises(UnsupportedError, match=r"does not say what it sends; use begin_update\(\) and receive\(\)"):
                receive_all(Taken(), group)
            found[0][0].sendall((24).to_bytes(8, "little") + bytes(24))
            update = Taken()
            receive(update, group, ["w"], ["torch.float32"], [(2, 3)])
            assert data(update) == {"w": bytes(24)}
            found[0][0].sendall((20).to_bytes(8, "little") + bytes(20))
            with pytest.raises(DeviceError, match="sends 20 bytes where 24 are expected"):
                receive(update, group, ["w"], ["float32"], [(2, 3)])
    store.close()


def test_nccl_wants_a_gpu() -> None:
    store = StoreServer(HOST, 0)
    store.set(ID_KEY, bytes(128))
    with pytest.raises(DeviceError, match="sends over NCCL, the engine is on the CPU; make WeightSender with device='cpu'"):
        WeightGroup("cpu", "default", HOST, store.port, 1, 2, PATIENCE, 100, 2)
    store.close()


# ---- over NCCL -------------------------------------------------------------------------------------------------------


def nccl_id() -> bytes:
    return _core.nccl_id(hardware.cuda_library(), hardware.nccl_library())


def test_a_group_of_one(cuda: str) -> None:
    deadline = Deadline(60, "nobody", lambda: False)
    channel = NcclChannel(cuda, nccl_id(), 0, 1, deadline)
    held = torch.cuda.mem_get_info()[0]
    for slot, n_bytes in ((0, 1 << 20), (1, 3 << 20), (0, 1 << 10)):
        channel.start(slot, n_bytes, deadline)
        address = channel.wait(slot, deadline)
        assert address % 256 == 0
        assert channel.aligned(address + 2, 64) % 256 == 0
    channel.close()
    channel.close()
    assert torch.cuda.mem_get_info()[0] > held
    with pytest.raises(DeviceError, match=r"the group has ended; make another with init_weight_group\(\)"):
        channel.wait(0, deadline)


def test_a_rank_that_does_not_come(cuda: str) -> None:
    start = time.monotonic()
    with pytest.raises(DeviceError, match="rank 1 has not answered within 1 s"):
        NcclChannel(cuda, nccl_id(), 0, 2, Deadline(1, "rank 1", lambda: False))
    assert time.monotonic() - start < 20
    with pytest.raises(DeviceError, match="rank 1 has gone"):
        NcclChannel(cuda, nccl_id(), 0, 2, Deadline(60, "rank 1", lambda: True))


def test_a_library_that_is_no_nccl(cuda: str) -> None:
    with pytest.raises(DeviceError, match=r"NCCL: wanted libnccl\.so\.2, have '/nowhere/.*; install nvidia-nccl-cu13"):
        _core.nccl_id(hardware.cuda_library(), "/nowhere/libnccl.so.2")
    with pytest.raises(DeviceError, match=r"NCCL: wanted version 2\.14 or newer"):
        _core.nccl_id(hardware.cuda_library(), hardware._in_process(("libc.so.6",)))


TRAINER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.cuda.set_device(1)
from memory_help import raw
from test_weight_group import tensors
from llmpy.rl import WeightSender
trainer = WeightSender("127.0.0.1", 0, 2, device="cuda:1", timeout=60, buffer_bytes=100)
send((trainer.master_port, {name: raw(tensor) for name, tensor in tensors("cuda:1").items()}))
while wait() == "send":
    send(tuple(trainer.send(tensors("cuda:1"))))
trainer._store.set("llmpy/update/2", b'{"tensors": [["a", "uint8", [1000]]], "buffer_bytes": 100}')
send("announced, never sent")
wait()
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_two_gpus(two_gpus: str, is_killed: bool) -> None:
    """The engine's side on the first GPU, a trainer's process on the second, which then stops in the middle of an update."""
    with Process(TRAINER, Path(__file__).parent) as trainer:
        port, expected = trainer.get()
        trainer.go("send")
        group = WeightGroup(two_gpus, "default", HOST, port, 1, 2, 60, 100, 2)
        for turn in range(2):
            update = Taken(two_gpus)
            update.groups["default"] = group
            if turn:
                trainer.go("send")
                receive(update, group, *weight_metadata(tensors()))
            else:
                receive_all(update, group)
            assert data(update) == expected
            assert trainer.get()[0] == 8
        trainer.go("stop")
        trainer.get()
        with running(lambda: receive_all(update, group, timeout=60 if is_killed else 2)) as found:
            time.sleep(1)
            start = time.monotonic()
            if is_killed:
                trainer.end(kill=True)
        wanted = "has gone" if is_killed else r"has not answered within 2 s"
        assert isinstance(found[0], DeviceError) and wanted in str(found[0])
        assert time.monotonic() - start < 20 and group.closed and not update.groups
    torch.ones(8, device=two_gpus).sum().item()  # the device is well


VLLM = """
import ctypes, pickle, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.cuda.set_device(1)
from torch.distributed import TCPStore
from memory_help import raw
from test_weight_group import tensors
from llmpy import _core, hardware
from llmpy.weights.group import Deadline, NcclChannel, packed

class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]

store = TCPStore("127.0.0.1", int(sys.argv[2]), world_size=2, is_master=True, use_libuv=False)
id = _core.nccl_id(hardware.cuda_library(), hardware.nccl_library())
store.set("broadcast_from/0/0", pickle.dumps(ncclUniqueId.from_buffer_copy(id)))
deadline = Deadline(60, "the engine", lambda: False)
channel = NcclChannel("cuda:1", id, 0, 2, deadline)
made = [tensor.contiguous().view(torch.uint8).view(-1) for tensor in tensors("cuda:1").values()]
for chunk in packed([tensor.numel() for tensor in made], 100):
    whole = torch.cat([made[i] for i in chunk])
    torch.cuda.synchronize()
    channel.broadcast(0, whole.data_ptr(), whole.numel(), deadline)
    channel.wait(0, deadline)
send({name: raw(tensor) for name, tensor in tensors("cuda:1").items()})
wait()
"""


def test_a_trainer_as_vllm_has_it(two_gpus: str) -> None:
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    with Process(VLLM, Path(__file__).parent, port) as trainer:
        group = WeightGroup(two_gpus, "default", HOST, port, 1, 2, 60, 100, 2)
        update = Taken(two_gpus)
        receive(update, group, *weight_metadata(tensors()))
        assert data(update) == trainer.get()
        group.close()
