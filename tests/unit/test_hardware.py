"""Where libraries that are opened at run time are looked for, in order."""

from pathlib import Path

import pytest

from llmpy import hardware


def test_cublaslt_is_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / "given", tmp_path / "site/nvidia/cu13/lib", tmp_path / "prefix/lib", tmp_path / "cuda/lib64"]
    for name in ("LLMPY_LIB_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(hardware.sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(hardware.sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(hardware, "_in_process", lambda names: "")
    for place in places:
        place.mkdir(parents=True)
        (place / "libcublasLt.so.12").touch()
    (places[1] / "libcublasLt.so.13").touch()
    assert hardware.cublaslt_library() == str(places[1] / "libcublasLt.so.13")
    monkeypatch.setenv("LLMPY_LIB_PATH", str(places[0]))
    assert hardware.cublaslt_library() == str(places[0] / "libcublasLt.so.12")
    monkeypatch.delenv("LLMPY_LIB_PATH")
    monkeypatch.setattr(hardware, "_in_process", lambda names: "/loaded")
    assert hardware.cublaslt_library() == "/loaded"
    monkeypatch.setattr(hardware, "_in_process", lambda names: "")
    monkeypatch.setattr(hardware.sys, "path", [])
    assert hardware.cublaslt_library() == str(places[2] / "libcublasLt.so.12")


def test_nccl_is_found_beside_torchs_other_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMPY_LIB_PATH", raising=False)
    monkeypatch.setattr(hardware.sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(hardware, "_in_process", lambda names: "")
    place = tmp_path / "site/nvidia/nccl/lib"
    place.mkdir(parents=True)
    (place / "libnccl.so.2").touch()
    assert hardware.nccl_library() == str(place / "libnccl.so.2")


def test_a_library_that_is_loaded_is_found() -> None:
    assert hardware._in_process(("libc.so.6",)).endswith("/libc.so.6")
    assert hardware._in_process(("libnobody.so.1",)) == ""
