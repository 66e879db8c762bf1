"""Linking the core and the CUDA library, for this machine's glibc or, with LLMPY_GLIBC, for an older one.

For an older glibc the objects stay those of gcc and nvcc; only the linker changes. That of the package ziglang knows the
symbols of every glibc, so no container is needed. What it links is checked: no symbol may be newer than was asked for.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from compiling import CC, ROOT, Object, flags, glibc, machine, read_version, run

LIBRARY = "libllmpy_cuda13.so"
LICENCES = ROOT / "kernels/cuda/licenses"


class Component(NamedTuple):
    """Code of others that is linked into a library."""

    name: str
    version: str
    licence: str  # an SPDX expression


def link_core(output: Path, objects: list[Object]) -> None:
    """The extension: it needs libc and libm alone, and exports its init function."""
    output.parent.mkdir(parents=True, exist_ok=True)
    files = [str(one.target) for one in objects]
    if glibc():
        _link_old(output, "cc", ROOT / "csrc/python/exports.map", ["-Wl,-z,now", *files])
        return
    sanitize = [flag for flag in flags() if flag.startswith("-fsanitize")]
    link = [*CC, *sanitize, "-shared", "-pthread", "-Wl,--exclude-libs,ALL", "-Wl,-z,now"]
    run([*link, *files, "-lm", "-Wl,--as-needed", "-ldl", "-o", str(output)])


def link_cuda(nvcc: str, objects: list[Object], folder: Path) -> None:
    """The backend's library, which needs libc alone, so it loads without a driver; and the licences of what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    files, output = [str(one.target) for one in objects], folder / LIBRARY
    if glibc():
        _link_old(output, "c++", ROOT / "kernels/cuda/exports.map", [*files, str(_static_runtime(nvcc)), "-lrt"])
    else:
        link = [nvcc, "-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL,--as-needed"]
        run([*link, "-Xcompiler", "-static-libstdc++,-static-libgcc", *files, "-o", str(output)])
    for text in LICENCES.glob("*.txt"):
        shutil.copy2(text, folder)


def _link_old(output: Path, language: str, exports: Path, files: list[str]) -> None:
    """Links for the glibc that was asked for."""
    zig = [sys.executable, "-m", "ziglang"]
    if subprocess.run([*zig, "version"], capture_output=True).returncode:
        raise SystemExit(f"llmpy: LLMPY_GLIBC={glibc()} wants the linker of ziglang; pip install ziglang")
    libgcc = subprocess.run([*CC, "-print-libgcc-file-name"], capture_output=True, text=True, check=True).stdout.strip()
    command = [*zig, language, "-target", f"{machine()}-linux-gnu.{glibc()}", "-s", "-shared", "-pthread"]
    # libgcc has what __builtin_cpu_supports reads; the linker's own is never filled.
    run([*command, f"-Wl,--version-script={exports}", *files, libgcc, "-lm", "-Wl,--as-needed", "-ldl", "-o", str(output)])
    nm = subprocess.run([*CC, "-print-prog-name=nm"], capture_output=True, text=True, check=True).stdout.strip()
    names = subprocess.run([nm, "-D", "--undefined-only", str(output)], capture_output=True, text=True, check=True).stdout
    if wrong := newer(names.splitlines(), glibc()):
        raise SystemExit(f"llmpy: {output.name} needs more than glibc {glibc()}: {', '.join(wrong)}")


def newer(names: Iterable[str], wanted: str) -> list[str]:
    """Symbols that a glibc does not have.

    Args:
        names: Lines of nm: the symbols that a library lacks.
        wanted: Version of glibc, such as 2.28.
    """
    wrong = []
    for line in names:
        kind, name = line.split()[-2:]
        version = re.search(r"@+GLIBC_([\d.]+)$", name)
        if version and _numbers(version[1]) > _numbers(wanted):
            wrong.append(name)
        if "@" not in name and kind == "U" and not re.match("_?Py", name):
            wrong.append(f"{name} (in no library)")
    return wrong


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _static_runtime(nvcc: str) -> Path:
    """nvcc's static runtime. nvcc may be a script that starts another one, so it is asked where it is."""
    dry = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    said = subprocess.run(dry, capture_output=True, text=True, check=True).stderr
    root = Path(next(line.removeprefix("#$ TOP=") for line in said.splitlines() if line.startswith("#$ TOP="))).resolve()
    places = [*root.glob("targets/x86_64-linux/lib/libcudart_static.a"), *root.glob("lib*/libcudart_static.a")]
    if not places:
        raise SystemExit(f"llmpy: no libcudart_static.a under {root}")
    return places[0]


def components(nvcc: str | None) -> list[Component]:
    """Code of others that is linked into the core, or with `nvcc` into the CUDA library."""
    gcc = subprocess.run([*CC, "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    found = [Component("libgcc", gcc, "GPL-3.0-or-later WITH GCC-exception-3.1")]
    if glibc():
        zig = read_version([sys.executable, "-m", "ziglang", "version"], "").strip()
        found.append(Component("glibc (libc_nonshared)", glibc(), "LGPL-2.1-or-later"))
        found.append(Component("zig (compiler_rt)", zig, "MIT"))
    if nvcc:
        toolkit = re.search(r"V([\d.]+)", read_version([nvcc]))
        found.append(Component("CUDA runtime", toolkit[1] if toolkit else "", "LicenseRef-NVIDIA-CUDA-EULA"))
        if glibc():
            found.append(Component("LLVM libc++abi and libunwind", zig, "Apache-2.0 WITH LLVM-exception"))
        else:
            found.append(Component("libstdc++", gcc, "GPL-3.0-or-later WITH GCC-exception-3.1"))
    return found
