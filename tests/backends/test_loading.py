"""The core's checks of a backend's library."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmpy import DeviceError, _core

Build = Callable[..., str]
REQUIRED = """\
open, close, describe, fusions, supports, activations, buffer_create, buffer_destroy, upload, download, synchronize, \
matrix_create, matrix_destroy, matrix_bytes, matrix_arithmetic, matrix_write, matrix_read, kv_layer_bytes, embed, linear, \
rms_norm, gated, add, select, rope, kv_write, attention"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("return NULL;", "needs a newer llmpy"),
        (
            "grown.table.abi--; grown.table.size_bytes = 600;",
            "has a struct backend of ABI 3 with 600 bytes; wanted ABI 4 with at least 552",
        ),
        ("grown.table.size_bytes = 544;", "has a struct backend of ABI 4 with 544 bytes; wanted ABI 4 with at least 552"),
        ("grown.table.linear = NULL;", "lacks entries that every backend needs: linear"),
        ("grown.table.open = NULL; grown.table.attention = NULL;", "lacks entries that every backend needs: open, attention"),
        ("grown.table.traits = NULL;", "lacks entries that every backend needs: traits"),
        ("grown.table.sample_finish = (void *)nothing;", "has sample_finish without sample"),
        ("grown.table.graph_begin = (void *)nothing;", "has graph_begin without graph_end"),
        ("traits.size_bytes = 8;", "has a struct device_traits of 8 bytes; wanted at least 32"),
    ],
)
def test_what_is_refused(change: str, reason: str, build_library: Build) -> None:
    library = build_library(change)
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            _core.device_traits("fake:0", library)
        assert str(caught.value) == f"device 'fake:0': its library {reason}"
        assert caught.value.operation == "open"


def test_all_entries_that_are_missing_are_named(build_library: Build) -> None:
    library = build_library("memset(&grown.table.open, 0, sizeof grown.table - offsetof(struct backend, open));")
    with pytest.raises(DeviceError) as caught:
        _core.device_traits("fake", library)
    assert str(caught.value).endswith("needs: " + REQUIRED)


def test_a_library_without_the_symbol(build_library: Build, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"^device 'fake': its library has no llmpy_backend$"):
        _core.device_traits("fake", build_library(entry="another_name"))
    with pytest.raises(DeviceError, match=r"device 'fake': .*nowhere\.so: cannot open shared object file"):
        _core.device_traits("fake", str(tmp_path / "nowhere.so"))
    with pytest.raises(DeviceError, match=r"^device 'fake': no backend has this name$"):
        _core.device_traits("fake", "")


@pytest.mark.parametrize(
    "change",
    [
        "",
        "grown.table.size_bytes -= 8;",
        "grown.table.size_bytes -= 16;",
        "grown.table.size_bytes += sizeof grown.newer; traits.size_bytes += 8;",
    ],
)
def test_a_table_of_this_header_or_a_newer_one(change: str, build_library: Build) -> None:
    library = build_library(change)
    traits = _core.device_traits("fake", library)
    assert (traits["default_tokens"], traits["default_seqs"], traits["has_host_memory"]) == (77, 5, False)
    assert _core.backend_table("fake", library) == _core.backend_table("fake:1", library)


def test_what_the_core_gives(build_library: Build) -> None:
    """The library sees the core's sizes, converts a bfloat16 and a float, and finds no type of number 9."""
    library = build_library("""
        struct err err;
        uint16_t half = 0x3fc0, back = 0;
        float value = 0;
        host->err_set(&err, RC_DEVICE, "seen %d", 7);
        host->err_name(&err, "open", NULL);
        if (host->abi != BACKEND_ABI || host->revision != BACKEND_REVISION || host->size_bytes != sizeof(struct backend))
            grown.table.open = NULL;
        if (err.rc != RC_DEVICE || err.message[5] != '7' || err.what[3] != 'n')
            grown.table.close = NULL;
        if (!host->dtype_to_float(DTYPE_BF16, &half, &value, 1) || value != 1.5f)
            grown.table.upload = NULL;
        if (!host->dtype_from_float(DTYPE_BF16, &value, &back, 1) || back != half)
            grown.table.download = NULL;
        if (host->dtype_info(9) || host->dtype_info(DTYPE_BF16)->block_bytes != 2)
            grown.table.linear = NULL;
    """)  # fmt: skip
    assert _core.device_traits("fake", library)["default_tokens"] == 77
