"""A failure in a task, a timer or a thread of the server ends one request, and the next request is served."""

import asyncio
import socket
import threading
import time

import msgspec
import pytest
import zmq
from failures import PanicError, failing

from llmpy import AsyncEngine
from llmpy.engine.feeds import Feed, RequestStream
from llmpy.server import build_app, connections, frames
from llmpy.server.app import find_service
from llmpy.server.batch import call
from llmpy.server.kv_events import KvEventPublisher

WAIT_S = 60
ASK = {"prompt": "hello", "max_tokens": 2}


ERRORS = [RuntimeError, KeyError, MemoryError, PanicError]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)


HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES = {
    "/v1/completions": ASK,
    "/v1/chat/completions": HELLO,
    "/v1/messages": {**HELLO, "model": "tiny"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}


async def ask(app, path="/v1/completions", **body):
    """Status and content of an answer; None if the connection ends without one."""
    async with asyncio.timeout(WAIT_S):
        try:
            status, content = await call(app, path, msgspec.json.encode({**BODIES[path], **body}))
        except TimeoutError:
            raise
        except BaseException as error:
            return None, repr(error)
    return status, content


async def serves(app):
    status, content = await ask(app)
    assert status == 200, content
    status, content = await ask(app, prompt=["a", "b"], stream=True)
    assert status == 200 and content.endswith(b"data: [DONE]\n\n")
    return True


@each_error
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_one_of_two_prompts(engine, monkeypatch, error, stream):
    app = build_app(engine, served_model_name=("tiny",))

    async def main():
        left = failing(monkeypatch, Feed, "next_output", error("told"))
        status, content = await ask(app, prompt=["a", "b"], stream=stream)
        if stream:
            assert left == [0]
            assert status is None or b"error" in content, content
        assert await serves(app)

    asyncio.run(main())


@each_error
@pytest.mark.parametrize("path", BODIES)
def test_an_error_in_an_answer(engine, monkeypatch, error, path):
    app = build_app(engine, served_model_name=("tiny",))

    async def main():
        for stream, name in ((False, "final_output"), (True, "next_output")):
            with monkeypatch.context() as patch:
                left = failing(patch, Feed, name, error("told"), times=2)
                status, content = await ask(app, path, stream=stream)
                assert left != [2]
                assert status in (500, None) or b"error" in content or b"failed" in content, content
                if not stream and error is not PanicError:
                    assert status == (503 if error is MemoryError else 500)
            assert await serves(app)

    asyncio.run(main())


@each_error
def test_an_error_in_a_background_response(engine, monkeypatch, error):
    app = build_app(engine, keep_responses=4)

    async def main():
        with monkeypatch.context() as patch:
            failing(patch, RequestStream, "_final", error("told"))
            status, content = await ask(app, "/v1/responses", background=True)
            assert status == 200
            kept = msgspec.json.decode(content)["id"]
            async with asyncio.timeout(WAIT_S):
                while (found := find_service(app).responses.get(None, kept).whole())["status"] == "in_progress":
                    await asyncio.sleep(0.01)
            assert found["status"] == "failed"
        assert await serves(app)

    asyncio.run(main())


@each_error
def test_an_error_in_a_timer(engine, monkeypatch, error):
    """An unread stream ends even after an error in its timer."""
    monkeypatch.setattr(frames, "COMMENT_S", 0.02)

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        left, comments = [2], []

        async def made():
            await asyncio.sleep(0.5)
            yield b"data: [DONE]\n\n"

        async def send(message):
            if message.get("body") == frames.COMMENT:
                comments.append(message)

        def broken(work, **rest):
            if left[0] and work.__qualname__.endswith("send"):
                left[0] -= 1
                work.close()
                raise error("told")
            return real(work, **rest)

        real = asyncio.ensure_future
        monkeypatch.setattr(asyncio, "ensure_future", broken)
        async with asyncio.timeout(WAIT_S):
            await frames.EventStream(made(), {}, 60)({}, asyncio.Event().wait, send)
        assert left == [0] and comments

    asyncio.run(main())


@each_error
def test_an_error_in_a_sweep(engine, running, monkeypatch, error, http):
    """The sweep of connections continues after an error."""
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    left = failing(monkeypatch, connections.Clock, "passed", error("told"), times=3)
    server = running(build_app(engine), http=connections.bounded(100, 60.0))
    with socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.settimeout(WAIT_S)
        idle.sendall(b"POST /v1")
        assert idle.recv(1) == b""
    assert left == [0]
    assert http.post(f"{server.url}/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize("error", [RuntimeError, KeyError, MemoryError, PanicError, SystemExit, zmq.ZMQError])
def test_events_go_on(tmp_path, write_model, monkeypatch, error):
    engine = AsyncEngine(write_model(tmp_path), device="cpu", kv_cache_memory_bytes="256KiB", kv_event_capacity=4096)
    try:
        address = f"ipc://{tmp_path}/events"
        publisher = KvEventPublisher(engine, "topic", address)
        with zmq.Context() as context, context.socket(zmq.SUB) as reader:
            reader.connect(address)
            reader.subscribe(b"")
            time.sleep(0.3)  # ZeroMQ does not tell when a subscription has arrived
            left = failing(monkeypatch, engine, "kv_events", error(), times=2)
            while left[0]:
                time.sleep(0.005)
            asyncio.run(answered(engine, list(range(40))))
            assert reader.poll(1000 * WAIT_S)
            topic, _, payload = reader.recv_multipart()
            assert topic == b"topic" and msgspec.msgpack.decode(payload)[1]
        publisher.close()
    finally:
        engine.close()


async def answered(engine, prompt):
    return await engine.generate(prompt, max_tokens=2)


def test_events_without_a_thread(engine, tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    address = f"ipc://{tmp_path}/events"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            KvEventPublisher(engine, "topic", address)
    KvEventPublisher(engine, "topic", address).close()
