"""llmpy.kv.lmcache against LMCache's released server, where that is installed; and against one that is gone or talks
nonsense."""

import contextlib
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from modules import load

from llmpy.kv.lmcache import LMCache

connectors = load(Path(__file__).with_name("test_connectors.py"))
tiers = connectors.tiers
Make = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = os.environ.get("LMCACHE_PYTHON", sys.executable)  # of an environment that has LMCache
    if python == sys.executable and importlib.util.find_spec("lmcache") is None:
        pytest.skip("LMCache is not installed, and LMCACHE_PYTHON is not set")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    env = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
    with subprocess.Popen(command, env=env, cwd=tmp_path_factory.mktemp("lmcache")) as process:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
        process.kill()


@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:2]))
def test_blocks_outlive_the_engine(tiny_model: Make, model: tuple[str, str, str, int], device: str, server: str) -> None:
    path = tiny_model(*model[:2])
    connectors.compare(path, device, model[3], LMCache(server), kv_cache_dtype=model[2])
    stats = connectors.compare(path, device, model[3], LMCache(server), kv_cache_dtype=model[2])
    assert stats.disk_cache_hits > 100 and stats.disk_errors == stats.disk_misses == 0


NO, HUGE = bytes(36), struct.pack("=9i", 200, (1 << 31) - 1, *[0] * 7)


@pytest.mark.parametrize("answer", [None, b"", NO, HUGE], ids=["gone", "closes", "no", "huge"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_may_be_gone_or_talk_nonsense(tiny_model: Make, device: str, answer: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            while True:
                try:
                    caller = listener.accept()[0]
                except OSError:
                    return
                threading.Thread(target=talk, args=(caller,), daemon=True).start()

        def talk(caller: socket.socket) -> None:
            with caller, contextlib.suppress(OSError):
                while answer and caller.recv(186):
                    caller.sendall(answer)

        if answer is None:
            listener.close()
        else:
            threading.Thread(target=serve, daemon=True).start()
        stats = connectors.compare(tiny_model("llama", "float32"), device, 20, LMCache(address, 0.2))
        assert stats.disk_loaded_bytes == 0 and (answer == NO or stats.disk_errors > 0)


def test_wrong_addresses_name_themselves() -> None:
    for address in ("", "nowhere", ":80", "host:port"):
        with pytest.raises(ValueError, match="address must be 'HOST:PORT'"):
            LMCache(address)
