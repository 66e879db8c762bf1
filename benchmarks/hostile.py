"""Hostile clients attack one server process of this machine while honest clients send requests at their usual pace.

    python benchmarks/hostile.py [--seconds 600] [--quiet 30] [--queued 10000] [--kinds slow,half_open,...] [--share 0.9]
                                 [--times 3] [--flood-seconds 60] [--flood-share 0.5] [--no-ends] [--no-tls]

Slow readers, half-open sockets, giant bodies, bytes that are not HTTP, text that is not UTF-8, disconnects at random moments,
texts and words of megabytes, floods of texts to tokenise, long bodies that stop, requests of other origins, requests within
requests (hostile_clients.py). Together they need less of the model than it can compute, because the server serves all clients'
requests alike. At the end two floods of thousands of requests fill the queue. The benchmark fails if

- the server dies, or a hostile client gets an answer that it should not get,
- honest clients complete less than `--share` of the rate that they had alone (`--flood-share` in a flood), or their slowest
  hundredth takes more than `--times` as long (not checked in a flood),
- /health says that requests are served while they are not, or the other way round,
- requests or connections stay after a flood; memory has grown in the second half beside hostile clients, or by the second
  flood (the allocator keeps the memory of the first),
- half-open TLS handshakes block other clients for longer than their deadline,
- SIGTERM does not end a server in any state, with its log read or not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hostile_clients import KINDS, long_texts, post, talk
from server import engine_words, n_files, resident_mib, write_model

from llmpy.cli.bench_serve import Answer
from llmpy.cli.http_client import HttpClient, HttpFailure

N_HONEST, PACE_S, N_TOKENS = 16, 1.0, 32
POSITIONS = 65536
N_THREADS = 1
"""Threads of the engine. The clients use the machine's other processors; a step's threads would wait for each other."""
LIMITS = ("--stream-timeout", "10", "--served-model-name", "tiny")
MAX_GROWTH_MIB = 64
END_S, SHUTDOWN_S = 20.0, 2
TLS_CONNECTIONS = 64
TLS_S = 20.0
"""Most seconds until a server answers again after half-open handshakes have taken all of its connections."""


# ---- servers -------------------------------------------------------------------------------------------------------------


class Process:
    """A server process.

    Args:
        model: Its model's folder.
        options: Options of `llmpy serve`.
    """

    def __init__(self, model: Path, *options: str) -> None:
        words = [sys.executable, "-m", "llmpy", "serve", str(model), "--port", "0", *engine_words(), *LIMITS, *options]
        environment = {**os.environ, "LLMPY_NUM_THREADS": str(N_THREADS)}
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, env=environment, text=True, errors="replace")
        assert self._process.stderr is not None
        self.log: list[str] = []
        for line in iter(self._process.stderr.readline, ""):
            self.log.append(line)
            if line.startswith("http"):
                self.url = line.strip().removesuffix("/v1")
                break
        else:
            raise RuntimeError("".join(self.log))
        self.pid, self.port = self._process.pid, urlsplit(self.url).port or 0
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        """Reads the log and keeps its end."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log = [*self.log[-200:], line]

    def read_log(self) -> None:
        """Continues to read the log."""
        self._reader.start()

    def close_log(self) -> None:
        """Stops reading the log and closes it."""
        assert self._process.stderr is not None
        self._process.stderr.close()

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def end(self, seconds: float) -> float | None:
        """Sends SIGTERM. Returns the seconds until the process ended, or None if it had to be killed."""
        begin = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
            return time.perf_counter() - begin
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None


@contextlib.contextmanager
def started(model: Path, *options: str) -> Iterator[Process]:
    """A server whose log is read; leaving the block ends the server."""
    process = Process(model, *options)
    process.read_log()
    try:
        yield process
    finally:
        if process.is_alive and process.end(120) is None:
            raise RuntimeError("the server did not end")


@contextlib.contextmanager
def attacked(port: int, kinds: str, queued: int, told: dict[str, Any]) -> Iterator[None]:
    """Runs hostile clients during the block; `told` gets their report."""
    words = [sys.executable, str(Path(__file__).parent / "hostile_clients.py"), "--port", str(port), "--kinds", kinds]
    process = subprocess.Popen([*words, "--queued", str(queued)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        told.update(json.loads(process.communicate(b"", 120)[0]))


# ---- honest clients ------------------------------------------------------------------------------------------------------


class Honest:
    """Clients that send requests at their usual pace; a refused client retries after a second.

    Args:
        url: Of the server.
    """

    def __init__(self, url: str) -> None:
        self._client = HttpClient(url)
        self.done, self.refused = 0, 0
        self.times: list[float] = []
        self.reasons: Counter[str] = Counter()

    async def ask(self) -> float | None:
        """Sends one request. Returns its seconds, or None if it was refused."""
        begin = time.perf_counter()
        answer = Answer(3, sent=begin)
        try:
            body = json.dumps({**talk(N_TOKENS), "stream_options": {"include_usage": True}}).encode()
            answer.end(await self._client.post("/v1/completions", body, answer.take))
        except HttpFailure as error:
            answer.error = str(error)
        if answer.error is None and answer.output_tokens == N_TOKENS:
            return time.perf_counter() - begin
        self.reasons[str(answer.error)[:100]] += 1
        return None

    async def run(self) -> None:
        """One client."""
        while True:
            begin = time.perf_counter()
            took = await self.ask()
            if took is not None:
                self.done += 1
                self.times.append(took)
                await asyncio.sleep(max(0.0, begin + PACE_S - time.perf_counter()))
            else:
                self.refused += 1
                await asyncio.sleep(1)

    def take(self, seconds: float) -> tuple[float, list[float], str]:
        """Returns the requests a second since the last call, their times, and a line of text about them."""
        rate, times = self.done / seconds, sorted(self.times) or [0.0]
        line = f"{rate:.1f} requests/s, median {1e3 * times[len(times) // 2]:.0f} ms, 99 % within {1e3 * late(times):.0f} ms"
        line += f", {self.refused} refused"
        self.done, self.refused, self.times = 0, 0, []
        return rate, times, line


def late(times: list[float]) -> float:
    """The 99th percentile of the times."""
    return sorted(times)[len(times) * 99 // 100]


class Doctor:
    """Asks a server for its health, then for an answer, and compares the two.

    Args:
        url: Of the server.
    """

    def __init__(self, url: str) -> None:
        self._client, self._honest = HttpClient(url), Honest(url)
        self.asked = 0
        self.wrong: Counter[str] = Counter()

    async def run(self) -> None:
        """Once a second."""
        while True:
            before, begin = await self._says(), time.perf_counter()
            took = await self._honest.ask()
            after = await self._says()
            self.asked += 1
            if before == after and before != (took is not None) and not self._is_busy():
                self.wrong[f"/health says {before}, {dict(self._honest.reasons)} in {time.perf_counter() - begin:.1f} s"] += 1
            self._honest.reasons.clear()
            await asyncio.sleep(1)

    def _is_busy(self) -> bool:
        """True if the last answer was that the queue is full, which is a healthy state."""
        return any("429" in reason or "queue" in reason for reason in self._honest.reasons)

    async def _says(self) -> bool:
        try:
            await self._client.get("/health")
        except HttpFailure:
            return False
        return True


# ---- the run -------------------------------------------------------------------------------------------------------------


async def state(process: Process) -> tuple[float, int, dict[str, Any]]:
    """Memory, open files, and the answer of /load."""
    client = HttpClient(process.url)
    try:
        load = await client.get("/load")
    finally:
        client.close()
    return resident_mib(process.pid), n_files(process.pid), load


class Watched:
    """Honest clients and a server, observed minute by minute.

    Args:
        process: The server.
    """

    def __init__(self, process: Process) -> None:
        self.process, self.honest, self.doctor = process, Honest(process.url), Doctor(process.url)
        self.seen: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.memory: list[float] = []

    async def alone(self, seconds: float) -> tuple[float, list[float]]:
        """The honest clients' rate and times without hostile clients, measured after the first seconds."""
        await asyncio.sleep(min(5, seconds))
        self.honest.take(1)
        await asyncio.sleep(seconds)
        rate, times, line = self.honest.take(seconds)
        print(f"quiet:   {line}", flush=True)
        return rate, times

    async def attacked(self, seconds: float, kinds: str, queued: int) -> tuple[float, list[float]]:
        """The same beside hostile clients."""
        told: dict[str, Any] = {}
        done, times, left = 0.0, [0.0], seconds
        with attacked(self.process.port, kinds, queued, told):
            while left > 0 and self.process.is_alive:
                part = min(60.0, left)
                await asyncio.sleep(part)
                rate, some, line = self.honest.take(part)
                done, times, left = done + rate * part, times + some, left - part
                memory, files, load = await state(self.process)
                self.memory.append(memory)
                print(f"hostile: {line}; {memory:.0f} MiB, {files} files, {load}", flush=True)
        self.seen.update(told["seen"])
        self.wrong.update(told["wrong"])
        return done / seconds, times


async def run(given: argparse.Namespace, process: Process) -> list[str]:
    """Honest clients alone, beside hostile clients, and beside two floods. Returns what was wrong."""
    kinds = given.kinds.split(",")
    others, n_floods = [kind for kind in kinds if kind != "flood"], 2 if "flood" in kinds else 0
    watched = Watched(process)
    asking = [asyncio.create_task(watched.honest.run()) for _ in range(N_HONEST)]
    before, quiet = await watched.alone(given.quiet)
    _, files, _ = await state(process)
    asking.append(asyncio.create_task(watched.doctor.run()))
    during, times = await watched.attacked(given.seconds, ",".join(others), 0) if others else (before, quiet)
    beside, flooded, behind = watched.memory[len(watched.memory) // 2 :], before, []
    for _ in range(n_floods):
        rate, _ = await watched.attacked(given.flood_seconds, ",".join(kinds), given.queued)
        if not process.is_alive:
            break
        flooded, behind = min(flooded, rate), [*behind, await settled(process, files)]
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    print(f"hostile clients: {dict(sorted(watched.seen.items()))}")
    if not process.is_alive:
        return ["the server died:\n" + "".join(process.log[-20:])]
    slower, doctor = late(times) / late(quiet), watched.doctor
    print(f"honest clients keep {during / before:.1%} of their rate, in a flood {flooded / before:.1%}; ", end="")
    print(f"their slowest hundredth takes {slower:.1f} times as long, but in the flood")
    right = doctor.asked - sum(doctor.wrong.values())
    print(f"/health was right {right} of {doctor.asked} times; refusals: {dict(watched.honest.reasons)}")
    wrong = [f"a hostile client got {answer}, {count} times" for answer, count in watched.wrong.items()]
    wrong += [] if during >= given.share * before else [f"honest clients kept less than {given.share:.0%} of their rate"]
    wrong += [] if flooded >= given.flood_share * before else [f"in the flood they kept less than {given.flood_share:.0%}"]
    wrong += [] if slower <= given.times else [f"honest requests took more than {given.times:g} times as long"]
    wrong += [f"{line}, {count} times" for line, count in doctor.wrong.items()]
    wrong += [] if all(is_idle for is_idle, _ in behind) else ["requests or files stayed"]
    memories = {"beside hostile clients": beside, "from one flood to the next": [memory for _, memory in behind]}
    grown = {when: seen[-1] - seen[0] for when, seen in memories.items() if seen}
    return wrong + [f"memory grew by {mib:.0f} MiB {when}" for when, mib in grown.items() if mib >= MAX_GROWTH_MIB]


async def settled(process: Process, files: int) -> tuple[bool, float]:
    """True if all requests and connections of the hostile clients ended within two minutes; and the MiB of memory then."""
    deadline = time.monotonic() + 120
    while True:
        await asyncio.sleep(1)
        after, after_files, load = await state(process)
        idle = load["running"] == load["waiting"] == 0 and load["server_load"] <= 1 and after_files <= files
        if idle or time.monotonic() > deadline:
            print(f"after:   {after:.0f} MiB, {after_files} files, {load}")
            return idle, after


# ---- handshakes ----------------------------------------------------------------------------------------------------------


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    made = folder / "certificate.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*words, "-out", str(made[0]), "-keyout", str(made[1])], check=True, capture_output=True)
    return made


def handshakes(model: Path) -> list[str]:
    """Opens many connections that never begin a handshake. Returns what was wrong."""
    certfile, keyfile = certificate(model)
    trust = ssl.create_default_context(cafile=str(certfile))
    trust.check_hostname = False
    options = ("--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile), "--max-connections", str(TLS_CONNECTIONS))
    with started(model, *options) as process, contextlib.ExitStack() as stack:
        files = n_files(process.pid)
        for _ in range(5 * TLS_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", process.port), timeout=5))
        begin, most = time.monotonic(), 0
        while not asked_over_tls(process.port, trust):
            most = max(most, n_files(process.pid))
            if time.monotonic() - begin > 90:
                return ["a server with half-open handshakes does not answer within 90 s"]
            time.sleep(0.5)
        took = time.monotonic() - begin
    print(f"{5 * TLS_CONNECTIONS} half-open handshakes: answers again after {took:.1f} s, {most - files} more files at most")
    wrong = [] if took < TLS_S else [f"half-open handshakes kept others out for {took:.0f} s"]
    return wrong if most <= files + TLS_CONNECTIONS + 4 else [*wrong, f"half-open handshakes took {most - files} files"]


def asked_over_tls(port: int, trust: ssl.SSLContext) -> bool:
    """True if /health answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw, trust.wrap_socket(raw) as one:
            one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return one.recv(4096).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


# ---- ends ----------------------------------------------------------------------------------------------------------------


PAUSE = b"POST /pause?mode=keep HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


def _streams() -> list[bytes]:
    return [post(talk(20_000)) for _ in range(16)]


STATES: dict[str, Callable[[], list[bytes]]] = {
    "idle": list,
    "streaming": _streams,
    "half-open sockets": lambda: [b"POST /v1/comp"] * 100,
    "bodies that stop": lambda: [post(b" " * 1_000_000, length=2_000_000)] * 8,
    "tokenising": lambda: long_texts() * 4,
    "paused, with requests": lambda: [PAUSE, *_streams()],
}
"""States of a server that gets SIGTERM, with the requests that lead to each state."""


def ends(model: Path) -> list[str]:
    """Sends SIGTERM to servers in every state, with a log that is read and with one that is not. Returns what was wrong."""
    wrong = []
    for name, requests in STATES.items():
        for reads in (True, False):
            process = Process(model, "--shutdown-timeout", str(SHUTDOWN_S), "--control")
            process.read_log() if reads else process.close_log()
            with contextlib.ExitStack() as stack:
                for request in requests():
                    one = stack.enter_context(socket.create_connection(("127.0.0.1", process.port), timeout=20))
                    one.sendall(request)
                    time.sleep(0.02)
                time.sleep(0.3)
                took = process.end(END_S)
            log = "log read" if reads else "log pipe closed"
            print(f"SIGTERM, {name}, {log}: {'not ended' if took is None else f'ended after {took:.1f} s'}", flush=True)
            if took is None:
                wrong.append(f"SIGTERM did not end a server: {name}, {log}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quiet", type=float, default=30)
    parser.add_argument("--flood-seconds", type=float, default=60)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--flood-share", type=float, default=0.5)
    parser.add_argument("--times", type=float, default=3)
    parser.add_argument("--no-ends", action="store_true")
    parser.add_argument("--no-tls", action="store_true")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ["PYTHONUNBUFFERED"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), POSITIONS)
        with started(model) as process:
            wrong = asyncio.run(run(given, process))
        wrong += [] if given.no_tls else handshakes(model)
        wrong += [] if given.no_ends else ends(model)
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
