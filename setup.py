"""Builds the C core into llmpy/_core.abi3.so: C11, hidden visibility, each CPU kernel once per instruction set.

With nvcc (NVCC, CUDA_HOME/bin, PATH) and LLMPY_CUDA other than 0 (require: nvcc must be there) it also builds
llmpy/_backends/libllmpy_cuda13.so, a backend that is loaded only when a CUDA device is asked for. llmpy/include gets the
headers that backends and connectors of other packages are compiled with.

docs/use/environment.md lists the variables that a build reads. How far a build is can be seen on the terminal, even under pip.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "csrc"))

import compiling  # noqa: E402
import linking  # noqa: E402
import packing  # noqa: E402


class CheckedBuild(build):
    """Looks for the compiler before anything else is done and said."""

    def run(self) -> None:
        compiling.check_tools()
        super().run()


class Build(build_ext):
    """Compiles what changed, in parallel, and links the extension."""

    def build_extension(self, ext: Extension) -> None:
        compiling.check_tools()
        nvcc = compiling.find_nvcc()
        temp = Path(self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        core = compiling.core_objects(temp, self.distribution.get_version())
        cuda = compiling.cuda_objects(nvcc, temp) if nvcc else []
        compiling.compile_all([*cuda, *core])  # CUDA takes longest
        shutil.rmtree(self.cuda_folder(), ignore_errors=True)
        if nvcc:
            linking.link_cuda(nvcc, [*cuda, *compiling.base_objects(temp)], self.cuda_folder())
        else:
            print("llmpy: no CUDA backend (no nvcc, or LLMPY_CUDA=0)")
        linking.link_core(Path(self.get_ext_fullpath(ext.name)), core)
        self.include_folder().mkdir(parents=True, exist_ok=True)
        (self.include_folder() / "llmpy_backend.h").write_text(compiling.backend_header())
        (self.include_folder() / "llmpy_connector.h").write_text(compiling.connector_header())

    def cuda_folder(self) -> Path:
        """Where the library and the licences go: into the tree of a wheel."""
        return Path(self.build_lib) / "llmpy/_backends"

    def include_folder(self) -> Path:
        """Where the headers of backends and connectors go."""
        return Path(self.build_lib) / "llmpy/include"

    def copy_extensions_to_source(self) -> None:
        """Built in place: the library and the header, too, go beside the sources."""
        super().copy_extensions_to_source()
        for folder in (self.cuda_folder(), self.include_folder()):
            if folder.exists():
                shutil.copytree(folder, ROOT / "llmpy" / folder.name, dirs_exist_ok=True)

    def get_outputs(self) -> list[str]:
        """Everything built, so that installs know it."""
        made = (path for folder in (self.cuda_folder(), self.include_folder()) for path in folder.glob("*"))
        return [*super().get_outputs(), *map(str, made)]


setup(
    ext_modules=[Extension("llmpy._core", ["csrc/python/py_module.c"], py_limited_api=not compiling.FREE_THREADED)],
    version=compiling.project_version(),
    cmdclass={"build": CheckedBuild, "build_ext": Build, "bdist_wheel": packing.Wheel},
)
