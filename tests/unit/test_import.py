"""The cost of `import llmpy`: time, modules, threads, handlers; and the size of the wheel."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

# -P: what the tests imported is looked for, not whatever lies in the working directory.
PROBE = """
import json, os, signal, sys, time
sys.path[:0] = json.loads(sys.argv[1])
before = set(sys.modules)
handlers = [signal.getsignal(n) for n in range(1, 65) if n not in (32, 33)]
start, cpu = time.perf_counter(), time.process_time()
import llmpy
cpu, wall = time.process_time() - cpu, time.perf_counter() - start
loaded = set(sys.modules) - before
import threading
print(json.dumps({
    "wall": wall, "cpu": cpu,
    "modules": {name: getattr(sys.modules[name], "__file__", None) for name in loaded},
    "threads": max(threading.active_count(), len(os.listdir("/proc/self/task"))),
    "handlers": handlers == [signal.getsignal(n) for n in range(1, 65) if n not in (32, 33)],
    "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in os.listdir("/proc/self/fd")
                   if os.path.lexists(f"/proc/self/fd/{fd}")),
    "file": llmpy.__file__,
}))
"""
HEAVY = {"numpy", "tokenizers", "jinja2", "tqdm", "huggingface_hub", "asyncio", "inspect", "dataclasses", "socket",
         "importlib.metadata", "concurrent.futures", "subprocess", "logging", "multiprocessing"}  # fmt: skip


REFERENCE = PROBE.replace("import llmpy\n", "import asyncio as llmpy\n")


def probe(folder: Path, code: str = PROBE) -> dict[str, object]:
    import llmpy

    root = str(Path(llmpy.__file__).parents[1])
    command = [sys.executable, "-P", "-c", code, json.dumps([root])]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("import")
    probe(folder)  # writes the bytecode
    return [probe(folder) for _ in range(7)]


def test_the_import_is_short(probes: list[dict[str, object]], tmp_path: Path) -> None:
    """The import takes less processor time and less wall time (which includes waiting) than the import of asyncio."""
    references = [probe(tmp_path, REFERENCE) for _ in probes]
    for kind in ("cpu", "wall"):
        ours, theirs = (min(float(str(p[kind])) for p in found) for found in (probes, references))
        assert ours < theirs, f"{kind}: {ours * 1e3:.1f} ms, and asyncio {theirs * 1e3:.1f} ms"


def test_the_import_loads_nothing_of_others(probes: list[dict[str, object]]) -> None:
    modules = probes[0]["modules"]
    assert isinstance(modules, dict)
    folder = str(Path(str(probes[0]["file"])).parent)
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    foreign = {
        name: file
        for name, file in modules.items()
        if file
        and not str(file).startswith(folder)
        and ("site-packages" in str(file) or not any(str(file).startswith(path) for path in library))
    }
    assert not foreign
    assert not HEAVY & set(modules)


def test_the_import_starts_nothing(probes: list[dict[str, object]]) -> None:
    assert probes[0]["threads"] == 1 and probes[0]["handlers"] is True and probes[0]["sockets"] == 0


def test_a_wheel_weighs_little(tmp_path: Path) -> None:
    """A wheel is the compressed files of the package, so this measures the imported package's files."""
    import llmpy

    package = Path(llmpy.__file__).parent
    for name, limit in {"core": 4_000_000, "_backends": 12_000_000}.items():
        target = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in package.rglob("*"):
                is_of_cuda = "_backends" in path.relative_to(package).parts
                if path.is_file() and path.suffix != ".pyc" and is_of_cuda == (name == "_backends"):
                    archive.write(path, path.relative_to(package))
        assert target.stat().st_size < limit, name
