"""Hostile clients in a separate process, which `python benchmarks/hostile.py` starts.

    python benchmarks/hostile_clients.py --port 8000 [--queued 10000] [--kinds slow,half_open,...]

A client of a kind runs through that kind's actions again and again. The process ends when its standard input ends. Then it
prints the answers that it got, and those that no server should give.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

Endless = Coroutine[Any, Any, None]
KINDS = {
    "slow": 12,
    "half_open": 300,
    "giant": 2,
    "garbage": 4,
    "leaving": 4,
    "flood": 1,
    "prompts": 2,
    "words": 2,
    "tokenise": 4,
    "stalled": 12,
    "origin": 1,
    "smuggle": 1,
}
"""Number of clients of each kind."""
SPREAD_S = 20.0
"""The longest run of a client. The clients of a kind start spread over this time."""
MIB = 1 << 20


def post(fields: dict[str, Any] | bytes, path: str = "/v1/completions", length: int | None = None, head: str = "") -> bytes:
    """A request as bytes.

    Args:
        fields: Its body.
        path: Path of the request.
        length: Content-Length; None = the body's length.
        head: Further header lines.
    """
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    length = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{head}content-length: {length}\r\n\r\n".encode() + body


def talk(tokens: int, **more: Any) -> dict[str, Any]:
    """A request that streams this number of tokens."""
    return {"prompt": [random.randrange(500), 1, 2], "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}


def giant_prompts() -> list[bytes]:
    """Texts that exceed every model, on every path that takes text: words, one word, white space, characters of many bytes."""
    texts = ["hello world " * (10 * MIB // 12), "x" * (15 * MIB), " " * (10 * MIB), "字" * (3 * MIB)]
    made = [post({"prompt": text, "max_tokens": 1}) for text in texts]
    turns = [{"role": "user", "content": texts[0]}]
    made += [post({"messages": turns, "max_tokens": 1}, path) for path in ("/v1/chat/completions", "/v1/messages")]
    made.append(post({"messages": turns}, "/v1/messages/count_tokens"))
    made += [post({"prompt": texts[0]}, path) for path in ("/tokenize", "/v1/completions/render")]
    return made


def giant_words() -> list[bytes]:
    """Lists of bad words and stop strings, too long or too many."""
    lists = [["abc " * (MIB // 2)], [f"zq{number}" for number in range(100_000)]]
    made = [post(talk(4, **{field: words})) for field in ("bad_words", "stop") for words in lists]
    for field in ("bad_words", "stop"):
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, field: lists[1]}}
        made.append(post(body, "/inference/v1/generate"))
    return made


def long_texts() -> list[bytes]:
    """Texts to tokenise, as long as allowed, on paths that run no model."""
    text = "some words " * 36_000
    turns = [{"role": "user", "content": text}]
    made = [post({"prompt": text}, path) for path in ("/tokenize", "/v1/completions/render")]
    return [*made, post({"messages": turns}, "/v1/messages/count_tokens"), post({"messages": turns}, "/tokenize")]


class Hostile:
    """The clients.

    Args:
        port: Port of the server on this machine.
        queued: Number of requests of a flood.
    """

    def __init__(self, port: int, queued: int) -> None:
        self._port, self._queued = port, queued
        self.seen: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._prompts, self._words, self._texts = giant_prompts(), giant_words(), long_texts()

    @contextlib.asynccontextmanager
    async def _open(self, buffer: int | None = None) -> Any:
        """A connection; leaving the block resets it."""
        raw = socket.socket()
        raw.setblocking(False)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        try:
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self._port))
            yield raw
        finally:
            raw.close()

    async def _send(self, raw: socket.socket, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(raw, data)

    async def _status(self, raw: socket.socket) -> str:
        """The status of an answer."""
        head = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 4096), 120)
        return head[9:12].decode(errors="replace")

    async def _expect(self, kind: str, request: bytes, *wanted: str) -> None:
        """Sends a request and records the answer. A status outside of `wanted` is wrong, except 429 and 503."""
        async with self._open() as raw:
            await self._send(raw, request)
            status = await self._status(raw)
        self.seen[f"{kind} {status}"] += 1
        if status not in (*wanted, "429", "503"):
            self.wrong[f"{kind} {status}"] += 1

    async def slow(self) -> None:
        """Requests much output and reads nothing, or a byte now and then."""
        async with self._open(4096) as raw:
            await self._send(raw, post(talk(900, logprobs=20)))
            for _ in range(20):
                await asyncio.sleep(1)
                if random.random() < 0.5:
                    await asyncio.get_running_loop().sock_recv(raw, 1)

    async def half_open(self) -> None:
        """Connects and sends nothing, or half a request."""
        request = post(talk(8))
        async with self._open() as raw:
            await self._send(raw, request[: random.choice([0, 10, 40, len(request) - 1])])
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 1), 90)

    async def giant(self) -> None:
        """Sends a body that is too long, never ends, or is expensive to parse."""
        kind = random.randrange(4)
        async with self._open() as raw:
            if kind == 0:
                await self._send(raw, post(b"[" * 65536, length=1 << 40))
            elif kind == 1:
                await self._send(raw, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
                for _ in range(40):
                    await self._send(raw, b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
            elif kind == 2:
                await self._send(raw, post(b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}"))
            else:
                await self._send(raw, b"GET / HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 60000) * 20)
            self.seen[f"giant {await self._status(raw)}"] += 1
        await asyncio.sleep(0.5)

    async def garbage(self) -> None:
        """Sends bytes that are not HTTP, not JSON or not UTF-8."""
        async with self._open() as raw:
            kinds = [
                random.randbytes(400),
                post(b'{"prompt": "\xff\xfe\xc0\x80", "max_tokens": 2}'),
                post(b'{"prompt": "\\ud800", "max_tokens": 2}'),
                post(b"{" * 5000),
                post(talk(8, temperature="hot")),
                post({"messages": [{"role": "\x00", "content": None}]}, "/v1/chat/completions"),
                b"POST /%ff%00%c0 HTTP/1.1\r\nhost: localhost\r\n\r\n",
            ]
            await self._send(raw, random.choice(kinds))
            self.seen[f"garbage {await self._status(raw)}"] += 1
        await asyncio.sleep(0.1)

    async def leaving(self) -> None:
        """Disconnects at a random moment."""
        async with self._open() as raw:
            await self._send(raw, post(talk(random.choice([1, 50, 500]))))
            await asyncio.sleep(random.expovariate(5))

    async def flood(self) -> None:
        """Sends many requests at once, each on a separate connection; runs only once."""
        gate = asyncio.Semaphore(512)

        async def one() -> None:
            try:
                async with self._open() as raw:
                    async with gate:
                        await self._send(raw, post(talk(4)))
                    self.seen[f"flood {await self._status(raw)}"] += 1
            except (OSError, TimeoutError) as error:
                self.seen[f"flood {type(error).__name__}"] += 1

        await asyncio.gather(*[one() for _ in range(self._queued)])
        await asyncio.sleep(3600)

    async def prompts(self) -> None:
        """Sends texts of many megabytes, which exceed every model; sometimes does not wait for the answer."""
        request = random.choice(self._prompts)
        if random.random() < 0.3:
            async with self._open() as raw:
                await self._send(raw, request)
        else:
            await self._expect("prompts", request, "400")
        await asyncio.sleep(0.5)

    async def words(self) -> None:
        """Sends words of megabytes, and hundreds of thousands of words."""
        await self._expect("words", random.choice(self._words), "400")
        await asyncio.sleep(0.5)

    async def tokenise(self) -> None:
        """Sends texts of the greatest allowed length, again and again."""
        await self._expect("tokenise", random.choice(self._texts), "200", "400")
        await asyncio.sleep(0.2)

    async def stalled(self) -> None:
        """Sends a long body without its last byte."""
        async with self._open() as raw:
            await self._send(raw, post(b" " * (8 * MIB - 1), length=8 * MIB))
            self.seen[f"stalled {await self._status(raw)}"] += 1
        await asyncio.sleep(1)

    async def origin(self) -> None:
        """Sends the requests that a page of another origin can make a browser send."""
        head = "origin: https://elsewhere.example\r\ncontent-type: text/plain\r\n"
        await self._expect("origin", post(talk(4), head=head), "403")
        await self._expect("origin", b"GET /v1/models HTTP/1.1\r\nhost: elsewhere.example\r\n\r\n", "403")
        await asyncio.sleep(1)

    async def smuggle(self) -> None:
        """Sends a request within a request: one body with two lengths."""
        inner = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
        body = b"0\r\n\r\n" + inner
        async with self._open() as raw:
            await self._send(raw, post(body, head="transfer-encoding: chunked\r\n"))
            answer = b""
            with contextlib.suppress(TimeoutError, OSError):
                while part := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 65536), 10):
                    answer += part
        self.seen[f"smuggle {answer[9:12].decode(errors='replace')}"] += 1
        if answer.count(b"HTTP/1.1 ") > 1 or answer[9:12] not in (b"400", b"429", b"503", b""):
            self.wrong["smuggle answered"] += 1
        await asyncio.sleep(1)

    async def forever(self, life: Callable[[], Endless]) -> None:
        """Runs one client after another; the first starts after a random delay."""
        await asyncio.sleep(random.random() * SPREAD_S)
        while True:
            try:
                await life()
            except (OSError, TimeoutError) as error:
                self.seen[f"{life.__name__} {type(error).__name__}"] += 1
            self.seen[life.__name__] += 1
            await asyncio.sleep(0.01)


async def run(given: argparse.Namespace) -> None:
    """Runs all clients until the standard input ends, and then does not wait for them."""
    hostile = Hostile(given.port, given.queued)
    kinds = given.kinds.split(",")
    tasks = [asyncio.create_task(hostile.forever(getattr(hostile, kind))) for kind in kinds for _ in range(KINDS[kind])]
    await asyncio.to_thread(sys.stdin.read)
    assert tasks
    print(json.dumps({"seen": hostile.seen, "wrong": hostile.wrong}), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.nice(19)  # real clients run on other machines and use none of these processors
    asyncio.run(run(given))


if __name__ == "__main__":
    main()
