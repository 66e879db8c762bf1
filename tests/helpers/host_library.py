"""Compiles CUDA code for the host, so that tests call it without a device and without nvcc."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]


def build(folder: Path, source: str | None, *parts: str) -> ctypes.CDLL:
    """Links a file of tests/unit, in C++, with files of csrc/base.

    Args:
        folder: Where the library goes; headers there are found before the system's.
        source: Name of the file; None: none.
        parts: Names of the files of csrc/base, without their ending.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    objects = [folder / f"{part}.o" for part in parts]
    for part, to in zip(parts, objects, strict=True):
        subprocess.run(["gcc", "-std=c11", *FLAGS, "-c", ROOT / f"csrc/base/{part}.c", "-o", to], check=True)
    library = folder / "library.so"
    sources = [ROOT / "tests/unit" / source] if source else []
    words = [compiler, "-std=c++17", *FLAGS, f"-I{folder}", "-shared", *sources, *objects, "-o", library]
    subprocess.run(words, check=True)
    return ctypes.CDLL(str(library))
