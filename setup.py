"""Builds the C core into llmpy/_core.abi3.so: C11, hidden visibility, each CPU kernel once per instruction set.

With nvcc (NVCC, CUDA_HOME/bin, PATH) and LLMPY_CUDA other than 0 (require: nvcc must be there) it also builds
llmpy/_backends/libllmpy_cuda13.so, a backend that is loaded only when a CUDA device is asked for. llmpy/include gets the header
that backends of other packages are compiled with.

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
from compiling import CC, FREE_THREADED, Object  # noqa: E402


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
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        core, cuda = self.core_objects(), self.cuda_objects(nvcc) if nvcc else []
        compiling.compile_all([*cuda, *core])  # CUDA takes longest
        shutil.rmtree(self.cuda_folder(), ignore_errors=True)
        if nvcc:
            self.link_cuda(nvcc, [*cuda, *(one for one in core if one.target.name.startswith("base_"))])
        else:
            print("llmpy: no CUDA backend (no nvcc, or LLMPY_CUDA=0)")
        self.link_core(Path(self.get_ext_fullpath(ext.name)), core)
        header = self.include_folder() / "llmpy_backend.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(compiling.backend_header())

    def core_objects(self) -> list[Object]:
        """Objects of the extension."""
        version = compiling.read_version(CC).splitlines()[0]
        folders = (ROOT / "csrc", ROOT / "kernels")
        shared_files = [path for folder in folders for ending in ("h", "def") for path in folder.rglob(f"*.{ending}")]
        info = [f'-DLLMPY_COMPILER="{version}"', f'-DLLMPY_VERSION="{self.distribution.get_version()}"']
        shared = version.encode() + b"".join(path.read_bytes() for path in sorted(shared_files))
        units = [(source, [*extra, *info], name) for source, extra, name in compiling.units()]
        return compiling.plan(units, [*CC, *compiling.flags()], Path(self.build_temp), shared)

    def cuda_objects(self, nvcc: str) -> list[Object]:
        """Objects of the CUDA backend."""
        folder = ROOT / "kernels/cuda"
        doors = [ROOT / "kernels/backend.h", ROOT / "kernels/entries.def"]
        headers = sorted([*folder.rglob("*.*h"), *(ROOT / "csrc/base").glob("*.h"), *doors])
        shared = compiling.read_version([nvcc]).encode() + b"".join(header.read_bytes() for header in headers)
        units: list[compiling.Unit] = [(source, [], f"cuda_{source.stem}.o") for source in sorted(folder.rglob("*.cu"))]
        return compiling.plan(units, [nvcc, *compiling.cuda_flags()], Path(self.build_temp), shared)

    def link_core(self, output: Path, objects: list[Object]) -> None:
        """The extension: it needs libc and libm alone, and exports its init function."""
        output.parent.mkdir(parents=True, exist_ok=True)
        sanitize = [flag for flag in compiling.flags() if flag.startswith("-fsanitize")]
        link = [*CC, *sanitize, "-shared", "-pthread", "-Wl,--exclude-libs,ALL", "-Wl,-z,now"]
        files = [str(one.target) for one in objects]
        compiling.run([*link, *files, "-lm", "-Wl,--as-needed", "-ldl", "-o", str(output)])

    def link_cuda(self, nvcc: str, objects: list[Object]) -> None:
        """The backend's library, which needs libc alone, so it loads without a driver; and the licences of what is in it."""
        folder = self.cuda_folder()
        folder.mkdir(parents=True)
        link = [nvcc, "-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL,--as-needed"]
        link += ["-Xcompiler", "-static-libstdc++,-static-libgcc"]
        compiling.run([*link, *(str(one.target) for one in objects), "-o", str(folder / "libllmpy_cuda13.so")])
        for text in (ROOT / "kernels/cuda/licenses").glob("*.txt"):
            shutil.copy2(text, folder)

    def cuda_folder(self) -> Path:
        """Where the library and the licences go: into the tree of a wheel."""
        return Path(self.build_lib) / "llmpy/_backends"

    def include_folder(self) -> Path:
        """Where the header of backends goes."""
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
    ext_modules=[Extension("llmpy._core", ["csrc/python/py_module.c"], py_limited_api=not FREE_THREADED)],
    cmdclass={"build": CheckedBuild, "build_ext": Build},
)
