"""Threads and loops outside the engine: any error, or a thread that cannot start, ends only one call."""

import asyncio
import itertools
import struct
import threading
import time
from types import SimpleNamespace

import pytest
from failures import PanicError, failing

from llmpy import DeviceError
from llmpy.rl._loop import LoopThread
from llmpy.rl._rpc import Client, Server
from llmpy.rl._trl_worker import RolloutWorker
from llmpy.weights.tcp_store import MAX_KEYS, MAX_MEMBER_BYTES, StoreClient, StoreServer

HOST, WAIT_S = "127.0.0.1", 30


ERRORS = [RuntimeError("r"), KeyError("k"), MemoryError(), PanicError("p"), SystemExit(3), OSError(24, "no more files")]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def no_thread(self):
    raise RuntimeError("can't start new thread")


# ---- the store of weight groups ------------------------------------------------------------------------------------------


def serves(store):
    client = StoreClient(HOST, store.port, WAIT_S)
    client.set("a", b"1")
    assert client.get("a", WAIT_S) == b"1"
    client.close()
    return True


@each_error
@pytest.mark.parametrize("place", ["_admit", "_answer"])
def test_the_store_goes_on(monkeypatch, error, place):
    store = StoreServer(HOST, 0)
    left = failing(monkeypatch, store, place, error)
    try:
        with pytest.raises(DeviceError, match="is no store"):
            StoreClient(HOST, store.port, 0.5)
        assert left == [0]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(DeviceError, match="is no store"):
                StoreClient(HOST, store.port, WAIT_S)
            with pytest.raises(RuntimeError, match="can't start"):
                StoreServer(HOST, 0)
        assert serves(store)
    finally:
        store.close()


def test_a_member_that_fails_is_counted_as_lost(monkeypatch):
    store = StoreServer(HOST, 0)
    client = StoreClient(HOST, store.port, WAIT_S)
    monkeypatch.setattr(store, "_change", lambda *args: 1 / 0)
    client.set("a", b"1")
    wait_for(lambda: store.num_lost == 1)
    store.close()


def test_a_member_may_not_fill_the_store():
    store = StoreServer(HOST, 0)
    greedy = StoreClient(HOST, store.port, WAIT_S)
    greedy.connection.sendall(bytes([1]) + struct.pack("=Q1sQ", 1, b"k", MAX_MEMBER_BYTES + 1))
    assert greedy.connection.recv(1) == b""  # closed before the value is read
    many = StoreClient(HOST, store.port, WAIT_S)
    with pytest.raises((ConnectionError, TimeoutError)):
        for i in range(MAX_KEYS + 1):
            many.set(f"key {i}", b"x")
        assert many.get(f"key {MAX_KEYS}", WAIT_S) == b"x"
    assert len(store._values) == MAX_KEYS
    store._values.clear()
    assert serves(store)
    store.close()


# ---- event loops in threads ----------------------------------------------------------------------------------------------


@each_error
def test_a_loop_thread_goes_on(monkeypatch, error):
    async def fail():
        raise error

    async def give():
        return 5

    loop = LoopThread("test-loop")
    try:
        with pytest.raises(type(error)):
            loop.submit(fail()).result(WAIT_S)
        assert loop.submit(give()).result(WAIT_S) == 5
        loop._loop.call_soon_threadsafe(lambda: [][error])  # a callback that fails
        assert loop.submit(give()).result(WAIT_S) == 5
    finally:
        loop.close()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start"):
        LoopThread("test-loop")


@pytest.mark.parametrize("error", [e for e in ERRORS if not isinstance(e, SystemExit)], ids=lambda error: type(error).__name__)
def test_calls_over_a_socket_go_on(error):
    """A SystemExit would end `asyncio.run` itself; the loops of LoopThread go on after one."""

    async def fail():
        raise error

    async def odd():
        return {1, 2}  # JSON has no sets

    async def cancel():
        raise asyncio.CancelledError

    async def give():
        return 5

    async def main():
        server = Server({"fail": fail, "give": give, "odd": odd, "cancel": cancel})
        await server.start()
        client = Client(server.path)
        async with asyncio.timeout(WAIT_S):
            for name, text in {"fail": type(error).__name__, "odd": "TypeError", "cancel": "CancelledError"}.items():
                with pytest.raises(RuntimeError, match=text):
                    await client.call(name)
                assert await client.call("give") == 5
            await client.close()
            await server.close()

    asyncio.run(main())


@pytest.mark.parametrize("line", [b"no json\n", b"{}\n", b"[" * 100_000 + b"\n"])
def test_an_answer_that_cannot_be_read_fails_the_calls(tmp_path, line):
    async def main():
        async def answer(reader, writer):
            await reader.readline()
            writer.write(line)

        server = await asyncio.start_unix_server(answer, tmp_path / "socket")
        client = Client(str(tmp_path / "socket"))
        async with asyncio.timeout(WAIT_S):
            for _ in range(2):  # the second one with a new connection
                with pytest.raises(ConnectionError):
                    await client.call("give")
        server.close()

    asyncio.run(main())


@each_error
def test_a_rollout_worker_tells_what_it_failed_of(error):
    def reward(**columns):
        raise error

    class Engine:
        async def generate(self, ids, params):
            return SimpleNamespace(token_ids=[1, 2])

    class Tokenizer:
        eos_token_id = 2

        def __call__(self, text):
            return {"input_ids": [1]}

        def decode(self, ids, skip_special_tokens):
            return "text"

    numbers = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    sizes = {"max_completion_length": 4, "num_generations": 2, "max_inflight_tasks": 2, "queue_maxsize": 4}
    args = SimpleNamespace(**numbers, **sizes, chat_template_kwargs=None)
    worker = RolloutWorker(Engine(), [{"prompt": "a"}], reward, Tokenizer(), args)
    worker.start()
    try:
        wait_for(worker._work.done)
        with pytest.raises(RuntimeError, match="the rollout worker failed") as caught:
            worker.check_health(WAIT_S)
        causes = list(itertools.islice(chain(caught.value), 5))
        assert error in causes
    finally:
        worker.stop()


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__
