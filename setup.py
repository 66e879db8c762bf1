"""Builds the C core into llmpy/_core.abi3.so: C11, hidden visibility, each CPU kernel once per instruction set.

Build variables: CC, LLMPY_DEBUG (1: -O1 -g and assertions), LLMPY_SANITIZE (a -fsanitize list), LLMPY_WERROR (1), MAX_JOBS.
"""

import hashlib
import os
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
V3 = "-mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mmovbe"
ISAS = {
    "avx2": V3,
    "avx512": f"{V3} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16",
}
BASELINE_KERNELS = {"backend_cpu.c", "pool.c"}
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


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


def units() -> list[tuple[Path, list[str], str]]:
    """(source, extra flags, object name) of every object of the core."""
    found: list[tuple[Path, list[str], str]] = []
    for source in sorted((ROOT / "csrc").rglob("*.c")):
        extra = ["-I" + sysconfig.get_paths()["include"]] if source.parent.name == "python" else []
        found.append((source, extra, f"{source.parent.name}_{source.stem}.o"))
    for source in sorted((ROOT / "kernels/cpu").glob("*.c")):
        if source.name in BASELINE_KERNELS:
            found.append((source, [], f"cpu_{source.stem}.o"))
        else:
            # A file named for one instruction set is built for that one alone.
            isas = [isa for isa in ISAS if source.stem.endswith("_" + isa)] or list(ISAS)
            found += [(source, [*ISAS[isa].split(), f"-DISA={isa}"], f"cpu_{source.stem}_{isa}.o") for isa in isas]
    return found


def run(command: list[str]) -> None:
    """Runs a compiler; its own message is all that a failure needs."""
    if subprocess.run(command).returncode:
        raise SystemExit("llmpy: failed: " + shlex.join(command))


class Build(build_ext):
    """Compiles what changed, in parallel, and links the extension."""

    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
        headers = sorted([*(ROOT / "csrc").rglob("*.h"), *(ROOT / "kernels").rglob("*.h")])
        shared = hashlib.sha256(version.encode() + b"".join(h.read_bytes() for h in headers))
        info = [f'-DLLMPY_COMPILER="{version}"', f'-DLLMPY_VERSION="{self.distribution.get_version()}"']

        def compile_unit(unit: tuple[Path, list[str], str]) -> Path:
            source, extra, name = unit
            command = [*compiler, *flags(), *extra, *info, "-c", str(source)]
            state = shared.copy()
            state.update(source.read_bytes() + " ".join(command).encode())
            target, stamp = objects / name, objects / (name + ".sha256")
            if not (target.exists() and stamp.exists() and stamp.read_text() == state.hexdigest()):
                stamp.unlink(missing_ok=True)
                run([*command, "-o", str(target)])
                stamp.write_text(state.hexdigest())
            return target

        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(jobs) as pool:
            linked = list(pool.map(compile_unit, units()))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        link = [f for f in flags() if f.startswith("-fsanitize")] + [
            "-shared",
            "-pthread",
            "-Wl,--exclude-libs,ALL",
            "-Wl,-z,now",
        ]
        run([*compiler, *link, *map(str, linked), "-lm", "-o", str(output)])


setup(
    ext_modules=[Extension("llmpy._core", ["csrc/python/py_module.c"], py_limited_api=not FREE_THREADED)],
    cmdclass={"build_ext": Build},
)
