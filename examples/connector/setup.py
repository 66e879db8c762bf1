"""Builds shelf.c into llmpy_shelf/_shelf*.so, against the header that the installed llmpy has."""

from setuptools import Extension, setup

import llmpy

FLAGS = ["-std=c11", "-Wall", "-Wextra", "-O2", "-fvisibility=hidden"]

setup(ext_modules=[Extension("llmpy_shelf._shelf", ["shelf.c"], include_dirs=[llmpy.get_include()], extra_compile_args=FLAGS)])
