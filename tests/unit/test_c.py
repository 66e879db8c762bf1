"""Builds each tests/c/test_*.c against the core under ASan and UBSan, and those of threads under TSan, and runs it."""

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests/c").glob("test_*.c"))
TRACES = [path for path in TESTS if "trace_run_all" in path.read_text()]
THREADED = [path for path in TESTS if "pthread.h" in path.read_text() or path.stem == "test_overlap"]
COMPILER = shlex.split(os.environ.get("CC", "cc"))
FLAGS = shlex.split(
    "-std=c11 -Wall -Wextra -Werror -O1 -g1 -DLLMPY_DEBUG -pthread -ffp-contract=off -fno-omit-frame-pointer "
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
)
THREAD_FLAGS = [flag if not flag.startswith("-fsanitize") else "-fsanitize=thread" for flag in FLAGS[:-1]]


def run(command: list[str | Path]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{shlex.join(map(str, command))}\n{result.stdout}{result.stderr}"


def build_core(folder: Path, flags: list[str], *parts: str) -> Path:
    """Parts of the core as an archive: a test pulls in only the objects that it needs."""

    def compile_file(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        run([*COMPILER, *flags, "-c", source, "-o", target])
        return target

    sources = sorted(path for part in parts for path in (ROOT / "csrc" / part).glob("*.c"))
    sources.append(ROOT / "kernels/cpu/gather.c")  # the one file of kernels with threads that meet
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_file, sources))
    library = folder / "libcore.a"
    run(["ar", "rcs", library, *objects])
    return library


@pytest.fixture(scope="session")
def core_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core under the sanitizers of addresses and undefined behaviour."""
    if not shutil.which(COMPILER[0]):
        pytest.skip(f"no C compiler: {COMPILER[0]}")
    folder = tmp_path_factory.mktemp("c")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([*COMPILER, *FLAGS, probe, "-o", folder / "probe"], capture_output=True).returncode:
        pytest.skip("the C compiler has no address and undefined-behaviour sanitizers")

    return build_core(folder, FLAGS, "base", "step", "program", "engine")


@pytest.mark.parametrize("source", TESTS, ids=lambda source: source.stem)
def test_c(source: Path, core_library: Path, tmp_path: Path) -> None:
    program = tmp_path / source.stem
    run([*COMPILER, *FLAGS, source, core_library, "-lm", "-o", program])
    env = os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = subprocess.run([program], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", TRACES, ids=lambda source: source.stem)
def test_longer_traces_and_200_kills(source: Path, core_library: Path, tmp_path: Path) -> None:
    program = tmp_path / source.stem
    run([*COMPILER, *FLAGS, source, core_library, "-lm", "-o", program])
    env = os.environ | {"KILLS": "200", "TRACE_OPERATIONS": "100000"}
    result = subprocess.run([program], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def thread_checked_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core under the thread sanitizer."""
    folder = tmp_path_factory.mktemp("threads")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    build = [*COMPILER, *THREAD_FLAGS, probe, "-o", folder / "probe"]
    if not shutil.which(COMPILER[0]) or subprocess.run(build, capture_output=True).returncode:
        pytest.skip("the C compiler has no thread sanitizer")
    if subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip("the thread sanitizer does not run here")
    return build_core(folder, THREAD_FLAGS, "base", "step", "program", "engine")


@pytest.mark.parametrize("source", THREADED, ids=lambda source: source.stem)
def test_threads_of_c(source: Path, thread_checked_core: Path, tmp_path: Path) -> None:
    """There are no data races in commands, the outbox, the engine's thread, its subscriptions and notifiers."""
    program = tmp_path / source.stem
    run([*COMPILER, *THREAD_FLAGS, source, thread_checked_core, "-lm", "-o", program])
    result = subprocess.run([program], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
