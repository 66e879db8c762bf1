"""The cost of the HTTP server itself, on a tiny model with random weights.

    python benchmarks/server.py overhead [--plain] [--runs 400]
    python benchmarks/server.py stream [--plain] [--clients 64] [--tokens 256] [--rounds 5]
    python benchmarks/server.py memory [--requests 100000]
    python benchmarks/server.py batch [--requests 500000]

- overhead: the first token of one request at a time, over HTTP and from AsyncEngine, in turns in one process on one engine.
- stream: tokens a second that one server process streams to many clients of another process, one frame a token.
- memory: resident memory, open files and requests in flight of a server process every 10,000 requests.
- batch: peak resident memory of `llmpy run-batch` for 20,000 requests, for --requests, and when all are already answered.

--plain leaves out uvloop and httptools.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from llmpy.cli.bench_datasets import Ask
from llmpy.cli.bench_serve import Answer, measure, summary
from llmpy.cli.http_client import HttpClient

VOCABULARY = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64,
    "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
ENGINE = {"load_format": "dummy", "device": "cpu", "kv_cache_memory_bytes": "128MiB", "max_num_seqs": 64}


def write_model(folder: Path, positions: int = CONFIG["max_position_embeddings"]) -> Path:
    """A model without weights for this number of positions, and a tokenizer of bytes and made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġt{i}" for i in range(VOCABULARY - len(letters))]
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(letters + words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": positions}))
    return folder


def engine_words() -> list[str]:
    """The engine's options as words of a command line."""
    return [part for name, value in ENGINE.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@contextlib.contextmanager
def server(*options: str) -> Iterator[tuple[str, int]]:
    """A server process; its URL and process id."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(Path(folder)))
        words = [sys.executable, "-m", "llmpy", "serve", model, "--port", "0", *engine_words(), *options]
        log = Path(folder, "log")
        with log.open("w") as file:
            process = subprocess.Popen(words, stderr=file)
        try:
            yield _url(process, log), process.pid
        finally:
            process.terminate()
            process.wait(60)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits for the server's address."""
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("http://"):
                return line.removesuffix("/v1")
        time.sleep(0.02)
    raise RuntimeError(log.read_text())


def load(tokens: int) -> Namespace:
    """The options of `llmpy bench serve` that this script uses."""
    return Namespace(endpoint="completions", temperature=1.0, ignore_eos=True, max_concurrency=None, output_len=tokens,
                     request_rate=float("inf"), ramp_up_strategy=None, burstiness=1.0)  # fmt: skip


# ---- overhead ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(engine: Any, plain: bool) -> Iterator[int]:
    """The engine on a socket, in a thread; its port."""
    import uvicorn

    from llmpy.server import build_app

    kinds = {"loop": "asyncio", "http": "h11"} if plain else {"loop": "uvloop", "http": "httptools"}
    running = uvicorn.Server(uvicorn.Config(build_app(engine), port=0, log_config=None, access_log=False, **kinds))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield running.servers[0].sockets[0].getsockname()[1]
    running.should_exit = True
    thread.join()


def first_frame(connection: socket.socket, request: bytes) -> float:
    """Seconds to the first frame; reads the other frames, too."""
    begin = time.perf_counter()
    connection.sendall(request)
    found, seconds = b"", 0.0
    while not found.endswith(b"0\r\n\r\n"):
        found += connection.recv(1 << 16)
        if not seconds and b"data: {" in found:
            seconds = time.perf_counter() - begin
    return seconds


def overhead(given: Namespace) -> None:
    """The first token over HTTP and from AsyncEngine, in turns."""
    from llmpy import AsyncEngine, RequestOutputKind

    fields = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    body = json.dumps({"prompt": "x" * 32, "stream": True, **fields}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    over_http: list[float] = []
    direct: list[float] = []

    async def in_process(engine: Any) -> float:
        begin = time.perf_counter()
        stream = engine.generate("x" * 32, output_kind=RequestOutputKind.DELTA, **fields)
        await anext(stream)
        seconds = time.perf_counter() - begin
        async for _ in stream:
            pass
        return seconds

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        engine = AsyncEngine(write_model(Path(folder)), enable_prefix_caching=False, **ENGINE)
        with served(engine, given.plain) as port, socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for i in range(given.runs + 20):
                pair = first_frame(connection, request), runner.run(in_process(engine))
                if i >= 20:
                    over_http.append(1e3 * pair[0])
                    direct.append(1e3 * pair[1])
        engine.close()
    http, alone = statistics.median(over_http), statistics.median(direct)
    more = statistics.median(a - b for a, b in zip(over_http, direct, strict=True))
    print(f"first token: {http:.3f} ms over HTTP, {alone:.3f} ms of AsyncEngine; {more:.3f} ms more (medians of {given.runs})")


# ---- throughput and memory -----------------------------------------------------------------------------------------------


async def asked(url: str, asks: list[Ask], clients: int, tokens: int) -> list[Answer]:
    """The answers to all requests, with `clients` in flight."""
    client = HttpClient(url)
    chosen = load(tokens)
    chosen.max_concurrency = clients
    try:
        return await measure(client, "", asks, chosen, 0)
    finally:
        client.close()


def stream(given: Namespace) -> None:
    """Streamed tokens a second."""
    asks = [Ask([1 + i % 500, 2, 3, i // 500], 4, given.tokens) for i in range(given.clients * 2)]
    kinds = ["--http", "h11", "--loop", "asyncio"] if given.plain else []
    with server("--served-model-name", "", "--max-model-len", "1024", *kinds) as (url, pid):
        rates = []
        for _ in range(given.rounds + 1):
            begin = cpu_seconds(pid)
            figures = summary(asyncio.run(asked(url, asks, given.clients, given.tokens)), {})
            assert figures["failed"] == 0, figures
            rates.append(figures["output_throughput"])
            used = (cpu_seconds(pid) - begin) / figures["total_output_tokens"]
            times = f"first token {figures['median_ttft_ms']:.1f} ms, others {figures['median_itl_ms']:.2f} ms"
            print(f"{rates[-1]:8.0f} tokens/s; server {1e6 * used:.0f} us of processor time a token; {times}", flush=True)
    print(f"median of {given.rounds} after a warm-up: {statistics.median(rates[1:]):.0f} tokens/s to {given.clients} clients")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def n_files(pid: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


async def _batches(url: str, given: Namespace) -> AsyncIterator[int]:
    asks = [Ask([1 + i % 500, 2, 3], 3, 4) for i in range(1000)]
    for done in range(0, given.requests, len(asks)):
        answers = await asked(url, asks, given.clients, 4)
        assert not [answer.error for answer in answers if answer.error], answers[0].error
        yield done + len(asks)


def memory(given: Namespace) -> None:
    """Memory of a server while it serves requests."""

    async def run(url: str, pid: int) -> None:
        begin = time.perf_counter()
        async for done in _batches(url, given):
            if done == 5000 or done % 10_000 == 0:
                flight = (await HttpClient(url).get("/load"))["server_load"]
                seconds = time.perf_counter() - begin
                print(f"{done:7d} requests, {seconds:5.0f} s: {resident_mib(pid):.1f} MiB, {n_files(pid)} files, "
                      f"{flight - 1} others in flight", flush=True)  # fmt: skip

    with server("--served-model-name", "", "--max-model-len", "128") as (url, pid):
        asyncio.run(run(url, pid))


def batch(given: Namespace) -> None:
    """Memory of `run-batch` with a short file, a long file, and a file that is already answered."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests, answers, model = folder / "requests.jsonl", folder / "answers.jsonl", str(write_model(folder))
        words = [sys.executable, "-m", "llmpy", "run-batch", "-i", str(requests), "-o", str(answers), *engine_words(), model]
        for count, what in ((20_000, "answered"), (given.requests, "answered"), (given.requests, "passed over")):
            if what == "answered":
                answers.unlink(missing_ok=True)
                _write_requests(requests, count)
            begin = time.perf_counter()
            process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            assert status == 0
            seconds = time.perf_counter() - begin
            print(f"{count:7d} requests {what}, {seconds:5.0f} s: {used.ru_maxrss / 1024:.1f} MiB at most", flush=True)


def _write_requests(path: Path, count: int) -> None:
    with path.open("w") as file:
        for i in range(count):
            body = {"prompt": [1 + i % 500, 2, 3], "max_tokens": 1}
            file.write(json.dumps({"custom_id": f"request-{i}", "url": "/v1/completions", "body": body}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, options in {
        overhead: {"runs": 400},
        stream: {"clients": 64, "tokens": 256, "rounds": 5},
        memory: {"clients": 64, "requests": 100_000},
        batch: {"requests": 500_000},
    }.items():
        made = commands.add_parser(function.__name__)
        made.set_defaults(run=function)
        made.add_argument("--plain", action="store_true")
        for name, value in options.items():
            made.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    chosen.run(chosen)
