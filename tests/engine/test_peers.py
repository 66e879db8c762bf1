"""The connector "peer": engines fetch blocks from each other, in one process, in two of one host through shared memory, and
over TCP. Ids and logprob bits are those of one engine. A peer that dies in the middle, lies or says nothing costs a
computation."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modules import load

from llmpy import ConfigError, EngineConfig
from llmpy.engine.outer_tier import _fingerprint

tiers = load(Path(__file__).with_name("test_tiers.py"))
handover = load(Path(__file__).with_name("test_handover.py"))
Make = Callable[[str, str], Path]
PARAMS = handover.PARAMS


def address(kind: str) -> str:
    if kind == "unix":
        return f"unix:test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def peer(listen: str | None = None, *peers: str, **more: Any) -> dict[str, Any]:
    return {"name": "peer", "bytes": "16MiB", "peers": peers, **({"listen": listen} if listen else {}), **more}


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:2]))
def test_two_engines_give_the_bits_of_one(tiny_model: Make, model: tuple[str, str, str, int], device: str, kind: str) -> None:
    path, prompt, first = tiny_model(*model[:2]), tiers.prompts()[-1], address(kind)

    async def main() -> None:
        async with (
            handover.open_engine(path, device, kv_connector=peer(first)) as one,
            handover.open_engine(path, device, kv_connector=peer(None, first), seed=99) as two,
        ):
            handle = await one.prefill(prompt, PARAMS)
            output = await two.decode(handle, PARAMS)
            assert tiers.bits(output) == handover.lone(path, device, prompt, handle.seed)
            assert handle.saved_tokens == output.num_cached_tokens == 128
            assert two.stats().disk_errors == two.stats().disk_misses == one.stats().disk_errors == 0

    asyncio.run(main())


def test_recurrent_states_are_fetched(recurrent_model: Path, device: str) -> None:
    prompt, first = tiers.prompts()[-1], address("tcp")

    async def main() -> None:
        async with (
            handover.open_engine(recurrent_model, device, kv_connector=peer(first)) as one,
            handover.open_engine(recurrent_model, device, kv_connector=peer(None, first)) as two,
        ):
            handle = await one.prefill(prompt, PARAMS)
            output = await two.decode(handle, PARAMS)
            assert tiers.bits(output) == handover.lone(recurrent_model, device, prompt, handle.seed)
            assert output.num_cached_tokens == handle.saved_tokens > 100

    asyncio.run(main())


def prefill_elsewhere(path: Path, device: str, prompt: list[int], listen: str) -> tuple[subprocess.Popen[str], Any]:
    """A process whose engine has computed a prompt, and the handle."""
    given = {"kv_cache_memory_bytes": 8 << 20, "host_cache_bytes": "1MiB", "prefix_cache_seed": 3, "device": device}
    params = {"temperature": 1, "max_tokens": 12, "logprobs": 2, "ignore_eos": True}
    work = json.dumps([str(path), tiers.OPTIONS | given | {"kv_connector": peer(listen)}, prompt, params])
    process = subprocess.Popen([sys.executable, "-c", handover.PREFILLER, work], stdin=-1, stdout=-1, text=True)
    assert process.stdout
    return process, handover.Handle.from_dict(json.loads(process.stdout.readline()))


async def decode(path: Path, device: str, handle: Any, connector: dict[str, Any]) -> tuple[Any, Any]:
    """Output and stats of an engine that goes on."""
    async with handover.open_engine(path, device, kv_connector=connector) as engine:
        output = await engine.decode(handle, PARAMS)
        engine.check()
        stats = engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
        return output, stats


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_two_processes_and_the_death_of_one(tiny_model: Make, device: str, kind: str) -> None:
    path, prompt, first = tiny_model("llama", "float32"), tiers.prompts()[-1], address(kind)
    process, handle = prefill_elsewhere(path, device, prompt, first)
    wanted = handover.lone(path, device, prompt, handle.seed)
    connector = peer(None, first, timeout_s=0.2)
    try:
        output, stats = asyncio.run(decode(path, device, handle, connector))
        assert tiers.bits(output) == wanted and output.num_cached_tokens == 128 and stats.disk_errors == 0
        process.send_signal(signal.SIGSTOP)  # connections are still accepted, by the kernel
        output, stats = asyncio.run(decode(path, device, handle, connector))
        assert tiers.bits(output) == wanted and output.num_cached_tokens == 0
        process.kill()
        process.wait()
        output, stats = asyncio.run(decode(path, device, handle, connector))
        assert tiers.bits(output) == wanted and output.num_cached_tokens == 0
    finally:
        process.kill()
        process.communicate()


class Proxy:
    """Passes bytes between engines; the answers of the peer end after `limit` bytes, or are changed behind it."""

    def __init__(self, target: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        host, port = target.split(":")
        self.target, self.limit, self.changes, self.passed = (host, int(port)), 1 << 40, False, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, far = self.listener.accept()[0], socket.create_connection(self.target)
            except OSError:
                return
            threading.Thread(target=self._questions, args=(near, far), daemon=True).start()
            threading.Thread(target=self._answers, args=(near, far), daemon=True).start()

    @staticmethod
    def _questions(near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)

    def _answers(self, near: socket.socket, far: socket.socket) -> None:
        while data := far.recv(1 << 16):
            left = max(self.limit - self.passed, 0)
            self.passed += len(data)
            if self.changes:
                near.sendall(data[:left] + bytes(255 - byte for byte in data[left:]))
            elif len(data) > left:
                near.sendall(data[:left])
                break
            else:
                near.sendall(data)
        near.shutdown(socket.SHUT_RDWR)
        far.close()


WELCOME, ANSWERS, FOUND = 16, 8, 16
"""Bytes of the messages of a peer: its welcome, a byte for each of 8 blocks, what comes before a block."""
PLACES = {"greeting": 0, "welcome": 7, "asked": WELCOME, "answer": WELCOME + 3, "matched": WELCOME + ANSWERS}
MATCHED = WELCOME + ANSWERS
PLACES |= {"found": MATCHED + 5, "block": MATCHED + FOUND + 100, "later": MATCHED + 5 * (FOUND + 4096)}


@pytest.mark.parametrize("changes", [False, True], ids=["dies", "lies"])
def test_a_peer_may_fail_at_every_message(tiny_model: Make, device: str, changes: bool) -> None:
    path, prompt, first = tiny_model("llama", "float32"), tiers.prompts()[-1], address("tcp")

    async def main() -> None:
        async with handover.open_engine(path, device, kv_connector=peer(first)) as one:
            handle = await one.prefill(prompt, PARAMS)
            wanted, proxy = handover.lone(path, device, prompt, handle.seed), Proxy(first)
            for limit in PLACES.values():
                proxy.limit, proxy.changes, proxy.passed = limit, changes, 0
                output, stats = await decode(path, device, handle, peer(None, proxy.address, timeout_s=0.3))
                assert tiers.bits(output) == wanted and output.num_cached_tokens < 128, limit
                assert stats.disk_errors + stats.disk_misses + stats.disk_bad_files > 0 or limit < WELCOME, limit
            proxy.limit, proxy.passed = 1 << 40, 0
            output, stats = await decode(path, device, handle, peer(None, proxy.address))
            assert tiers.bits(output) == wanted and output.num_cached_tokens == 128 and stats.disk_errors == 0
            proxy.listener.close()

    asyncio.run(main())


def test_strangers_do_not_hurt_a_peer(tiny_model: Make, device: str) -> None:
    """Connections that say nothing, nonsense, or too much; another model; another token."""
    path, prompt, first = tiny_model("llama", "float32"), tiers.prompts()[-1], address("tcp")
    host, port = first.split(":")

    async def main() -> None:
        async with handover.open_engine(path, device, kv_connector=peer(first, timeout_s=0.3, token="a")) as one:
            handle = await one.prefill(prompt, PARAMS)
            strangers = [socket.create_connection((host, int(port))) for _ in range(70)]
            for i, stranger in enumerate(strangers[:40]):
                stranger.sendall(os.urandom(i) if i % 2 else b"llmpykv1" + struct.pack("<Q", 1 << 63) * 40)
            await asyncio.sleep(0.5)
            for other, cached in (("b", 0), ("a", 128)):
                output, _ = await decode(path, device, handle, peer(None, first, token=other))
                assert tiers.bits(output) == handover.lone(path, device, prompt, handle.seed)
                assert output.num_cached_tokens == cached
            output, _ = await decode(tiny_model("qwen3", "bfloat16"), device, handle, peer(None, first, token="a"))
            assert output.num_cached_tokens == 0
            for stranger in strangers:
                stranger.close()

    asyncio.run(main())


def test_a_store_keeps_what_was_used_last(tiny_model: Make, device: str) -> None:
    path, first = tiny_model("llama", "float32"), address("unix")

    async def main() -> None:
        async with handover.open_engine(path, device, kv_connector=peer(first, bytes=40_000)) as one:
            handles = [await one.prefill(prompt, PARAMS) for prompt in tiers.prompts()[-3:]]
            assert one.stats().disk_evictions > 0 and one.stats().disk_bytes <= 40_000
            for handle in handles:
                output, _ = await decode(path, device, handle, peer(None, first))
                assert tiers.bits(output) == handover.lone(path, device, list(handle.prompt_token_ids), handle.seed)
            await one.reset_prefix_cache()
            output, _ = await decode(path, device, handles[-1], peer(None, first))
            assert output.num_cached_tokens == 0

    asyncio.run(main())


WRONG = [
    ({"bytes": "0"}, "bytes: wanted a number above 0"),
    ({"listen": "nowhere"}, "cannot listen at 'nowhere'"),
    ({"listen": "256.1.1.1:80"}, "cannot listen at"),
    ({"nonsense": 1}, "unknown option 'nonsense'"),
    ({"token": "x" * 64}, "token: wanted less than 64 bytes"),
    ({"peers": ["a" * 300]}, "peers: wanted at most 64 addresses"),
    ({"timeout_s": -1}, "timeout_s: wanted a number above 0"),
    ({"deadline_s": 0}, "deadline_s must be a number of seconds"),
    ({"name": "no_such_package"}, "no package brings it"),
    ({"name": "/no/such/library.so"}, "No such file|cannot open"),
    ({"name": 7}, "must be a dict with 'name'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(change)[:30] for change, _ in WRONG])
def test_wrong_options_name_themselves(tiny_model: Make, device: str, change: dict[str, Any], message: str) -> None:
    options = {"host_cache_bytes": "1MiB", "kv_connector": {"name": "peer"} | change, "prefix_cache_seed": 3}
    with pytest.raises(ConfigError, match=message):
        tiers.open_llm(tiny_model("llama", "float32"), device, **options)


def test_two_engines_cannot_listen_at_one_address(tiny_model: Make, device: str) -> None:
    path, first = tiny_model("llama", "float32"), address("unix")
    options = {"host_cache_bytes": "1MiB", "kv_connector": peer(first), "prefix_cache_seed": 3}
    for _ in range(2):  # what one engine has closed another may take
        with (
            tiers.open_llm(path, device, **options),
            pytest.raises(ConfigError, match=r"cannot listen at .* in use"),
        ):
            tiers.open_llm(path, device, **options)


class Described:
    """As much of a loaded engine as the fingerprint of its blocks reads."""

    def __init__(self, device: str) -> None:
        self.config, self.spec, self.model = EngineConfig(), {"layers": 2}, self
        self.device = device

    def describe(self) -> dict[str, object]:
        return {"device": self.device, "kv_dtype": "bfloat16", "activation_dtype": "float", "page_bytes": 8, "state_bytes": 0}


def test_equal_devices_of_a_host_share_blocks() -> None:
    names = ["cuda:0 NVIDIA H200, cuBLASLt 130100 for 14 of 40", "cuda:1 NVIDIA H200", "cuda:0 NVIDIA H100 80GB HBM3"]
    names.append("cuda:0 NVIDIA H200, portable kernels")  # pages of int8 lie in another order there
    first, second, *others = (_fingerprint(Described(name), [], "") for name in names)  # type: ignore[arg-type]
    assert first == second not in others
