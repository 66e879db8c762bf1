"""Builds the CUDA backend as a package of its own, llmpy-cu13, beside an llmpy without CUDA; csrc/wheels.py runs this."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT / "csrc"))

import compiling  # noqa: E402
import linking  # noqa: E402
import packing  # noqa: E402


class Build(build_py):
    """Puts the library and the licences of what is in it beside the one Python file."""

    def run(self) -> None:
        super().run()
        if not (nvcc := compiling.find_nvcc()):
            raise SystemExit("llmpy: llmpy-cu13 wants nvcc, but there is none (or LLMPY_CUDA=0); set NVCC or CUDA_HOME")
        temp = Path(self.get_finalized_command("build").build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        objects = [*compiling.cuda_objects(nvcc, temp), *compiling.base_objects(temp)]
        compiling.compile_all(objects)
        linking.link_cuda(nvcc, objects, Path(self.build_lib) / "llmpy_cu13")


class Wheel(packing.Wheel):
    """One wheel for every Python."""

    has_cuda = True

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    """A package with a compiled library."""

    def has_ext_modules(self) -> bool:
        return True


VERSION = compiling.project_version()
setup(
    version=VERSION,
    install_requires=[f"llmpy=={VERSION}"],
    distclass=Binary,
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
    options={"build": {"build_base": str(ROOT / "build/cu13")}, "egg_info": {"egg_base": str(ROOT / "build")}},
)
