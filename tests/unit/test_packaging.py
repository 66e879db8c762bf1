"""The content of a wheel, the dependencies of an installation, and the errors for missing extras."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

import llmpy
from llmpy import _core

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEVER = {"torch", "transformers", "pydantic", "triton", "ray"}
NAME = re.compile(r"[A-Za-z0-9._-]+")


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """What setuptools would put into it, without the compiled core, is what lies in the source folder."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {str(path.relative_to(tmp_path / "lib")) for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "llmpy").rglob("*") if path.is_file()}
    compiled = {path for path in source | built if path.endswith((".so", ".pyc", ".h")) or "_backends" in path}
    assert built - compiled == source - compiled
    assert {"llmpy/py.typed", "llmpy/_core.pyi", "llmpy/server/page/index.html"} <= built


def needed(name: str, found: set[str]) -> set[str]:
    """A package and all that it needs on this machine."""
    from packaging.requirements import Requirement

    for text in requires(name) or []:
        requirement = Requirement(text)
        other = requirement.name.lower().replace("_", "-")
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and other not in found:
            found.add(other)
            needed(other, found)
    return found


def test_what_an_installation_brings() -> None:
    direct = {NAME.match(text)[0] for text in PROJECT["dependencies"]}  # type: ignore[index]
    assert len(direct) <= 4
    found = set(direct)
    for name in direct:
        needed(name, found)
    assert direct < found and len(found) <= 22, sorted(found)
    assert not found & NEVER


def test_extras_have_what_they_should() -> None:
    extras = {name: {NAME.match(one)[0] for one in texts} for name, texts in PROJECT["optional-dependencies"].items()}  # type: ignore[index]
    assert extras["server"] >= {"starlette", "uvicorn", "msgspec"} and extras["fast"] == {"uvloop", "httptools"}
    assert extras["structured"] == {"llguidance"} and extras["kvevents"] == {"pyzmq", "msgspec"}
    assert extras["data"] == {"pandas", "pyarrow"}
    assert extras["docs"] == {"sphinx", "myst-nb", "furo"} and extras["docs"] | extras["server"] <= extras["test"]
    pinned = [text for texts in PROJECT["optional-dependencies"].values() for text in texts if text.startswith("nvidia")]
    assert not [text for text in pinned if "==" in text]  # torch pins its own


OUTPUTS = "import numpy as np; from llmpy.outputs import RequestOutputs; outputs = RequestOutputs([]);"


@pytest.mark.parametrize(
    ("code", "package", "extra"),
    [
        ("from llmpy.server import build_app", "starlette", "server"),
        ("from llmpy.server import build_app", "msgspec", "server"),
        ("from llmpy.cli import main; raise SystemExit(main(['serve', 'nowhere']))", "uvicorn", "server"),
        (
            "from llmpy.cli import main; raise SystemExit(main(['run-batch', '-i', '-', '-o', 'x']))",
            "msgspec",
            "server",
        ),
        ("import llmpy.distributed.ray", "ray", "ray"),
        (OUTPUTS + "outputs.to_pandas()", "pandas", "data"),
        (OUTPUTS + "outputs.to_arrow()", "pyarrow", "data"),
    ],
)
def test_what_is_missing_names_its_extra(code: str, package: str, extra: str) -> None:
    root = str(Path(llmpy.__file__).parents[1])
    script = f"import sys; sys.path.insert(0, {root!r}); sys.modules[{package!r}] = None; {code}"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"pip install 'llmpy[{extra}]'" in last and package in last


@pytest.mark.slow
def test_core_dependencies_are_small(tmp_path: Path) -> None:
    """Downloads of what the core needs, on all levels."""
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(tmp_path), *PROJECT["dependencies"]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no package index: {done.stderr.splitlines()[-1:]}")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    print(f"{len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB")
    assert len(sizes) <= 22 and sum(sizes.values()) < 35e6, sizes


@pytest.mark.slow
def test_the_core_keeps_to_the_stable_abi() -> None:
    """abi3audit, of what the tag of the wheel promises."""
    pytest.importorskip("abi3audit")
    command = [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", str(_core.__file__)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_version() -> None:
    """The version stands in one place."""
    try:
        from importlib.metadata import version

        assert version("llmpy") == llmpy.__version__
    except PackageNotFoundError:
        assert llmpy.__version__ == re.search(r'^VERSION = "(.+?)"', (ROOT / "csrc/compiling.py").read_text(), re.MULTILINE)[1]  # type: ignore[index]
