"""`llmpy pull`, `list` and `rm` over a made-up cache of the hub, and the demo model's file."""

import sys
from pathlib import Path

import pytest

from llmpy import cli, demo

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of the hub and of llmpy; the hub is never contacted."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("LLMPY_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path


def put(cache: Path, name: str, size: int, kind: str = "models") -> Path:
    """A repository as the hub's client stores it."""
    folder = cache / "hub" / f"{kind}--{name.replace('/', '--')}"
    blob = folder / "blobs" / "aa"
    snapshot = folder / "snapshots" / COMMIT
    for path in (blob.parent, snapshot, folder / "refs"):
        path.mkdir(parents=True)
    blob.write_bytes(bytes(size))
    (folder / "refs/main").write_text(COMMIT)
    (snapshot / "model.safetensors").symlink_to(blob)
    (snapshot / "config.json").write_text("{}")
    return folder


def test_list_and_rm(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == "no models here; `llmpy pull MODEL` downloads one\n"
    big, small = put(caches, "org/big", 3_000_000), put(caches, "org/small", 500_000)
    put(caches, "org/data", 500_000, "datasets")
    (caches / "own").mkdir()
    (caches / "own" / demo.NAME).write_bytes(bytes(2_000_000))
    assert cli.main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [["demo", "2.0", "MB"], ["org/big", "3.0", "MB"], ["org/small", "0.5", "MB"]]
    assert [line[3] for line in lines[1:]] == [str(big), str(small)]
    assert cli.main(["rm", "org/big"]) == 0 and cli.main(["rm", "demo"]) == 0
    assert capsys.readouterr().out == "org/big: 3.0 MB freed\ndemo: 2.0 MB freed\n"
    assert not big.exists() and small.exists() and not (caches / "own" / demo.NAME).exists()
    assert cli.main(["rm", "org/big"]) == 1
    assert "org/big: not among the downloaded models (org/small)" in capsys.readouterr().err


def test_rm_of_what_belongs_to_another_user(
    caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = caches / "own" / demo.NAME
    path.parent.mkdir()
    path.write_bytes(b"model")

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert cli.main(["rm", "demo"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == f"llmpy: demo: {path} cannot be deleted (Permission denied); run as its owner\n"


def test_pull_finds_what_is_there(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(caches, "org/small", 500_000)
    assert cli.main(["pull", "org/small"]) == 0
    assert capsys.readouterr().out == f"org/small: 0.5 MB of weights at {folder / 'snapshots' / COMMIT}\n"
    assert cli.main(["pull", "org/absent"]) == 1
    assert "org/absent" in capsys.readouterr().err


def test_without_the_client_it_says_what_to_install(
    caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cli.main(["list"]) == 1
    assert "pip install huggingface_hub" in capsys.readouterr().err
