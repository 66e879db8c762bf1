"""Engines on a socket whose answers break at every byte, hang, or are refusals: what the client of the router gets."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from llmpy.router import build_router, engines, parsed
from llmpy.router.proxy import find_router

FRAMES = [b'data: {"choices":[{"text":"%c"}]}\n\n' % letter for letter in b"abc"]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


PARTS = (b": waiting\n\n", *FRAMES, b"data: [DONE]\n\n")
STREAM, LUMP = HEAD + chunked(*PARTS), HEAD + chunked(b"".join(PARTS))
WHOLE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{"text":"abc"}'
HANDED = b'HTTP/1.1 200 OK\r\ncontent-length: 48\r\n\r\n{"kv_transfer_params": {"do_remote_prefill": 1}}'
GOOD = {True: b"".join(FRAMES) + b"data: [DONE]\n\n", False: b'{"text":"abc"}'}


def refusal(status):
    return b"HTTP/1.1 %d Busy\r\ncontent-length: 4\r\nretry-after: 7\r\n\r\nbusy" % status


class Fake:
    """An engine that answers with given bytes; None: never."""

    def __init__(self, answer, role=None):
        self.answer, self.role, self.asked, self.gone = answer, role, 0, asyncio.Event()

    async def __call__(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0] or 0))
                self.asked += 1
                if self.answer is None:
                    await reader.read()
                    raise EOFError
                writer.write(self.answer)
                await writer.drain()
                if self.answer not in (STREAM, LUMP, WHOLE, HANDED):
                    return
        except (EOFError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def router(*fakes, **options):
    """The application before fake engines, which count as healthy. The first one is chosen first."""
    servers = [await asyncio.start_server(fake, "127.0.0.1", 0) for fake in fakes]
    made = [parsed(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") for server in servers]
    for fake, one in zip(fakes, made, strict=True):
        one.problem, one.role = None, getattr(fake, "role", None)
    app = build_router(made, **options)
    try:
        yield app
    finally:
        for one in made:
            one.upstream.end()
        for server in servers:
            server.close()


async def ask(app, stream, receive=None):
    """Status, headers and body of an answer; an answer that is cut raises."""
    body, messages = json.dumps({"prompt": list(range(40)), "stream": stream}).encode(), []
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def given():
        if parts:
            return parts.pop()
        await (receive or asyncio.Event().wait)()
        return {"type": "http.disconnect"}

    async def send(message):
        messages.append(message)

    path = "/v1/completions"
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    scope |= {"http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": ""}
    await app(scope, given, send)
    start, *rest = messages
    assert not rest[-1].get("more_body")
    return start["status"], dict(start["headers"]), b"".join(one["body"] for one in rest)


def test_frames_with_other_ends():
    """Frames pass as they come, also those that end as lines of HTTP do."""

    async def main():
        answer = STREAM.replace(b"\n\n", b"\r\n\r\n").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        frames = [b": waiting\r\n\r\n", b'data: {"a": 1}\r\n\r\n', b"data: [DONE]\r\n\r\n"]
        for count in (2, 3):
            fake = Fake(answer + chunked(*frames[:count])[: None if count == 3 else -5])
            async with router(fake) as app:
                status, _, body = await ask(app, True)
                assert status == 200 and body.startswith(b"".join(frames[:count]))
                assert find_router(app).counts.broken == (count == 2) == (b"behind the first token" in body)

    asyncio.run(main())


@pytest.mark.parametrize("whole", [STREAM, LUMP, WHOLE], ids=["frames", "lump", "whole"])
def test_a_break_at_every_byte(whole):
    """Before the first token the other engine answers, whole; behind it the stream has whole frames and ends with an error."""
    stream = whole is not WHOLE
    first = whole.index(FRAMES[0]) + len(FRAMES[0]) if stream else len(whole)

    async def main():
        for cut in range(len(whole)):
            bad, good = Fake(whole[:cut]), Fake(whole)
            async with router(bad, good) as app:
                status, _, body = await ask(app, stream)
                state = find_router(app)
                assert status == 200 and bad.asked >= 1
                content = b"".join(part + b"\n\n" for part in body.split(b"\n\n") if part and not part.startswith(b":"))
                content = content if stream else body
                if cut < first:
                    assert content == GOOD[stream] and good.asked == 1 and state.counts.retries == 1, cut
                elif GOOD[stream] in content:  # the last frame had come; an answer without its end is no failure to the client
                    assert good.asked == 0
                else:
                    *frames, error, done = content.removesuffix(b"\n\n").split(b"\n\n")
                    assert frames == [frame.strip() for frame in FRAMES[: len(frames)]] and done == b"data: [DONE]"
                    assert "behind the first token" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
                    assert good.asked == 0 and state.counts.broken == 1
                assert all((one.running, one.waiting, one.pending) == (0, 0, 0) for one in state.engines)
                assert (state.engines[0].problem is None) == (cut >= len(whole))

    asyncio.run(main())


def test_a_break_at_every_byte_of_the_first_half():
    """The second half computes the prompt itself; nothing is left over."""

    async def main():
        for cut in range(len(HANDED) + 1):
            prefill, decode = Fake(HANDED[:cut], "prefill"), Fake(WHOLE, "decode")
            async with router(prefill, decode) as app:
                status, _, body = await ask(app, False)
                sent, state = json.loads(decode.body), find_router(app)
                assert (status, body, prefill.asked, decode.asked) == (200, GOOD[False], 1, 1)
                assert ("kv_transfer_params" in sent) == (cut == len(HANDED)) == (state.engines[0].problem is None)
                first = json.loads(prefill.body)
                assert first["max_tokens"] == 1 and first["kv_transfer_params"]["do_remote_decode"]
                assert all((one.running, one.waiting, one.pending) == (0, 0, 0) for one in state.engines)
        fakes = [Fake(b"", "prefill"), Fake(b"", "prefill"), Fake(WHOLE, "decode")]
        async with router(*fakes) as app:
            assert (await ask(app, False))[0] == 502 and fakes[2].asked == 0

    asyncio.run(main())


def test_busy_engines_hand_on():
    """429 and 503 go to the next engine; the last one's refusal is the client's."""

    async def main():
        for status in (429, 503):
            async with router(Fake(refusal(status)), Fake(WHOLE)) as app:
                assert (await ask(app, False))[0] == 200
                assert find_router(app).engines[0].problem is None
            async with router(Fake(refusal(status)), Fake(refusal(429))) as app:
                got, headers, body = await ask(app, False)
                assert (got, headers[b"retry-after"], body) == (429, b"7", b"busy")
        async with router(Fake(refusal(500)), Fake(WHOLE)) as app:
            assert (await ask(app, False))[0] == 500

    asyncio.run(main())


def test_a_client_that_goes_ends_a_request_that_waits():
    async def main():
        silent, gone = Fake(None), asyncio.Event()
        async with router(silent) as app:
            task = asyncio.ensure_future(ask(app, False, gone.wait))
            while not silent.asked:
                await asyncio.sleep(0.001)
            gone.set()
            assert (await task)[0] == 499
            await asyncio.wait_for(silent.gone.wait(), 10)
            assert find_router(app).engines[0].running == 0

    asyncio.run(main())


def test_an_engine_that_hangs_loses_its_requests(monkeypatch):
    """Two polls without an answer: requests without a token go to the other engine."""
    monkeypatch.setattr(engines, "POLL_TIMEOUT_S", 0.05)

    async def main():
        silent, good = Fake(None), Fake(WHOLE)
        async with router(silent, good) as app:
            task = asyncio.ensure_future(ask(app, False))
            while not silent.asked:
                await asyncio.sleep(0.001)
            engine = find_router(app).engines[0]
            for n in range(2):
                assert not task.done() and engine.silent_polls == n
                await engine.poll([])
            status, _, body = await asyncio.wait_for(task, 10)
            assert (status, body) == (200, GOOD[False]) and engine.problem == "the connection was closed"

    asyncio.run(main())


def test_a_request_that_makes_engines_fail():
    """It reaches two of them."""

    async def main():
        fakes = [Fake(b""), Fake(b""), Fake(WHOLE)]
        async with router(*fakes) as app:
            status, _, body = await ask(app, False)
            assert status == 502 and b"2 engines failed with this request" in body
            assert [fake.asked for fake in fakes] == [1, 1, 0]
            assert (await ask(app, False))[0] == 200

    asyncio.run(main())


def test_an_engine_that_refuses_a_body_unread():
    """Its answer reaches the client, and it stays healthy."""

    async def main():
        async def refuse(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(refusal(413))
            writer.close()

        async with router(refuse) as app:
            assert (await ask(app, False))[0] == 413
            assert find_router(app).engines[0].problem is None

    asyncio.run(main())


def test_an_answer_that_is_not_http():
    async def main():
        async with router(Fake(b"SSH-2.0-OpenSSH_9\r\n\r\n"), Fake(WHOLE)) as app:
            assert (await ask(app, False))[0] == 200
            assert "not HTTP" in find_router(app).engines[0].problem

    asyncio.run(main())


def test_the_end_of_the_router_ends_its_requests():
    async def main():
        silent = Fake(None)
        async with router(silent, Fake(WHOLE)) as app:
            task = asyncio.ensure_future(ask(app, False))
            while not silent.asked:
                await asyncio.sleep(0.001)
            state = find_router(app)
            state.is_draining = True
            assert (await ask(app, False))[0] == 503
            state.end_requests()
            status, _, body = await asyncio.wait_for(task, 10)
            assert status == 503 and b"shutting down" in body

    asyncio.run(main())
