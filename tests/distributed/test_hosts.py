"""One model over two processes: the bits of one process, and an end without a hang whatever happens to either process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
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

import httpx
import pytest
from host_pairs import FOLLOW, PROMPTS, bits, free_port, params, start, two_hosts

from llmpy import (
    LLM,
    AsyncEngine,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    EngineAsleepError,
    EngineConfig,
    EngineDeadError,
    UnsupportedError,
    _core,
    devices,
)
from llmpy.distributed import _hosts

pytestmark = pytest.mark.usefixtures("cut_all")

SETUPS = [
    ("dense", 2, "auto"), ("dense", 4, "auto"), ("dense", 3, "auto"), ("mixture", 2, "rank"), ("mixture", 4, "width"),
    ("hybrid", 2, "auto"), ("hybrid", 4, "auto"),
]  # fmt: skip


def results(llm: LLM) -> list[Any]:
    """The bits of prompts in company, in chunks and beside an abort; then with hits of the prefix cache."""
    for i, prompt in enumerate(PROMPTS):
        llm.add_request(prompt, params(i), str(i))
    ended: dict[str, Any] = {}
    for number in range(10_000):
        if not llm.has_unfinished_requests():
            break
        ended |= {output.request_id: bits(output) for output in llm.step() if output.finished}
        if number == 12:
            llm.abort_request("4")
    hits = [bits(llm.generate([PROMPTS[1]], [params(i, prompt_logprobs=None)])[0]) for i in range(3)]
    del ended["4"]
    assert len(ended) == len(PROMPTS) - 1
    return [ended[name] for name in sorted(ended)] + hits


def outcome(llm: LLM) -> list[Any]:
    """The same; the cache is so small that the prompts in company preempt each other."""
    before = llm.stats()
    found = results(llm)
    assert llm.stats().num_preemptions > before.num_preemptions
    assert llm.stats().prefix_cache_hits >= before.prefix_cache_hits + 160
    return found


def check_killed(options: dict[str, Any], n_ranks: int, **changes: Any) -> None:
    """Kills the follower in the midst of steps; the engine ends with an error that names it, and closes in time."""
    with two_hosts({**options, "step_timeout_s": 5.0}, n_ranks, **changes) as (llm, follower):
        killer = threading.Timer(0.3, follower.kill)
        killer.start()
        with pytest.raises((DeviceError, EngineDeadError), match=r"host 1 \(127.0.0.1:\d+\)"):
            for _ in range(10_000):
                llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
        with pytest.raises(EngineDeadError):
            llm.generate([[1, 2]])
        begun = time.monotonic()
    assert time.monotonic() - begun < 10 and follower.returncode == -signal.SIGKILL


# ---- results -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted(models: dict[str, dict[str, Any]]) -> Callable[[str], list[Any]]:
    """wanted(name): what one rank in one process gives."""
    made: dict[str, list[Any]] = {}

    def make(name: str) -> list[Any]:
        if name not in made:
            with LLM(**models[name]) as llm:
                made[name] = outcome(llm)
        return made[name]

    return make


@pytest.mark.parametrize(("name", "n_ranks", "experts"), SETUPS)
def test_two_hosts_give_the_bits_of_one_rank(
    models: dict[str, dict[str, Any]], wanted: Callable[[str], list[Any]], name: str, n_ranks: int, experts: str
) -> None:
    with two_hosts({**models[name], "experts": experts}, n_ranks) as (llm, follower):
        assert outcome(llm) == wanted(name)
        assert outcome(llm) == wanted(name)
        assert llm.stats().allocations_since_warmup == 0
        assert llm.get_world_size() == 1 and len(llm.ranks()) == n_ranks // 2 and llm.stats().comm == "hosts"
        llm.check()
    assert follower.returncode == 0


@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "experts"), [("dense", "auto"), ("mixture", "rank"), ("mixture", "width"), ("hybrid", "auto")]
)
def test_two_hosts_with_a_gpu_each(
    models: dict[str, dict[str, Any]], two_gpus: str, name: str, experts: str, dtype: str
) -> None:
    gpu = {"device": two_gpus, "dtype": dtype, "kv_cache_memory_bytes": "16MiB"}
    with LLM(**{**models[name], **gpu}) as llm:
        wanted = results(llm)
    with two_hosts({**models[name], **gpu, "experts": experts}, 2, device="cuda:1") as (llm, follower):
        assert results(llm) == wanted
        assert results(llm) == wanted
        assert llm.stats().allocations_since_warmup == 0
    assert follower.returncode == 0


@pytest.mark.alone
@pytest.mark.parametrize(("name", "n_ranks", "experts"), [("dense", 3, "auto"), ("dense", 4, "auto"), ("mixture", 4, "rank")])
def test_two_hosts_with_ranks_that_share_a_gpu(
    models: dict[str, dict[str, Any]], two_gpus: str, name: str, n_ranks: int, experts: str
) -> None:
    gpu = {"device": two_gpus, "dtype": "bfloat16", "kv_cache_memory_bytes": "16MiB"}
    with LLM(**{**models[name], **gpu}) as llm:
        wanted = results(llm)
    check_gpus(models[name], gpu, experts, wanted, (0,) * (n_ranks // 2), (1,) * (n_ranks - n_ranks // 2))


@pytest.mark.alone
@pytest.mark.parametrize(("name", "experts"), [("dense", "auto"), ("mixture", "rank"), ("mixture", "width")])
def test_two_hosts_with_two_gpus_each(models: dict[str, dict[str, Any]], two_gpus: str, name: str, experts: str) -> None:
    if not any(each["device"] == "cuda:3" for each in devices()):
        pytest.skip("fewer than four GPUs")
    gpu = {"device": two_gpus, "dtype": "bfloat16", "kv_cache_memory_bytes": "16MiB"}
    with LLM(**{**models[name], **gpu}) as llm:
        wanted = results(llm)
    check_gpus(models[name], gpu, experts, wanted, (0, 1), (2, 3))


def check_gpus(
    model: dict[str, Any], gpu: dict[str, Any], experts: str, wanted: list[Any], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """Two hosts with these GPUs have the results of one rank."""
    options = {**model, **gpu, "experts": experts, "device_ids": first}
    host = {"device": f"cuda:{second[0]}", "device_ids": second}
    with two_hosts(options, len(first) + len(second), **host) as (llm, follower):
        assert len(llm.ranks()) == len(first)
        assert results(llm) == wanted
        assert results(llm) == wanted
        assert llm.stats().allocations_since_warmup == 0
    assert follower.returncode == 0


@pytest.mark.alone
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_follower_with_a_gpu_that_is_killed_ends_the_engine(
    models: dict[str, dict[str, Any]], two_gpus: str, n_ranks: int
) -> None:
    options = {**models["dense"], "device": two_gpus, "kv_cache_memory_bytes": "16MiB", "device_ids": (0,) * (n_ranks // 2)}
    check_killed(options, n_ranks, device="cuda:1", device_ids=(1,) * (n_ranks // 2))


def test_three_hosts(models: dict[str, dict[str, Any]], wanted: Callable[[str], list[Any]]) -> None:
    """The hosts have one, one and two ranks; host 0 passes the values of each follower on to the other one."""
    shared = {**models["dense"], "nnodes": 3, "master_addr": "127.0.0.1", "master_port": free_port(), "tensor_parallel_size": 4}
    followers = [start({**shared, "node_rank": host}) for host in (2, 1)]
    with LLM(**shared, node_rank=0) as llm:
        assert len(llm.ranks()) == 1
        assert outcome(llm) == wanted("dense")
    assert [follower.wait(20) for follower in followers] == [0, 0]
    for follower in followers:
        follower.communicate()


def test_torchruns_variables(models: dict[str, dict[str, Any]], wanted: Callable[[str], list[Any]], monkeypatch: Any) -> None:
    port = free_port()
    shared = {**models["dense"], "nnodes": 2, "tensor_parallel_size": 2}
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    follower = start(shared, RANK="1", **variables)
    for name, value in {**variables, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with LLM(**shared) as llm:
        assert (llm.config.node_rank, llm.config.master_addr, llm.config.master_port) == (0, "127.0.0.1", port)
        assert outcome(llm) == wanted("dense")
    assert follower.wait(20) == 0
    follower.communicate()


def test_all_hosts_have_the_smallest_cache(models: dict[str, dict[str, Any]]) -> None:
    with LLM(**{**models["dense"], "kv_cache_memory_bytes": "96KiB"}, tensor_parallel_size=2) as one:
        wanted = one.stats().kv_blocks_total
    for changes in ({}, {"kv_cache_memory_bytes": "96KiB"}):
        with two_hosts(models["dense"], 2, **changes) as (llm, follower):
            assert (llm.stats().kv_blocks_total == wanted) == bool(changes)
        assert follower.returncode == 0


def test_torchrun(models: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    options = {**models["dense"], "nnodes": 2, "tensor_parallel_size": 2}
    script.write_text(
        "from llmpy import LLM\n"
        f"with LLM(**{options}) as llm:\n"
        "    print('ids', llm.generate([[5, 6, 7]], temperature=0, max_tokens=6)[0].outputs[0].token_ids)\n"
    )
    with LLM(**models["dense"]) as llm:
        wanted = llm.generate([[5, 6, 7]], temperature=0, max_tokens=6)[0].outputs[0].token_ids
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("ids")] == [f"ids {wanted}"]


def test_an_async_engine(models: dict[str, dict[str, Any]]) -> None:
    """Its thread runs the steps; a host that goes is noticed without a request."""
    prompt, how = PROMPTS[3], params(4, prompt_logprobs=None)

    async def main(options: dict[str, Any], follower: subprocess.Popen[str] | None) -> list[Any]:
        async with AsyncEngine(**options) as engine:
            found = bits(await engine.generate(prompt, how))
            engine.check_health()
            if follower is not None:
                follower.kill()
                for _ in range(200):
                    await asyncio.sleep(0.02)
                    with contextlib.suppress(EngineDeadError):
                        engine.check_health()
                        continue
                    break
                with pytest.raises(EngineDeadError, match=r"host 1 \(127.0.0.1:\d+\)"):
                    engine.check_health()
                with pytest.raises(DeviceError, match="host 1"):
                    await engine.generate(prompt, how)
            return found

    wanted = asyncio.run(main(models["dense"], None))
    shared = {**models["dense"], "nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port(), "tensor_parallel_size": 2}
    follower = start({**shared, "node_rank": 1})
    assert asyncio.run(main({**shared, "node_rank": 0}, follower)) == wanted
    follower.communicate()


def test_the_same_command_serves_on_all_hosts(served_model: str, reserve_port: Callable[[], int]) -> None:
    port = reserve_port()
    words = [
        sys.executable, "-m", "llmpy", "serve", served_model, "--device", "cpu", "--kv-cache-memory-bytes", "8MiB",
        "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
    ]  # fmt: skip
    places = [("--node-rank", "1", "--port", "0"), ("--node-rank", "0", "--port", str(port))]
    hosts = [subprocess.Popen([*words, *place], stderr=subprocess.PIPE, text=True) for place in places]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=httpx.HTTPTransport(retries=8), timeout=20) as client:
            answer = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3, answer.text
        hosts[1].send_signal(signal.SIGTERM)
        assert [host.wait(20) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
            host.communicate()


def test_a_forked_child_says_nothing_to_the_hosts(models: dict[str, dict[str, Any]]) -> None:
    with two_hosts(models["dense"], 2) as (llm, follower):
        wanted = llm.generate([[1, 2]], temperature=0)[0].outputs[0].token_ids
        child = os.fork()
        if not child:
            llm._driver.model.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert llm.generate([[1, 2]], temperature=0)[0].outputs[0].token_ids == wanted
    assert follower.returncode == 0


def hidden_bytes() -> int:
    """Memory of this process that is not accessible, as that of parts that sleep."""
    found = re.findall(r"^(\w+)-(\w+) ---p", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(first, 16) for first, end in found)


def test_all_hosts_sleep_or_none(models: dict[str, dict[str, Any]]) -> None:
    with two_hosts(models["dense"], 4) as (llm, follower):
        wanted = bits(llm.generate([PROMPTS[3]], [params(1)])[0])
        limit = resource.prlimit(follower.pid, resource.RLIMIT_DATA)
        for level, tags in ((0, None), (1, None), (1, ["kv_cache"]), (1, ["weights"])):
            llm.sleep(level, tags=tags)
            with pytest.raises(EngineAsleepError):
                llm.generate([[1, 2]])
            hidden = hidden_bytes()
            if tags != ["kv_cache"] and level:
                resource.prlimit(follower.pid, resource.RLIMIT_DATA, (1 << 20, limit[1]))
                with pytest.raises(DeviceMemoryError, match=r"host 1 \(127.0.0.1:\d+\): rank 2 \(cpu\): .* no memory"):
                    llm.wake_up()
                assert "asleep" in repr(llm) and hidden_bytes() >= hidden
                resource.prlimit(follower.pid, resource.RLIMIT_DATA, limit)
            llm.wake_up()
            assert bits(llm.generate([PROMPTS[3]], [params(1)])[0]) == wanted
        llm.check()
    assert follower.returncode == 0


# ---- failures ----------------------------------------------------------------------------------------------------------


def test_a_follower_that_is_killed_ends_the_engine(models: dict[str, dict[str, Any]]) -> None:
    check_killed(models["dense"], 4)


def test_a_follower_that_stands_still_is_late(models: dict[str, dict[str, Any]]) -> None:
    with two_hosts({**models["dense"], "step_timeout_s": 1.0}, 2) as (llm, follower):
        follower.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(DeviceError, match=r"host 1 \(127.0.0.1:\d+\) did not send a \w+ within 1 s"):
            llm.generate([[1, 2]])
        assert time.monotonic() - begun < 10
        follower.kill()


def test_a_follower_that_stands_still_between_steps_is_late(models: dict[str, dict[str, Any]]) -> None:
    """Host 0 has noticed it before the next request."""
    with two_hosts({**models["dense"], "step_timeout_s": 1.0}, 2) as (llm, follower):
        follower.send_signal(signal.SIGSTOP)
        time.sleep(4.5)
        with pytest.raises(DeviceError, match=r"host 1 \(127.0.0.1:\d+\) sent no pulse for 3 s"):
            llm.generate([[1, 2]])
        follower.kill()


def test_a_follower_ends_with_host_0(models: dict[str, dict[str, Any]]) -> None:
    shared = {**models["dense"], "nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port(), "tensor_parallel_size": 2}
    code = FOLLOW.replace("llmpy.LLM(", "llm = llmpy.LLM(") + "print('up', flush=True); input()"
    words = [sys.executable, "-c", code, json.dumps({**shared, "node_rank": 0})]
    first = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    follower = start({**shared, "node_rank": 1})
    assert first.stdout is not None and first.stdout.readline() == "up\n"
    first.kill()
    first.communicate()
    _, text = follower.communicate(timeout=10)
    assert follower.returncode == 1 and "DeviceError: host 0 (127.0.0.1:" in text


GREETING, WELCOME, VALUES, STEP, PULSE, END = 1, 2, 4, 6, 9, 10  # enum wire_kind


def write_frame(wire: socket.socket, kind: int, data: bytes = b"") -> None:
    wire.sendall(struct.pack("<4sHHQ", b"lmpy", 1, kind, len(data)) + data)


def read_frame(wire: socket.socket) -> tuple[int, bytes]:
    magic, _, kind, size = struct.unpack("<4sHHQ", wire.recv(16, socket.MSG_WAITALL))
    assert magic == b"lmpy"
    return kind, wire.recv(size, socket.MSG_WAITALL) if size else b""


WRONG_STEPS = [
    (STEP, b"", "step message: wanted bytes"),
    (STEP, b"step" + bytes(44), "step message: wanted version 1, have 0"),
    (STEP, struct.pack("<4sIQ8I", b"step", 1, 1, 0, 1 << 31, 1, 1, 0, 0, 0, 0), "step message: wanted rows, from 1 to 64"),
    (STEP, bytes(1 << 20), "wanted a message (step) of at most"),
    (VALUES, bytes(8), "wanted a step, have a message of kind 4"),
]


@pytest.mark.parametrize(("kind", "data", "text"), WRONG_STEPS, ids=[text for *_, text in WRONG_STEPS])
def test_a_follower_ends_with_a_wrong_step(models: dict[str, dict[str, Any]], kind: int, data: bytes, text: str) -> None:
    """This test plays host 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": server.getsockname()[1]}
        follower = start({**models["dense"], **place, "tensor_parallel_size": 2})
        wires = []
        for _ in range(2):
            wire = server.accept()[0]
            wire.settimeout(20)
            first, greeting = read_frame(wire)
            assert first == GREETING and struct.unpack_from("<3I", greeting) == (1, 2, len(wires))
            write_frame(wire, WELCOME, greeting[12:44])
            wires.append(wire)
        write_frame(wires[1], PULSE)
        for _ in range(4):  # size of the cache, needs, pages, ready
            first, values = read_frame(wires[0])
            assert first == VALUES
            write_frame(wires[0], VALUES, values)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a message that is too long is not read to its end
            write_frame(wires[0], kind, data)
        while (first := read_frame(wires[1]))[0] == PULSE:
            pass
        assert first[0] == END and text in first[1].decode()
        _, error = follower.communicate(timeout=20)
        assert follower.returncode == 1 and text in error
        for wire in wires:
            wire.close()


def test_a_follower_ends_with_ctrl_c(models: dict[str, dict[str, Any]]) -> None:
    with two_hosts(models["dense"], 2) as (llm, follower):
        llm.generate([[1, 2]])
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=10)
        with pytest.raises(DeviceError, match="host 1"):
            llm.generate([[1, 2]])
    assert follower.returncode == -signal.SIGINT


UNLIKE: list[tuple[dict[str, Any], str]] = [
    ({"version": "0.0.0"}, "another version of llmpy"),
    ({"device": "cpu:avx2"}, "another instruction set"),
    ({"block_size": 32}, "other options"),
    ({"tensor_parallel_size": 3}, "other options"),
    ({"hf_overrides": {"rms_norm_eps": 1e-5}}, "another model"),
]


@pytest.mark.parametrize(("changes", "text"), UNLIKE, ids=[text for _, text in UNLIKE])
def test_unlike_hosts_are_refused(models: dict[str, dict[str, Any]], changes: dict[str, Any], text: str) -> None:
    options = models["dense"]
    if "device" in changes:
        if len(_core.cpu_isas()) < 2:
            pytest.skip("the processor has one instruction set")
        options = {**options, "device": f"cpu:{_core.cpu_isas()[0]}"}
        changes = {"device": f"cpu:{_core.cpu_isas()[1]}"}
    port = free_port()
    shared = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port, "tensor_parallel_size": 2}
    follower = start({**options, **shared, "node_rank": 1, **changes})
    with pytest.raises(ConfigError, match=rf"host 1 \(127.0.0.1:\d+\) has {text}.* than host 0"):
        LLM(**options, **shared, node_rank=0)
    _, error = follower.communicate(timeout=10)
    assert follower.returncode == 1 and f"has {text}" in error and "refused this host" in error


def test_other_weights_are_another_model(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    """Files of equal shapes."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    paths = [write_model(tmp_path / name) for name in ("one", "two")]
    file = paths[1] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 64
    file.write_bytes(data)
    digests = []
    for path in paths:
        config = EngineConfig(model=str(path), device="cpu", nnodes=2, tensor_parallel_size=2)
        digests.append(_hosts._digests(config, {"isa": "auto"}, [], [path / "model.safetensors"]))
    assert digests[0][:3] == digests[1][:3] and digests[0][3] != digests[1][3]


def test_a_process_without_the_token_cannot_join(models: dict[str, dict[str, Any]], monkeypatch: Any) -> None:
    shared = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port(), "tensor_parallel_size": 2}
    stranger = start({**models["dense"], **shared, "node_rank": 1}, LLMPY_HOSTS_TOKEN="another")
    time.sleep(1.5)
    follower = start({**models["dense"], **shared, "node_rank": 1})
    with LLM(**models["dense"], **shared, node_rank=0) as llm:
        assert llm.generate([[1, 2]])[0].outputs[0].token_ids
    assert follower.wait(10) == 0
    follower.communicate()
    _, error = stranger.communicate(timeout=10)
    assert "set the same LLMPY_HOSTS_TOKEN on all hosts" in error


def test_a_host_that_does_not_come(models: dict[str, dict[str, Any]], monkeypatch: Any) -> None:
    monkeypatch.setenv("LLMPY_HOSTS_TIMEOUT", "0.3")
    port = free_port()
    shared = {**models["dense"], "nnodes": 3, "master_addr": "127.0.0.1", "master_port": port, "tensor_parallel_size": 3}
    with pytest.raises(DeviceError, match=rf"host 1 of 3 did not connect to 127.0.0.1:{port} within 0.3 s"):
        LLM(**shared, node_rank=0)
    with pytest.raises(DeviceError, match=rf"host 0 did not answer at 127.0.0.1:{port} within 0.3 s"):
        LLM(**shared, node_rank=1)


def test_a_port_that_is_taken(models: dict[str, dict[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        shared = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": server.getsockname()[1], "tensor_parallel_size": 2}
        with pytest.raises(ConfigError, match=r"cannot listen at 127.0.0.1:\d+: Address already in use") as caught:
            LLM(**models["dense"], **shared, node_rank=0)
    assert caught.value.option == "master_port"


def test_waiting_for_a_host_ends_with_ctrl_c(models: dict[str, dict[str, Any]]) -> None:
    shared = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port(), "tensor_parallel_size": 2}
    for host in (0, 1):
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            LLM(**models["dense"], **shared, node_rank=host)


def test_hosts_say_what_they_wait_for(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    def said(**options: Any) -> list[tuple[str, str]]:
        caplog.clear()
        place = {"nnodes": 3, "tensor_parallel_size": 7, "master_addr": "10.0.0.1", "master_port": 9, "device": "cpu"}
        _hosts.announce(EngineConfig(**{**place, **options}))
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    caplog.set_level("INFO", logger="llmpy")
    waits = ("INFO", "host 0 of 3 waits at 10.0.0.1:9 for the other hosts")
    assert said(node_rank=0) == [
        waits, ("WARNING", "LLMPY_HOSTS_TOKEN is not set: every process that reaches 10.0.0.1:9 can join"),
    ]  # fmt: skip
    assert said(node_rank=1) == [("INFO", "host 1 of 3 computes the ranks 2 to 3 for host 0 at 10.0.0.1:9")]
    assert len(said(node_rank=0, master_addr="127.0.0.1")) == len(said(node_rank=0, master_addr="localhost")) == 1
    assert said(nnodes=1) == []
    monkeypatch.setenv("LLMPY_HOSTS_TOKEN", "secret")
    assert said(node_rank=0) == [waits]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"node_rank": 2}, "node_rank must be below nnodes=2, got 2"),
    ({"tensor_parallel_size": 1}, "tensor_parallel_size must be at least nnodes=2"),
    ({"master_port": 0}, "master_port must be from 1 to 65535"),
    ({"nnodes": 65}, "nnodes must be from 1 to 64"),
    ({}, "wanted node_rank, or the variables RANK and WORLD_SIZE=2 .*have WORLD_SIZE=0"),
    ({"node_rank": 0}, "wanted master_addr or MASTER_ADDR"),
    ({"node_rank": 0, "master_addr": "127.0.0.1"}, "wanted master_port, or MASTER_PORT"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=[text for _, text in BAD])
def test_wrong_options(options: dict[str, Any], text: str, monkeypatch: Any) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=text):
        _hosts.resolve(EngineConfig(**{"device": "cpu", "nnodes": 2, "tensor_parallel_size": 2, **options}))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"data_parallel_size": 2}, "nnodes=2: replicas of several hosts are not supported yet")],
)
def test_what_does_not_work_with_hosts(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        _hosts.resolve(EngineConfig(**{"device": "cpu", "nnodes": 2, "tensor_parallel_size": 2, **options}))
