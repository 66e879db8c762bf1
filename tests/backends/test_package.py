"""Backends in other packages: how they are found, and the errors for backends that are not available."""

from collections.abc import Callable

import pytest

import llmpy
from llmpy import ConfigError, DeviceError, hardware
from llmpy.engine import backends

Bring = Callable[..., None]


@pytest.fixture(autouse=True)
def forget() -> None:
    backends.library.cache_clear()


def reason_of(kind: str) -> str:
    """Why no device of a kind is available, as `devices()` says; choosing one fails with the same words."""
    [device] = [one for one in llmpy.devices() if one["device"] == kind]
    assert not device["available"]
    with pytest.raises(DeviceError) as caught:
        hardware.choose(kind)
    assert str(caught.value) == device["reason"] and caught.value.operation == "open"
    return str(caught.value)


def test_a_kind_is_found(bring: Bring, build_library: Callable[..., str]) -> None:
    library = build_library()
    bring("fake", f"return {library!r}")
    assert hardware.choose("fake") == "fake" and hardware.choose("fake:3") == "fake:3"
    assert hardware.library("fake:3") == library
    assert hardware.traits("fake")["default_tokens"] == 77
    assert hardware.memory_bytes("fake") == (0, 0) and hardware.ordinal("fake:3") == -1
    found = {"device": "fake:0", "name": "fake", "available": True, "memory_bytes": 0, "free_bytes": 0, "uuid": ""}
    assert found.items() <= llmpy.devices()[-1].items()
    assert llmpy.build_info()["backends"].endswith(", fake (llmpy_fake 1.2)")


def test_no_device_is_never_one_of_another_package(bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMPY_DEVICE", raising=False)
    bring("fake", "raise AssertionError")
    assert hardware.choose(None) in ("cpu", "cuda:0")


def test_a_kind_that_no_package_brings() -> None:
    with pytest.raises(DeviceError, match="device 'nobodys': no package brings this kind"):
        hardware.library("nobodys:0")


def test_an_unknown_kind_names_those_that_there_are(bring: Bring) -> None:
    bring("fake", "return ''")
    with pytest.raises(ConfigError, match=r"^device must be 'cpu', 'cuda:N', 'fake', a number or a GPU's UUID, got 'fak:0'\.$"):
        hardware.choose("fak:0")


def test_two_packages_of_one_kind(bring: Bring) -> None:
    bring("fake", "return '/a.so'")
    bring("fake", "return '/b.so'", package="other_fake")
    wanted = "device 'fake': llmpy_fake 1.2 and other_fake 1.2 bring this kind; uninstall all but one"
    assert reason_of("fake") == wanted


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('there is no driver')", "there is no driver"),
        ("raise RuntimeError", "RuntimeError"),
        ("return 'fake.so'", "wanted an absolute path from llmpy_fake:library, got 'fake.so'"),
        ("return None", "wanted an absolute path from llmpy_fake:library, got None"),
        ("return 1 +", "invalid syntax (llmpy_fake.py, line 2)"),
    ],
)
def test_a_function_that_gives_no_path(code: str, reason: str, bring: Bring) -> None:
    bring("fake", code)
    assert reason_of("fake") == f"device 'fake': llmpy_fake 1.2: {reason}"


def test_a_library_that_is_refused(bring: Bring, build_library: Callable[..., str]) -> None:
    bring("fake", f"return {build_library('grown.table.linear = NULL;')!r}")
    with pytest.raises(DeviceError, match="device 'fake': its library lacks entries that every backend needs: linear"):
        hardware.choose("fake")
    assert "lacks entries" in llmpy.devices()[-1]["reason"]


def test_names_that_are_no_kind(bring: Bring) -> None:
    bring("cpu", "raise AssertionError")
    bring("Fake", "raise AssertionError", package="other_fake")
    reasons = {one["device"]: one["reason"] for one in llmpy.devices() if not one["available"]}
    assert reasons["cpu"] == "device 'cpu': llmpy_fake 1.2: llmpy brings devices of this kind itself"
    assert reasons["Fake"] == "device 'Fake': other_fake 1.2: a kind is named by lower-case letters, digits and underscores"
    assert hardware.choose("cpu") == "cpu" and "llmpy_fake" not in llmpy.build_info()["backends"]


def test_the_cuda_library_of_a_package(bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without CUDA takes the library of the package of its own version."""
    monkeypatch.setattr(hardware, "_own_cuda", lambda: "")
    assert hardware.cuda_library() == ""
    bring("cuda", "return '/nowhere/cuda.so'", package="llmpy_cu13", version=llmpy.__version__)
    assert hardware.cuda_library() == "/nowhere/cuda.so"
    reasons = [one["reason"] for one in llmpy.devices() if one["device"].startswith("cuda")]
    assert len(reasons) == 1 and "/nowhere/cuda.so: cannot open" in reasons[0]
    assert f"cuda (llmpy_cu13 {llmpy.__version__})" in llmpy.build_info()["backends"]


def test_a_cuda_library_of_another_version(bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_own_cuda", lambda: "")
    bring("cuda", "raise AssertionError", package="llmpy_cu13", version="99.1")
    wanted = f"device 'cuda': llmpy_cu13 99.1: llmpy is of version {llmpy.__version__}; install the same version of both"
    with pytest.raises(DeviceError, match=wanted):
        hardware.choose("cuda")
    assert [one["reason"] for one in llmpy.devices() if one["device"] == "cuda:0"] == [wanted]
    assert hardware.choose(None) == "cpu"


def test_an_own_cuda_library_comes_first(bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_own_cuda", lambda: "/own/cuda.so")
    bring("cuda", "raise AssertionError", package="llmpy_cu13")
    assert hardware.cuda_library() == "/own/cuda.so"
    assert llmpy.devices()[-1]["reason"] == "device 'cuda': llmpy_cu13 1.2: llmpy brings devices of this kind itself"
