"""Release files: versions from tags, bills of materials, the package of the CUDA library, wheels for an old glibc."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from modules import load

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "csrc"))

import compiling  # noqa: E402
import linking  # noqa: E402
import packing  # noqa: E402

NM = """
                 U PyList_New
                 w __gmon_start__
                 U memcpy@GLIBC_2.14
                 U pow@GLIBC_2.29
                 U __isoc23_strtol
                 U fstat@@GLIBC_2.33
"""


def test_symbols_that_an_old_glibc_does_not_have() -> None:
    lines = NM.strip().splitlines()
    assert linking.newer(lines, "2.28") == ["pow@GLIBC_2.29", "__isoc23_strtol (in no library)", "fstat@@GLIBC_2.33"]
    assert linking.newer(lines, "2.4")[0] == "memcpy@GLIBC_2.14"  # numbers, not texts


@pytest.mark.parametrize("wanted", ["2", "2.x", "3.1", "2.28;"])
def test_a_glibc_that_is_none(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPY_GLIBC", wanted)
    with pytest.raises(SystemExit, match="wanted a version such as 2"):
        compiling.glibc()


def test_the_version_is_that_of_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "ROOT", tmp_path)
    assert compiling.project_version() == compiling.VERSION
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: llmpy\nVersion: 7.1\n")
    assert compiling.project_version() == "7.1"
    author = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    for words in ("init -q", "add .", "commit -qm one", "tag v8.2.0rc1", "tag other"):
        subprocess.run(["git", *author, *words.split()], cwd=tmp_path, check=True)
    assert compiling.project_version() == "8.2.0rc1"
    (tmp_path / "PKG-INFO").write_text("changed\n")
    assert compiling.project_version() == compiling.VERSION


def test_the_bill_names_what_is_linked_and_what_is_needed() -> None:
    parts = [linking.Component("libgcc", "12.2", "GPL-3.0-or-later WITH GCC-exception-3.1")]
    content = json.loads(packing.bill("llmpy", "1.0", parts, ["numpy>=2.0.0", "Jinja2>=3.1.6"]))
    assert (content["bomFormat"], content["specVersion"]) == ("CycloneDX", "1.6")
    assert [one["name"] for one in content["components"]] == ["libgcc", "jinja2", "numpy"]
    refs = [one["bom-ref"] for one in content["components"]]
    assert content["dependencies"] == [{"ref": "pkg:pypi/llmpy@1.0", "dependsOn": refs}]


def test_the_notice_names_every_part_of_the_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = (ROOT / "kernels/cuda/licenses/NOTICE.txt").read_text()
    monkeypatch.setattr(linking, "read_version", lambda command, option="": "0.1 V13.0")
    for wanted in ("", "2.28"):
        monkeypatch.setattr(linking, "glibc", lambda wanted=wanted: wanted)
        names = {one.name for one in linking.components("nvcc")} - {"zig (compiler_rt)"}
        assert len(names) > 2
        missing = [name for name in names if not all(word in notice for word in name.replace("(", "").replace(")", "").split())]
        assert not missing


def test_the_package_of_the_cuda_library(tmp_path: Path) -> None:
    """A compiler that makes empty files builds it."""
    fake = tmp_path / "fake"
    fake.write_text(load(Path(__file__).with_name("test_build.py")).FAKE)
    fake.chmod(0o755)
    words = ["setup.py", "-q", "build", "--build-base", tmp_path / "build", "egg_info", "--egg-base", tmp_path, "bdist_wheel"]
    words += ["--bdist-dir", tmp_path / "bdist", "--dist-dir", tmp_path]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLMPY_")}
    environment |= {"CC": str(fake), "NVCC": str(fake)}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT / "kernels/cuda", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    version = compiling.project_version()
    assert wheel.name == f"llmpy_cu13-{version}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        info = f"llmpy_cu13-{version}.dist-info"
        assert {"llmpy_cu13/__init__.py", "llmpy_cu13/libllmpy_cuda13.so", "llmpy_cu13/NOTICE.txt"} <= names
        assert {f"{info}/licenses/LICENSE", f"{info}/licenses/licenses/NVIDIA-CUDA-EULA.txt"} <= names
        points = files.read(f"{info}/entry_points.txt").decode()
        assert points.split() == ["[llmpy.backends]", "cuda", "=", "llmpy_cu13:library"]
        assert f"Requires-Dist: llmpy=={version}\n" in files.read(f"{info}/METADATA").decode()
        bill = json.loads(files.read(f"{info}/sboms/llmpy-cu13.cdx.json"))
    assert {"CUDA runtime", "libstdc++", "llmpy"} <= {one["name"] for one in bill["components"]}


CROSS = "aarch64-linux-gnu-gcc"


@pytest.mark.parametrize(("told", "wanted"), [("aarch64-linux-gnu", "aarch64"), ("", platform.machine())])
def test_the_compiler_says_the_processor(told: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake"
    fake.write_text(f"#!/bin/sh\necho {told}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(compiling, "CC", [str(fake)])
    assert compiling.machine() == wanted
    assert any("avx512" in name for _, _, name in compiling.units(wanted)) == (wanted == "x86_64")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(CROSS), reason=f"no {CROSS}")
def test_a_wheel_for_aarch64(tmp_path: Path) -> None:
    words = [ROOT / "csrc/wheels.py", "--out", tmp_path, "--cuda", "0"]
    done = subprocess.run([sys.executable, *map(str, words)], env=os.environ | {"CC": CROSS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-cp311-abi3-manylinux_2_28_aarch64.whl") and wheel.stat().st_size < 4e6
    with zipfile.ZipFile(wheel) as files:
        machine = files.read("llmpy/_core.abi3.so")[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64


MAX_INSTALL_S = 5
"""Processor time of `pip install` of llmpy and all that it needs, from a folder of wheels."""

LOOK = """
import llmpy; from llmpy import _core
print(_core.__file__); print(_core.cpu_isas()); print(llmpy.__version__)
"""


@pytest.mark.slow
def test_wheels_for_an_old_glibc(tmp_path: Path) -> None:
    """csrc/wheels.py in a fresh environment; auditwheel, sizes, an installation without an index, all instruction sets."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}

    def run(*words: object) -> str:
        done = subprocess.run([*map(str, words)], cwd=tmp_path, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def environment(name: str) -> Path:
        run(sys.executable, "-m", "venv", tmp_path / name)
        python = tmp_path / name / "bin/python"
        run(python, "-m", "pip", "install", "-q", "--upgrade", "pip")
        return python

    python, out = environment("building"), tmp_path / "wheels"
    run(python, "-m", "pip", "install", "-q", "setuptools>=77", "numpy>=2.0", "ziglang", "auditwheel")
    said = run(python, ROOT / "csrc/wheels.py", "--out", out, "--cuda", "0")
    assert "auditwheel: manylinux_2_2" in said
    [wheel] = out.glob("*.whl")
    version = compiling.project_version()
    assert wheel.name == f"llmpy-{version}-cp311-abi3-manylinux_2_28_x86_64.whl" and wheel.stat().st_size < 4e6
    run(python, "-m", "pip", "download", "-q", "-d", out, wheel)
    python = environment("installed")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(python, "-m", "pip", "install", "-q", "--no-index", "--find-links", out, "llmpy")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{wheel.stat().st_size / 1e6:.2f} MB, installed in {seconds:.1f} s of processor time")
    assert seconds < MAX_INSTALL_S
    core, isas, shown = run(python, "-P", "-c", LOOK).splitlines()
    from llmpy import _core

    assert str(tmp_path) in core and isas == str(_core.cpu_isas()) and shown == version
