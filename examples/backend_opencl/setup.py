"""Builds src/*.c into llmpy_opencl/_opencl*.so, against the header that llmpy has. kernels.cl becomes a string in it."""

import json
from pathlib import Path

from setuptools import Extension, setup

import llmpy

FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Werror=implicit", "-O2", "-fvisibility=hidden"]

build = Path("build")
build.mkdir(exist_ok=True)
lines = Path("src/kernels.cl").read_text().splitlines(keepends=True)
(build / "kernels.inc").write_text("\n".join(map(json.dumps, lines)) + "\n")

sources = sorted(map(str, Path("src").glob("*.c")))
folders = [llmpy.get_include(), str(build)]
setup(ext_modules=[Extension("llmpy_opencl._opencl", sources, include_dirs=folders, extra_compile_args=FLAGS)])
