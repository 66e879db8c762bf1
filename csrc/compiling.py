"""Compiling: which sources become which objects, with which flags; what is missing; how far a build is. setup.py uses it."""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
VERSION = "0.1.0"  # of a commit without a tag: the release that is being made
TAG = re.compile(r"v(\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?)")
V3 = "-mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mmovbe"
ISAS = {
    "avx2": V3,
    "avx512": f"{V3} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16",
}
NEON = {"avx2": "-O2"}
"""The instruction sets on aarch64: the kernels for AVX2, with the vectors of neon.h. -O3 takes minutes for these."""
BACKEND_HEADERS = ("kernels/backend.h", "csrc/base/dummy.h", "csrc/base/mix.h")
CORE_PART = re.compile(r"^/\* ---- functions of the core:.*?(?=^#endif$)", re.MULTILINE | re.DOTALL)
BASELINE_KERNELS = {"backend_cpu.c", "gather.c", "memory.c"}
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
INCLUDE = sysconfig.get_paths()["include"]
CC = shlex.split(os.environ.get("CC") or "cc")
CUDA_ARCHS = "90a,compute_80"
"""Machine code for H100 and H200, and PTX, which the driver translates for all other GPUs from compute capability 8.0 on."""
Unit = tuple[Path, list[str], str]  # source, extra flags, object name


class Object(NamedTuple):
    """An object file to compile; its stamp holds the digest of all that went into it."""

    command: list[str]
    source: Path
    target: Path
    digest: str

    def is_fresh(self) -> bool:
        stamp = self.target.with_suffix(".o.sha256")
        return self.target.exists() and stamp.exists() and stamp.read_text() == self.digest

    def compile(self) -> None:
        stamp = self.target.with_suffix(".o.sha256")
        stamp.unlink(missing_ok=True)
        run([*self.command, "-c", str(self.source), "-o", str(self.target)])
        stamp.write_text(self.digest)


class Progress:
    """One line on the terminal that counts objects. pip hides what a build prints, so the terminal itself is written to."""

    def __init__(self, objects: list[Object]) -> None:
        self.total, self.done, self.start, self.lock = len(objects), 0, time.monotonic(), threading.Lock()
        num_cuda = sum(one.source.suffix == ".cu" for one in objects)
        cuda = f", {num_cuda} of them CUDA (takes minutes; LLMPY_CUDA=0 leaves CUDA out)" if num_cuda else ""
        self.say(f"\nllmpy: compiling {self.total} files{cuda}\n")

    def say(self, text: str) -> None:
        with suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(text)

    def count(self) -> None:
        with self.lock:
            self.done += 1
            minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
            self.say(f"\rllmpy: {self.done} of {self.total} files compiled, {minutes}:{seconds:02}  ")


def project_version() -> str:
    """The version: of the commit's tag (v1.2.3) in an unchanged checkout, else of the source archive, else VERSION."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "describe", "--tags", "--exact-match", "--dirty", "--match", "v[0-9]*"]
        if found := TAG.fullmatch(subprocess.run(command, capture_output=True, text=True).stdout.strip()):
            return found[1]
    archive = ROOT / "PKG-INFO"
    found = re.search(r"^Version: (.+)$", archive.read_text(), re.MULTILINE) if archive.exists() else None
    return found[1] if found else VERSION


def glibc() -> str:
    """The glibc to link for, such as 2.28; "": this machine's."""
    wanted = os.environ.get("LLMPY_GLIBC", "")
    if not re.fullmatch(r"(2\.\d+)?", wanted):
        raise SystemExit(f"llmpy: LLMPY_GLIBC: wanted a version such as 2.28, got {wanted!r}")
    return wanted


def flags() -> list[str]:
    """Compiler flags of every object."""
    common = "-std=c11 -Wall -Wextra -fPIC -fvisibility=hidden -pthread"
    exact = "-ffp-contract=off -fno-strict-aliasing -fno-semantic-interposition"
    debug = os.environ.get("LLMPY_DEBUG") == "1"
    result = [*common.split(), *exact.split(), *(["-O1", "-g", "-DLLMPY_DEBUG"] if debug else ["-O3", "-DNDEBUG"])]
    if os.environ.get("LLMPY_WERROR") == "1":
        result.append("-Werror")
    if sanitize := os.environ.get("LLMPY_SANITIZE"):
        result.append(f"-fsanitize={sanitize}")
    if not FREE_THREADED:
        result.append("-DPy_LIMITED_API=0x030B0000")
    return result


def machine() -> str:
    """The processor that the C compiler compiles for: x86_64, aarch64."""
    told = subprocess.run([*CC, "-dumpmachine"], capture_output=True, text=True).stdout
    return told.strip().partition("-")[0] or platform.machine()


def units(machine: str) -> list[Unit]:
    """Every object of the core."""
    built = NEON if machine == "aarch64" else ISAS
    found: list[Unit] = []
    for source in sorted((ROOT / "csrc").rglob("*.c")):
        extra = ["-I" + INCLUDE] if source.parent.name == "python" else []
        found.append((source, extra, f"{source.parent.name}_{source.stem}.o"))
    for source in sorted((ROOT / "kernels/cpu").glob("*.c")):
        if source.name in BASELINE_KERNELS:
            found.append((source, [], f"cpu_{source.stem}.o"))
        else:
            # A file named for one instruction set is built for that one alone.
            isas = [isa for isa in ISAS if source.stem.endswith("_" + isa)] or list(ISAS)
            for isa in filter(built.__contains__, isas):
                found.append((source, [*built[isa].split(), f"-DISA={isa}"], f"cpu_{source.stem}_{isa}.o"))
    return found


def backend_header() -> str:
    """The header that backends of other packages are compiled with: that of the core and what it includes, as one file."""

    return "".join(_read_header(ROOT / name) for name in BACKEND_HEADERS)


def connector_header() -> str:
    """The header that connectors of other packages are compiled with."""
    return _read_header(ROOT / "csrc/engine/connector_abi.h")


def _read_header(path: Path) -> str:
    """A header of the core without functions of the core, with what it includes in place."""
    text = CORE_PART.sub("", path.read_text())
    return re.sub(
        r'^#include "(.+)"\n', lambda match: _read_header((path.parent / match[1]).resolve()), text, flags=re.MULTILINE
    )


def find_nvcc() -> str | None:
    """The CUDA compiler, or None for a build without CUDA."""
    wanted = os.environ.get("LLMPY_CUDA", "1")
    if wanted == "0":
        return None
    places = [os.environ.get("NVCC"), os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc"), "nvcc"]
    found = next((path for place in places if place and (path := shutil.which(place))), None)
    if found is None and wanted == "require":
        raise SystemExit("llmpy: LLMPY_CUDA=require, but there is no nvcc; set NVCC or CUDA_HOME")
    return found


def cuda_flags() -> list[str]:
    """Flags of every CUDA object; products and sums stay apart, as in C. Kernels are compressed to a fifth of their size."""
    result = ["-std=c++17", "-O3", "-fmad=false", "-DNDEBUG", "--compress-mode=size"]
    result += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    for arch in os.environ.get("LLMPY_CUDA_ARCHS", CUDA_ARCHS).split(","):
        source, _, code = arch.partition(":")
        number = source.removeprefix("compute_")
        code = code or (source if source != number else "sm_" + number)
        result += ["-gencode", f"arch=compute_{number},code={code}"]
    return result + (["-Werror", "all-warnings"] if os.environ.get("LLMPY_WERROR") == "1" else [])


def run(command: list[str]) -> None:
    """Runs a compiler; its own message is all that a failure needs."""
    if subprocess.run(command).returncode:
        raise SystemExit("llmpy: failed: " + shlex.join(command))


def check_tools() -> None:
    """Ends the build in one line if the C compiler or the headers of C or Python are missing."""
    apt, dnf = "Debian, Ubuntu: apt install", "Fedora, RHEL: dnf install"
    if shutil.which(CC[0]) is None:
        raise SystemExit(f"llmpy: no C compiler {CC[0]!r}; install one ({apt} gcc libc6-dev; {dnf} gcc), or set CC")
    probe = subprocess.run([*CC, "-E", "-include", "stdio.h", "-xc", os.devnull], capture_output=True)
    if probe.returncode:
        raise SystemExit(f"llmpy: {shlex.join(CC)} finds no stdio.h; install C's headers ({apt} libc6-dev; {dnf} glibc-devel)")
    if not Path(INCLUDE, "Python.h").exists():
        raise SystemExit(f"llmpy: no {INCLUDE}/Python.h; install Python's headers ({apt} python3-dev; {dnf} python3-devel)")


def read_version(command: list[str], option: str = "--version") -> str:
    """What a compiler says of itself."""
    return subprocess.run([*command, *option.split()], capture_output=True, text=True, check=True).stdout


def plan(units: Iterable[Unit], command: list[str], folder: Path, shared: bytes) -> list[Object]:
    """The objects of some sources.

    Args:
        units: (source, extra flags, object name) of each.
        command: Compiler and flags of all.
        folder: Where objects go.
        shared: What else decides how an object comes out: the compiler's version and all headers.
    """
    state, found = hashlib.sha256(shared), []
    for source, extra, name in units:
        words, digest = [*command, *extra], state.copy()
        digest.update(source.read_bytes() + " ".join(words).encode())
        found.append(Object(words, source, folder / name, digest.hexdigest()))
    return found


def core_objects(folder: Path, version: str) -> list[Object]:
    """Objects of the extension, made in a folder."""
    compiler = read_version(CC).splitlines()[0]
    info = [f'-DLLMPY_COMPILER="{compiler}"', f'-DLLMPY_VERSION="{version}"']
    folders = (ROOT / "csrc", ROOT / "kernels")
    shared_files = [path for folder in folders for ending in ("h", "def") for path in folder.rglob(f"*.{ending}")]
    shared = compiler.encode() + b"".join(path.read_bytes() for path in sorted(shared_files))
    return plan([(source, [*extra, *info], name) for source, extra, name in units(machine())], [*CC, *flags()], folder, shared)


def base_objects(folder: Path) -> list[Object]:
    """Those of them that the CUDA library has, too."""
    return [one for one in core_objects(folder, project_version()) if one.target.name.startswith("base_")]


def cuda_objects(nvcc: str, folder: Path) -> list[Object]:
    """Objects of the CUDA backend, made in a folder."""
    cuda = ROOT / "kernels/cuda"
    doors = [*(ROOT / "kernels").glob("*.h"), ROOT / "kernels/entries.def", ROOT / "csrc/base/iq_grids.def"]
    headers = sorted([*cuda.rglob("*.*h"), *(ROOT / "csrc/base").glob("*.h"), *doors])
    shared = read_version([nvcc]).encode() + b"".join(header.read_bytes() for header in headers)
    units: list[Unit] = [(source, [], f"cuda_{source.stem}.o") for source in sorted(cuda.rglob("*.cu"))]
    return plan(units, [nvcc, *cuda_flags()], folder, shared)


def compile_all(objects: list[Object]) -> None:
    """Compiles what is not fresh, MAX_JOBS at a time (default: the processors that this process may use)."""
    stale = [one for one in objects if not one.is_fresh()]
    if not stale:
        return
    progress = Progress(stale)

    def compile_one(one: Object) -> None:
        one.compile()
        progress.count()

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))) as pool:
        waiting = [pool.submit(compile_one, one) for one in stale]
        try:
            for one in waiting:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
