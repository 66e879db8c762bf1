"""Builds the C core into llmpy/_core.abi3.so: C11, hidden visibility, each CPU kernel once per instruction set.

With nvcc (NVCC, CUDA_HOME/bin, PATH) and LLMPY_CUDA other than 0 (require: nvcc must be there) it also builds
llmpy/_backends/libllmpy_cuda13.so, a backend that is loaded only when a CUDA device is asked for.

Build variables: CC, NVCC, LLMPY_CUDA, LLMPY_CUDA_ARCHS (90a,...), LLMPY_DEBUG (1: -O1 -g and assertions),
LLMPY_SANITIZE (a -fsanitize list), LLMPY_WERROR (1), MAX_JOBS.
"""

import hashlib
import os
import shlex
import shutil
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
BASELINE_KERNELS = {"backend_cpu.c", "memory.c", "pool.c"}
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
    """Flags of every CUDA object; products and sums stay apart, as in C."""
    result = ["-std=c++17", "-O3", "-fmad=false", "-DNDEBUG", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    for arch in os.environ.get("LLMPY_CUDA_ARCHS", "90a").split(","):
        result += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    return result + (["-Werror", "all-warnings"] if os.environ.get("LLMPY_WERROR") == "1" else [])


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

        def compile_file(command: list[str], source: Path, name: str, state: "hashlib._Hash") -> Path:
            state.update(source.read_bytes() + " ".join(command).encode())
            target, stamp = objects / name, objects / (name + ".sha256")
            if not (target.exists() and stamp.exists() and stamp.read_text() == state.hexdigest()):
                stamp.unlink(missing_ok=True)
                run([*command, "-c", str(source), "-o", str(target)])
                stamp.write_text(state.hexdigest())
            return target

        def compile_unit(unit: tuple[Path, list[str], str]) -> Path:
            source, extra, name = unit
            return compile_file([*compiler, *flags(), *extra, *info], source, name, shared.copy())

        nvcc = find_nvcc()
        cuda_state = self.cuda_state(nvcc) if nvcc else hashlib.sha256()

        def compile_cuda(source: Path) -> Path:
            return compile_file([str(nvcc), *cuda_flags()], source, f"cuda_{source.stem}.o", cuda_state.copy())

        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(jobs) as pool:
            kernels = [pool.submit(compile_cuda, s) for s in sorted((ROOT / "kernels/cuda").glob("*.cu")) if nvcc]
            linked = list(pool.map(compile_unit, units()))
            base = [path for path in linked if path.name.startswith("base_")]
            if nvcc:
                self.link_cuda(nvcc, [*(kernel.result() for kernel in kernels), *base])
            else:
                self.cuda_output().unlink(missing_ok=True)
                print("llmpy: no CUDA backend (no nvcc, or LLMPY_CUDA=0)")
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        link = [f for f in flags() if f.startswith("-fsanitize")] + [
            "-shared",
            "-pthread",
            "-Wl,--exclude-libs,ALL",
            "-Wl,-z,now",
        ]
        run([*compiler, *link, *map(str, linked), "-lm", "-Wl,--as-needed", "-ldl", "-o", str(output)])

    def cuda_state(self, nvcc: str) -> "hashlib._Hash":
        """Hash of the compiler and of every header that a CUDA object may include."""
        version = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout
        headers = [*(ROOT / "kernels/cuda").glob("*.*h"), *(ROOT / "csrc/base").glob("*.h"), ROOT / "kernels/backend.h"]
        return hashlib.sha256(version + b"".join(header.read_bytes() for header in sorted(headers)))

    def link_cuda(self, nvcc: str, objects: list[Path]) -> None:
        """The backend's library: it needs libc alone, so it loads without a driver."""
        output = self.cuda_output()
        output.parent.mkdir(parents=True, exist_ok=True)
        link = ["-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL,--as-needed"]
        link += ["-Xcompiler", "-static-libstdc++,-static-libgcc"]
        run([nvcc, *link, *map(str, objects), "-o", str(output)])

    def cuda_output(self) -> Path:
        """Where the library goes: into the tree of a wheel."""
        return Path(self.build_lib) / "llmpy/_backends/libllmpy_cuda13.so"

    def copy_extensions_to_source(self) -> None:
        """Built in place: the library, too, goes beside the sources."""
        super().copy_extensions_to_source()
        if self.cuda_output().exists():
            (ROOT / "llmpy/_backends").mkdir(exist_ok=True)
            shutil.copy2(self.cuda_output(), ROOT / "llmpy/_backends")

    def get_outputs(self) -> list[str]:
        """Everything built, so that installs know it."""
        return [*super().get_outputs(), *([str(self.cuda_output())] if self.cuda_output().exists() else [])]


setup(
    ext_modules=[Extension("llmpy._core", ["csrc/python/py_module.c"], py_limited_api=not FREE_THREADED)],
    cmdclass={"build_ext": Build},
)
