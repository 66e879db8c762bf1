"""Where libraries that are opened at run time are looked for, in order."""

from pathlib import Path

import pytest

from llmpy import _core, hardware
from llmpy.errors import ConfigError, DeviceError


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


def test_portable_kernels_are_asked_for_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads a variable; an engine whose driver was told too late is refused; devices say what they run."""
    monkeypatch.delenv("CUDA_FORCE_PTX_JIT", raising=False)
    monkeypatch.delenv("LLMPY_CUDA_KERNELS", raising=False)
    hardware.cuda_library()
    assert "CUDA_FORCE_PTX_JIT" not in hardware.os.environ
    hardware.check_kernels("cuda:0 NVIDIA H200")
    one = "NVIDIA A100", "GPU-1", 80 << 30, 79 << 30, "portable; compiled for compute capability 8.0"

    def describe(device: str, library: str, wants_free: bool) -> tuple[str, str, int, int, str]:
        if device == "cuda:0":
            return one
        raise DeviceError("no more", code=hardware._NO_SUCH_DEVICE)

    monkeypatch.setattr(_core, "device_info", describe)
    assert [found["kernels"] for found in hardware._cuda_devices(True)] == [one[4]]
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "0")  # so that it is restored
    monkeypatch.setenv("LLMPY_CUDA_KERNELS", "portable")
    hardware.cuda_library()
    assert hardware.os.environ["CUDA_FORCE_PTX_JIT"] == "1" and hardware.cublaslt_library() == ""
    assert [found["kernels"] for found in hardware._cuda_devices(True)] == ["portable by LLMPY_CUDA_KERNELS"]
    hardware.check_kernels("cuda:0 NVIDIA H200, portable kernels")
    hardware.check_kernels("cpu AMD EPYC, avx512")
    with pytest.raises(DeviceError, match=r"something used CUDA in this process before; set CUDA_FORCE_PTX_JIT=1"):
        hardware.check_kernels("cuda:0 NVIDIA H200")
    monkeypatch.setenv("LLMPY_CUDA_KERNELS", "fast")
    with pytest.raises(ConfigError, match="LLMPY_CUDA_KERNELS must be auto or portable, got 'fast'"):
        hardware.cuda_library()
