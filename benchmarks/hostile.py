"""Hostile clients against one server process of this machine, beside honest ones that go on asking at their own pace.

    python benchmarks/hostile.py [--seconds 600] [--quiet 30] [--queued 10000] [--kinds slow,half_open,...] [--share 0.9]

Slow readers, half-open sockets, giant bodies, bytes that are no HTTP and text that is no UTF-8, disconnects at random moments,
and every few minutes thousands of requests at the same time; together they ask for less of the model than it has to give, since
nobody's requests are better than another's. Fails if the server dies, if honest clients complete less than `--share` of what
they completed in the quiet time before, or if, when the hostile ones have gone, requests or connections stay, or memory has
grown in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from server import n_files, resident_mib, server

from llmpy.cli.bench_serve import Answer
from llmpy.cli.http_client import HttpClient, HttpFailure

N_HONEST, PACE_S, N_TOKENS = 16, 1.0, 32
LIMITS = ("--stream-timeout", "10", "--max-model-len", "1024", "--served-model-name", "tiny")
MAX_GROWTH_MIB = 64
Endless = Coroutine[Any, Any, None]


def post(fields: dict[str, Any] | bytes, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """A request as bytes."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    length = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), length, body)


def talk(tokens: int, **more: Any) -> dict[str, Any]:
    """A request that streams so many tokens."""
    return {"prompt": [random.randrange(500), 1, 2], "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}


class Hostile:
    """Clients that mean no good. Each kind is one client's life, begun anew when it ends.

    Args:
        port: Of the server, on this machine.
        queued: Requests of a flood.
    """

    def __init__(self, port: int, queued: int) -> None:
        self._port, self._queued = port, queued
        self.seen: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def _open(self, buffer: int | None = None) -> Any:
        """A connection, which is reset when its user is done."""
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

    async def _status(self, raw: socket.socket) -> bytes:
        """The status of an answer."""
        head = await asyncio.get_running_loop().sock_recv(raw, 4096)
        return head[9:12]

    async def slow(self) -> None:
        """Asks for much and reads nothing, or a byte now and then."""
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
        """A body that is too long, never ends, or is dear to read."""
        kind = random.randrange(4)
        async with self._open() as raw:
            if kind == 0:
                await self._send(raw, post(b"[" * 65536, length=1 << 40))
            elif kind == 1:
                await self._send(raw, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
                for _ in range(40):
                    await self._send(raw, b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
            elif kind == 2:
                await self._send(raw, post(b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}"))
            else:
                await self._send(raw, b"GET / HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 60000) * 20)
            self.seen[f"giant {(await self._status(raw)).decode()}"] += 1
        await asyncio.sleep(0.5)

    async def garbage(self) -> None:
        """No HTTP, no JSON, no UTF-8."""
        async with self._open() as raw:
            kinds = [
                random.randbytes(400),
                post(b'{"prompt": "\xff\xfe\xc0\x80", "max_tokens": 2}'),
                post(b'{"prompt": "\\ud800", "max_tokens": 2}'),
                post(b"{" * 5000),
                post(talk(8, temperature="hot")),
                post({"messages": [{"role": "\x00", "content": None}]}, "/v1/chat/completions"),
                b"POST /%ff%00%c0 HTTP/1.1\r\nhost: x\r\n\r\n",
            ]
            await self._send(raw, random.choice(kinds))
            self.seen[f"garbage {(await self._status(raw)).decode(errors='replace')}"] += 1
        await asyncio.sleep(0.1)

    async def leaving(self) -> None:
        """Goes away at any moment."""
        async with self._open() as raw:
            await self._send(raw, post(talk(random.choice([1, 50, 500]))))
            await asyncio.sleep(random.expovariate(5))

    async def flood(self) -> None:
        """Many requests at once, each on a connection of its own; then a rest."""
        gate = asyncio.Semaphore(512)

        async def one() -> None:
            try:
                async with self._open() as raw:
                    async with gate:
                        await self._send(raw, post(talk(4)))
                    self.seen[f"flood {(await asyncio.wait_for(self._status(raw), 60)).decode()}"] += 1
            except (OSError, TimeoutError) as error:
                self.seen[f"flood {type(error).__name__}"] += 1

        await asyncio.gather(*[one() for _ in range(self._queued)])
        await asyncio.sleep(240)

    async def forever(self, life: Callable[[], Endless]) -> None:
        """One client after another."""
        while True:
            try:
                await life()
            except (OSError, TimeoutError) as error:
                self.seen[f"{life.__name__} {type(error).__name__}"] += 1
            self.seen[life.__name__] += 1
            await asyncio.sleep(0.01)


KINDS = {"slow": 12, "half_open": 300, "giant": 2, "garbage": 4, "leaving": 4, "flood": 1}


class Honest:
    """Clients that ask at their own pace; one that is refused comes back after a second.

    Args:
        url: Of the server.
    """

    def __init__(self, url: str) -> None:
        self._client = HttpClient(url)
        self.done, self.refused = 0, 0
        self.times: list[float] = []

    async def run(self) -> None:
        """One client."""
        while True:
            begin = time.perf_counter()
            answer = Answer(3, sent=begin)
            try:
                body = json.dumps({**talk(N_TOKENS), "stream_options": {"include_usage": True}}).encode()
                answer.end(await self._client.post("/v1/completions", body, answer.take))
            except HttpFailure as error:
                answer.error = str(error)
            if answer.error is None and answer.output_tokens == N_TOKENS:
                self.done += 1
                self.times.append(time.perf_counter() - begin)
                await asyncio.sleep(max(0.0, begin + PACE_S - time.perf_counter()))
            else:
                self.refused += 1
                await asyncio.sleep(1)

    def take(self, seconds: float) -> tuple[float, str]:
        """Requests a second since the last call, and a line about them."""
        rate, times = self.done / seconds, sorted(self.times) or [0.0]
        middle, late = times[len(times) // 2], times[len(times) * 99 // 100]
        line = f"{rate:.1f} requests/s, median {1e3 * middle:.0f} ms, 99 % within {late:.2f} s"
        line += f", {self.refused} refused"
        self.done, self.refused, self.times = 0, 0, []
        return rate, line


async def state(url: str, pid: int) -> tuple[float, int, dict[str, Any]]:
    """Memory, open files, and what /load says."""
    client = HttpClient(url)
    try:
        load = await client.get("/load")
    finally:
        client.close()
    return resident_mib(pid), n_files(pid), load


async def run(given: argparse.Namespace, url: str, pid: int) -> list[str]:
    """The whole run; what was wrong."""
    honest = Honest(url)
    asking = [asyncio.create_task(honest.run()) for _ in range(N_HONEST)]
    await asyncio.sleep(min(5, given.quiet))
    honest.take(1)
    await asyncio.sleep(given.quiet)
    before, line = honest.take(given.quiet)
    memory, files, load = await state(url, pid)
    print(f"quiet:   {line}; {memory:.0f} MiB, {files} files", flush=True)

    hostile = Hostile(urlsplit(url).port or 0, given.queued)
    kinds = given.kinds.split(",")
    tasks = [asyncio.create_task(hostile.forever(getattr(hostile, kind))) for kind in kinds for _ in range(KINDS[kind])]
    rates, left = [], given.seconds
    while left > 0:
        part = min(60.0, left)
        await asyncio.sleep(part)
        rate, line = honest.take(part)
        rates.append((rate, part))
        now_memory, now_files, load = await state(url, pid)
        memory = now_memory if left > given.seconds / 2 or len(rates) == 1 else memory
        left -= part
        print(f"hostile: {line}; {now_memory:.0f} MiB, {now_files} files, {load}", flush=True)
    for task in (*tasks, *asking):
        task.cancel()
    await asyncio.gather(*tasks, *asking, return_exceptions=True)
    print(f"hostile clients: {dict(sorted(hostile.seen.items()))}")

    deadline = time.monotonic() + 120
    while True:
        await asyncio.sleep(1)
        after, after_files, load = await state(url, pid)
        idle = load["running"] == load["waiting"] == 0 and load["server_load"] <= 1 and after_files <= files
        if idle or time.monotonic() > deadline:
            break
    print(f"after:   {after:.0f} MiB, {after_files} files, {load}")
    during = sum(rate * part for rate, part in rates) / given.seconds
    print(f"honest clients keep {during / before:.1%} of their rate")
    wrong = [] if during >= given.share * before else [f"honest clients kept less than {given.share:.0%} of their rate"]
    wrong += [] if idle else ["requests or files stayed"]
    growth = after - memory
    wrong += [] if growth < MAX_GROWTH_MIB else [f"memory grew by {growth:.0f} MiB"]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quiet", type=float, default=30)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--share", type=float, default=0.9)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with server(*LIMITS) as (url, pid):
        wrong = asyncio.run(run(given, url, pid))
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
