"""Builds: compiled files, messages and archives; licences of linked code, a missing compiler, progress.

Compilers here are scripts that write empty files, so a whole build takes seconds; only the slow test really compiles.
"""

import os
import pty
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FAKE = """#!/bin/sh
case "$*" in *--version*) echo "fake 1.0"; exit;; esac
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then : > "$2"; fi
    shift
done
"""


def without_own_variables() -> dict[str, str]:
    """The environment without what decides how llmpy is built."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLMPY_") and name != "CC"}


def setup(*words: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs setup.py in the source folder."""
    command = [sys.executable, "setup.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=without_own_variables() | variables, capture_output=True, text=True)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A compiler that makes empty files."""
    path = tmp_path / "fake"
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


def build(folder: Path, compiler: Path, **variables: str) -> set[str]:
    """The files that a build with the fake compiler puts into a wheel."""
    words = ["-q", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    done = setup(*words, CC=str(compiler), NVCC=str(compiler), **variables)
    assert done.returncode == 0, done.stderr
    return {str(path.relative_to(folder / "lib")) for path in (folder / "lib").rglob("*") if path.is_file()}


def test_the_cuda_library_comes_with_the_licences_of_what_is_in_it(tmp_path: Path, fake: Path) -> None:
    folder = "llmpy/_backends"
    core = {"llmpy/_core.abi3.so", "llmpy/include/llmpy_backend.h", "llmpy/include/llmpy_connector.h"}
    cuda = {f"{folder}/{name}" for name in ("libllmpy_cuda13.so", "NOTICE.txt", "NVIDIA-CUDA-EULA.txt")}
    assert build(tmp_path, fake) == core | cuda
    assert "libcudart_static" in (tmp_path / "lib" / folder / "NOTICE.txt").read_text()
    assert build(tmp_path, fake, LLMPY_CUDA="0") == core


def test_every_static_library_is_in_the_notice() -> None:
    notice = (ROOT / "kernels/cuda/licenses/NOTICE.txt").read_text()
    linked = re.findall(r"-static-(lib[a-z+]+)|-cudart\", \"(static)", (ROOT / "csrc/linking.py").read_text())
    names = {library or "libcudart_static" for library, _ in linked}
    assert names == {"libcudart_static", "libstdc++", "libgcc"} and not [name for name in names if name not in notice]


def test_a_missing_compiler_is_told_in_one_line() -> None:
    done = setup("build", CC="/nowhere/cc -pipe")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("llmpy: no C compiler '/nowhere/cc'; install one (Debian, Ubuntu: apt install gcc")
    assert "copying" not in done.stdout


def test_missing_headers_are_told_in_one_line(tmp_path: Path, fake: Path) -> None:
    code = "import sys; sys.path.insert(0, 'csrc'); import compiling; compiling.INCLUDE = '/nowhere'; compiling.check_tools()"
    wanted = {str(fake): "no /nowhere/Python.h; install Python's headers", "false": "finds no stdio.h; install C's"}
    for compiler, word in wanted.items():
        environment = {**os.environ, "CC": compiler}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and word in done.stderr, done.stderr


def test_a_terminal_shows_the_progress_although_pip_hides_the_output(tmp_path: Path, fake: Path) -> None:
    words = ["setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    command = ["sh", "-c", 'exec "$@" >/dev/null 2>&1', "sh", sys.executable, *words]
    variables = {"CC": str(fake), "NVCC": str(fake), "LLMPY_CUDA": "1"}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, {**without_own_variables(), **variables})
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # the terminal closes with its last process
        pass
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0, shown
    total = len(list((tmp_path / "temp").glob("*.o")))
    num_cuda = len(list((ROOT / "kernels/cuda").rglob("*.cu")))
    assert f"compiling {total} files, {num_cuda} of them CUDA (takes minutes; LLMPY_CUDA=0 leaves CUDA out)" in shown.decode()
    assert f"{total} of {total} files compiled, 0:" in shown.decode()


def make_sdist(folder: Path) -> Path:
    done = setup("-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder)
    assert done.returncode == 0, done.stderr
    [archive] = folder.glob("*.tar.gz")
    return archive


def test_the_source_archive_has_all_that_a_build_reads(tmp_path: Path) -> None:
    with tarfile.open(make_sdist(tmp_path)) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    files = [path for part in ("csrc", "kernels", "llmpy") for path in (ROOT / part).rglob("*") if path.is_file()]
    made = {"_backends", "include"}
    sources = [path for path in files if path.suffix not in (".so", ".pyc") and path.parent.name not in made]
    wanted = {str(path.relative_to(ROOT)) for path in sources}
    given = {name for name in names if name.split("/")[0] in ("csrc", "kernels", "llmpy")}
    assert given == wanted
    top = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert top <= names


def lower_bounds() -> list[str]:
    """The oldest version of each dependency that pyproject.toml allows, of the core and of what the tests below need."""
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *extras["server"], *extras["structured"], *extras["dtypes"]]
    return sorted({re.sub(r"([\w.-]+)>=([^,]+).*", r"\1==\2", text.replace("_", "-")) for text in texts})


def test_every_dependency_has_a_lower_bound() -> None:
    assert len(lower_bounds()) > 8 and all(re.fullmatch(r"[\w-]+==[\d.]+", text) for text in lower_bounds()), lower_bounds()


QUICK = ["api/test_generate.py", "api/test_real.py", "api/test_structured_outputs.py"]
QUICK += ["unit/test_tokenizer.py", "server/test_completions.py", "server/test_chat.py"]
"""Tests of every dependency: arrays, tokenizers, templates, bars, grammars, HTTP."""


@pytest.mark.slow
def test_source_archive_to_wheel_to_an_environment_of_lower_bounds(tmp_path: Path) -> None:
    """The archive becomes a wheel in a fresh environment, and passes quick tests with the oldest dependencies allowed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}

    def run(*words: object) -> str:
        done = subprocess.run([*map(str, words)], cwd=tmp_path, env=kept | {"LLMPY_CUDA": "0"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "-q", "--upgrade", "pip")
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "wheels", make_sdist(tmp_path))
    [wheel] = (tmp_path / "wheels").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "llmpy/_core.abi3.so" in names and not [name for name in names if not name.startswith("llmpy")]
    assert wheel.name.endswith("-cp311-abi3-linux_x86_64.whl") and wheel.stat().st_size < 3e6, wheel.stat().st_size
    run(python, "-m", "pip", "install", "-q", wheel, *lower_bounds(), "pytest>=8", "safetensors", "httpx", "jsonschema")
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower().replace("_", "-").splitlines()
    assert {text.lower() for text in lower_bounds()} <= set(installed)
    options = ["-q", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    run(python, "-m", "pytest", *options, *(ROOT / "tests" / one for one in QUICK))
