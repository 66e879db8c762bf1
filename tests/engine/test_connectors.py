"""Connectors in Python behind the cache in host memory: one that works, and others that raise, lie, hang or answer nonsense.
Ids and logprob bits are those of a request that is alone, without a cache."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modules import load

from llmpy import ConfigError, kv

tiers = load(Path(__file__).with_name("test_tiers.py"))
disk = load(Path(__file__).with_name("test_disk_cache.py"))
Make = Callable[[str, str], Path]


def options(store: kv.Connector, size_bytes: int = 128 << 10, **more: Any) -> dict[str, Any]:
    return {"host_cache_bytes": size_bytes, "kv_connector": store, "prefix_cache_seed": 3} | more


def compare(path: Path, device: str, blocks: int, store: kv.Connector, **more: Any) -> Any:
    """Stats of an engine whose outputs are those without a cache."""
    wanted, size_bytes = disk.alone(path, device, **more), disk.pool_bytes(path, device, blocks, **more)
    with tiers.open_llm(path, device, size_bytes, **options(store, size_bytes, **more)) as llm:
        found, stats = tiers.run_twice(llm, tiers.prompts())
        assert found == wanted * 2
        assert stats.allocations_since_warmup == 0 and stats.kv_blocks_free == stats.kv_blocks_total
        return stats


@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:3]))
def test_blocks_come_from_another_engine(tiny_model: Make, model: tuple[str, str, str, int], device: str) -> None:
    store = kv.Memory(8 << 20)
    path = tiny_model(*model[:2])
    compare(path, device, model[3], store, kv_cache_dtype=model[2])
    assert len(store) >= 20 and store.used > 0
    stats = compare(path, device, model[3], store, kv_cache_dtype=model[2])
    assert stats.disk_cache_hits > 100 and stats.disk_errors == stats.disk_misses == 0
    store.clear(bytes(16))
    assert len(store) >= 20


def test_recurrent_states_come_from_another_engine(recurrent_model: Path, device: str) -> None:
    store = kv.Memory(64 << 20)
    compare(recurrent_model, device, 40, store)
    assert compare(recurrent_model, device, 40, store).disk_loaded_bytes > 0


class Raises(kv.Memory):
    def __init__(self, method: str) -> None:
        super().__init__(8 << 20)
        setattr(self, method, self._raise)

    def _raise(self, *arguments: object) -> None:
        raise ValueError(f"not today: {len(arguments)}")


@pytest.mark.parametrize("method", ["match", "load", "save"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_methods_may_raise(tiny_model: Make, device: str, method: str) -> None:
    store = Raises(method)
    compare(tiny_model("llama", "float32"), device, 20, store)
    stats = compare(tiny_model("llama", "float32"), device, 20, store)
    assert stats.disk_errors > 0
    if method != "match":  # what it has saved itself an engine need not ask for
        assert stats.disk_loaded_bytes == 0


class Lies(kv.Memory):
    """Has everything, says it; what it gives has another size, or is no bytes at all."""

    def __init__(self, answer: object) -> None:
        super().__init__(8 << 20)
        self.answer = answer

    def match(self, names: list[bytes]) -> list[bool]:
        return [True] * len(names)

    def load(self, name: bytes) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [None, b"", b"short", 7, bytes(1 << 20)], ids=["none", "empty", "short", "int", "long"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_answers_may_be_wrong(tiny_model: Make, device: str, answer: object) -> None:
    stats = compare(tiny_model("llama", "float32"), device, 20, Lies(answer))
    assert stats.disk_misses > 0 and stats.disk_loaded_bytes == 0


class Counts(kv.Memory):
    def match(self, names: list[bytes]) -> list[bool]:
        return [True] * (len(names) + 1)


def test_a_match_of_another_length_counts_as_none(tiny_model: Make, device: str) -> None:
    assert compare(tiny_model("llama", "float32"), device, 20, Counts(8 << 20)).disk_errors > 0


class Hangs(kv.Memory):
    """One method does not come back until the test is over."""

    deadline_s = 0.1

    def __init__(self, method: str) -> None:
        super().__init__(8 << 20)
        self.hung, self.goes_on = threading.Event(), threading.Event()
        self.method = method

    def _wait(self, method: str) -> None:
        if method == self.method:
            self.hung.set()
            self.goes_on.wait()

    def match(self, names: list[bytes]) -> list[bool]:
        self._wait("match")
        return super().match(names)

    def load(self, name: bytes) -> bytes | None:
        self._wait("load")
        return super().load(name)

    def save(self, name: bytes, data: bytes) -> None:
        self._wait("save")
        super().save(name, data)


@pytest.mark.parametrize("method", ["match", "load", "save"])
def test_methods_may_hang(tiny_model: Make, device: str, method: str) -> None:
    path, store = tiny_model("llama", "float32"), Hangs(method)
    if method == "load":
        store.method = ""
        compare(path, device, 20, store)
        store.method = method
    begun = time.monotonic()
    compare(path, device, 20, store)
    assert store.hung.is_set() and time.monotonic() - begun < 20
    store.goes_on.set()


def test_a_reset_clears_the_store(tiny_model: Make, device: str) -> None:
    path, store, prompt = tiny_model("llama", "float32"), kv.Memory(8 << 20), tiers.prompts()[-1]
    for cached in (0, 128):
        with tiers.open_llm(path, device, **options(store, 4 << 20)) as llm:
            assert llm.generate([prompt], [tiers.params(0)], use_tqdm=False)[0].num_cached_tokens == cached
    with tiers.open_llm(path, device, **options(store)) as llm:
        llm.reset_prefix_cache()
        assert llm.generate([prompt], [tiers.params(0)], use_tqdm=False)[0].num_cached_tokens == 0


def test_memory_keeps_what_was_used_last() -> None:
    store = kv.Memory(10)
    for i in range(4):
        store.save(bytes([i]), bytes(3))
    assert store.match([bytes([i]) for i in range(4)]) == [False, True, True, True] and store.used == 9
    assert store.load(b"\1") == bytes(3) and store.load(b"\0") is None
    store.save(b"\7", bytes(4))
    assert store.match([b"\1", b"\2", b"\3", b"\7"]) == [True, False, True, True] and store.used == 10
    with pytest.raises(ValueError, match="limit must be above 0"):
        kv.Memory(0)


def test_a_store_in_memory_by_name(tiny_model: Make, device: str) -> None:
    path = tiny_model("llama", "float32")
    store = {"name": "memory", "bytes": "8MiB"}
    size_bytes, wanted = disk.pool_bytes(path, device, 20), disk.alone(path, device)
    with tiers.open_llm(path, device, size_bytes, **options(store, size_bytes)) as llm:  # type: ignore[arg-type]
        for _ in range(20):  # a quick machine computes before the first blocks have been saved
            found, stats = tiers.run_twice(llm, tiers.prompts())
            assert found == wanted * 2
            if stats.disk_cache_hits:
                return
    pytest.fail("no token came from the store")


def make() -> kv.Memory:
    return kv.Memory(1 << 20)


def test_wrong_connectors_name_themselves(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    with pytest.raises(TypeError, match=r"kv_connector must be a llmpy.kv.Connector, a dict or a str, but is of type int"):
        tiers.open_llm(path, device, **options(7))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_connector must be a Connector, or 'module:name'"):
        tiers.open_llm(path, device, **options("no_such_module:make"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kv_connector must be a Connector, .* missing .*'limit'"):
        tiers.open_llm(path, device, **options("llmpy.kv:Memory"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_connector must be another name; files are the option disk_cache="):
        tiers.open_llm(path, device, **options({"name": "file", "path": tmp_path}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_connector: bytes must be above 0 with 'memory', the most that its blocks take"):
        tiers.open_llm(path, device, **options({"name": "memory"}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_connector must be None with disk_cache"):
        tiers.open_llm(path, device, **options(make(), disk_cache={"path": tmp_path, "bytes": "1MiB"}))
    with pytest.raises(ConfigError, match="host_cache_bytes must be above 0 with kv_connector"):
        tiers.open_llm(path, device, **options(make(), host_cache_bytes=0))


class Slow(kv.Memory):
    def load(self, name: bytes) -> bytes | None:
        time.sleep(0.02)
        return super().load(name)


@pytest.mark.parametrize("loads", ["auto", "always"])
def test_slow_loads_are_skipped(tiny_model: Make, device: str, loads: str) -> None:
    path, store, batch = tiny_model("llama", "float32"), Slow(8 << 20), tiers.prompts()[4:]
    with tiers.open_llm(path, device, **options(store, 4 << 20)) as llm:
        wanted = [tiers.bits(llm.generate([prompt], [tiers.params(0)], use_tqdm=False)[0]) for prompt in batch]
    with tiers.open_llm(path, device, **options(store, 4 << 20, cache_loads=loads)) as llm:
        llm.generate([[7] * 130], [tiers.params(0)], use_tqdm=False)
        found, cached = [], []
        for prompt in batch:
            output = llm.generate([prompt], [tiers.params(0)], use_tqdm=False)[0]
            found.append(tiers.bits(output))
            cached.append(output.num_cached_tokens)
        stats = llm.stats()
    assert found == wanted
    assert cached == ([128, 0, 0, 0] if loads == "auto" else [128] * 4)
    assert (stats.skipped_loads, stats.skipped_load_tokens) == ((3, 384) if loads == "auto" else (0, 0))
