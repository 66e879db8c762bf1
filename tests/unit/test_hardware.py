"""Where a cuBLASLt is looked for, in order."""

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
    monkeypatch.setattr(hardware, "_in_process", str)
    for place in places:
        place.mkdir(parents=True)
        (place / "libcublasLt.so.12").touch()
    (places[1] / "libcublasLt.so.13").touch()
    assert hardware.cublaslt_library() == str(places[1] / "libcublasLt.so.13")
    monkeypatch.setenv("LLMPY_LIB_PATH", str(places[0]))
    assert hardware.cublaslt_library() == str(places[0] / "libcublasLt.so.12")
    monkeypatch.delenv("LLMPY_LIB_PATH")
    monkeypatch.setattr(hardware, "_in_process", lambda: "/loaded")
    assert hardware.cublaslt_library() == "/loaded"
    monkeypatch.setattr(hardware, "_in_process", str)
    monkeypatch.setattr(hardware.sys, "path", [])
    assert hardware.cublaslt_library() == str(places[2] / "libcublasLt.so.12")
