"""Connectors in C from other packages: one that works, by path and by entry point, and others that fail, lie, hang or do not
fit. Ids and logprob bits are those of a request that is alone, without a cache."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from modules import load

import llmpy
from llmpy import ConfigError

connectors = load(Path(__file__).with_name("test_connectors.py"))
tiers = connectors.tiers
Make = Callable[[str, str], Path]
SHELF = Path(__file__).parents[2] / "examples/connector"
BAD = Path(__file__).with_name("bad_connector.c")
Build = Callable[..., str]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds a connector against the installed header."""

    def make(source: Path = BAD, change: str = "") -> str:
        library = tmp_path / f"{source.stem}.so"
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-DBREAK={change}"]
        subprocess.run(["cc", *flags, f"-I{llmpy.get_include()}", str(source), "-o", str(library)], check=True)
        return str(library)

    return make


@pytest.fixture
def shelf(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Installs examples/connector; the name of its entry point."""
    site = tmp_path / "site"
    shutil.copytree(SHELF / "llmpy_shelf", site / "llmpy_shelf")
    shutil.copy(build(SHELF / "shelf.c"), site / "llmpy_shelf/_shelf.abi3.so")
    (site / "llmpy_shelf-1.0.dist-info").mkdir()
    (site / "llmpy_shelf-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: llmpy-shelf\nVersion: 1.0\n")
    (site / "llmpy_shelf-1.0.dist-info/entry_points.txt").write_text("[llmpy.connectors]\nshelf = llmpy_shelf:library\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "llmpy_shelf", raising=False)
    return "shelf"


@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:2]))
def test_blocks_outlive_the_engine(
    tiny_model: Make, model: tuple[str, str, str, int], device: str, shelf: str, tmp_path: Path
) -> None:
    store = {"name": shelf, "folder": str(tmp_path / "kept")}
    (tmp_path / "kept").mkdir()
    path = tiny_model(*model[:2])
    connectors.compare(path, device, model[3], store, kv_cache_dtype=model[2])
    assert len(list((tmp_path / "kept").iterdir())) >= 20
    stats = connectors.compare(path, device, model[3], store, kv_cache_dtype=model[2])
    assert stats.disk_cache_hits > 100 and stats.disk_errors == stats.disk_misses == 0
    with tiers.open_llm(path, device, **connectors.options(store, kv_cache_dtype=model[2])) as llm:
        llm.reset_prefix_cache()
    assert not list((tmp_path / "kept").iterdir())


def test_damaged_blocks_are_computed(tiny_model: Make, device: str, build: Build, tmp_path: Path) -> None:
    store, path = {"name": build(SHELF / "shelf.c"), "folder": str(tmp_path)}, tiny_model("llama", "float32")
    connectors.compare(path, device, 20, store)
    for file in tmp_path.glob("*-*-0"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    stats = connectors.compare(path, device, 20, store)
    assert stats.disk_bad_files == stats.disk_misses > 0


def test_recurrent_states_come_from_a_library(recurrent_model: Path, device: str, build: Build, tmp_path: Path) -> None:
    store = {"name": build(SHELF / "shelf.c"), "folder": str(tmp_path)}
    connectors.compare(recurrent_model, device, 40, store)
    assert connectors.compare(recurrent_model, device, 40, store).disk_loaded_bytes > 0


FAULTS = {"": (0, 0, 0), "fails match": (1, 0, 0), "fails load": (1, 1, 0), "fails save": (1, 0, 0), "claims": (0, 1, 0)}
FAULTS |= {"answers nonsense": (1, 0, 0), "loads nonsense": (0, 1, 0), "changes bytes": (0, 1, 1), "counts": (1, 0, 0)}


@pytest.mark.parametrize(("how", "counted"), FAULTS.items(), ids=[how or "works" for how in FAULTS])
def test_a_library_may_fail_and_lie(tiny_model: Make, device: str, build: Build, how: str, counted: tuple[int, ...]) -> None:
    stats = connectors.compare(tiny_model("llama", "float32"), device, 20, {"name": build(), "how": how})
    found = (stats.disk_errors, stats.disk_misses, stats.disk_bad_files)
    assert tuple(int(count > 0) for count in found) == counted
    assert stats.disk_loaded_bytes == 0 or not counted[1] or how == "claims"
    assert stats.disk_blocks_cached > 0


@pytest.mark.parametrize("method", ["match", "load", "save"])
def test_a_library_may_hang(tiny_model: Make, device: str, build: Build, method: str) -> None:
    begun = time.monotonic()
    connectors.compare(
        tiny_model("llama", "float32"), device, 20, {"name": build(), "how": f"hangs {method}", "deadline_s": 0.1}
    )
    assert time.monotonic() - begun < 20


UNFIT = {
    "return NULL": "needs a newer llmpy",
    "grown.table.abi = 99": "of another ABI",
    "grown.table.size_bytes = 16": "of another ABI",
    "grown.table.load = 0": "lacks one of open, close, match, load and save",
}


@pytest.mark.parametrize(("change", "message"), UNFIT.items(), ids=UNFIT)
def test_a_library_may_not_fit(tiny_model: Make, device: str, build: Build, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiers.open_llm(tiny_model("llama", "float32"), device, **connectors.options({"name": build(change=change)}))


def test_what_is_wrong_with_a_library_names_itself(
    tiny_model: Make, device: str, build: Build, tmp_path: Path, shelf: str
) -> None:
    path, empty = tiny_model("llama", "float32"), tmp_path / "empty.c"
    empty.write_text("int nothing;\n")
    for store, message in (
        ({"name": build(empty)}, "has no llmpy_connector"),
        ({"name": build(), "how": "fails open"}, "the shop is closed"),
        ({"name": shelf}, "wanted the option folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiers.open_llm(path, device, **connectors.options(store))
    (tmp_path / "site/llmpy_shelf/_shelf.abi3.so").unlink()
    with pytest.raises(ConfigError, match="kv_connector 'shelf': "):
        tiers.open_llm(path, device, **connectors.options({"name": shelf, "folder": "/tmp"}))
