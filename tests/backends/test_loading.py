"""What the core accepts as a backend's library, and how it refuses the others."""

import re
import subprocess
from pathlib import Path

import pytest

import llmpy
from llmpy import DeviceError, _core

LIBRARY = """
#include <llmpy_backend.h>

static void nothing(void) {}
#define SOME(name) .name = (void *)nothing,

static struct device_traits traits = {.size_bytes = sizeof traits, .default_tokens = 77, .default_seqs = 5};

/* The table, with room behind it for the fields of a newer header. */
static struct {
    struct backend table;
    void *newer[4];
} grown = {.table = {
    .abi = BACKEND_ABI, .size_bytes = sizeof grown.table, .name = "fake", .traits = &traits,
    SOME(open) SOME(close) SOME(describe) SOME(fusions) SOME(supports) SOME(activations) SOME(buffer_create)
    SOME(buffer_destroy) SOME(upload) SOME(download) SOME(synchronize) SOME(matrix_create) SOME(matrix_destroy)
    SOME(matrix_bytes) SOME(matrix_arithmetic) SOME(matrix_write) SOME(matrix_read) SOME(kv_layer_bytes) SOME(embed)
    SOME(linear) SOME(rms_norm) SOME(gated) SOME(add) SOME(select) SOME(rope) SOME(kv_write) SOME(attention)
}};

__attribute__((visibility("default"))) const struct backend *ENTRY_NAME(const struct backend_host *host)
{
    (void)host;
    CHANGE
    return &grown.table;
}
"""


def build(folder: Path, change: str, entry: str = "llmpy_backend") -> str:
    """A library whose table is changed by a line of C before it is handed out."""
    (folder / "fake.c").write_text(LIBRARY.replace("CHANGE", change).replace("ENTRY_NAME", entry))
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{llmpy.get_include()}"]
    subprocess.run(["cc", *flags, str(folder / "fake.c"), "-o", str(folder / "fake.so")], check=True)
    return str(folder / "fake.so")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("return NULL;", "needs a newer llmpy"),
        ("grown.table.abi--;", "has a struct backend of ABI 3 with 552 bytes; wanted ABI 4 with at least 552"),
        ("grown.table.size_bytes -= 8;", "has a struct backend of ABI 4 with 544 bytes; wanted ABI 4 with at least 552"),
        ("grown.table.linear = NULL;", "lacks entries that every backend needs: linear"),
        ("grown.table.open = NULL; grown.table.attention = NULL;", "lacks entries that every backend needs: open, attention"),
        ("grown.table.traits = NULL;", "lacks entries that every backend needs: traits"),
        ("traits.size_bytes = 8;", "has a struct device_traits of 8 bytes; wanted at least 32"),
    ],
)
def test_what_is_refused(change: str, reason: str, tmp_path: Path) -> None:
    library = build(tmp_path, change)
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            _core.device_traits("fake:0", library)
        assert str(caught.value) == f"device 'fake:0': its library {reason}"
        assert caught.value.operation == "open"


def test_all_entries_that_are_missing_are_named(tmp_path: Path) -> None:
    fields = re.findall(r"SOME\((\w+)\)", LIBRARY.partition(".traits = &traits")[2])
    library = build(tmp_path, "".join(f"grown.table.{field} = NULL;" for field in fields))
    with pytest.raises(DeviceError) as caught:
        _core.device_traits("fake", library)
    assert str(caught.value).partition("needs: ")[2].split(", ") == fields and len(fields) == 27


def test_a_library_without_the_symbol(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"^device 'fake': its library has no llmpy_backend$"):
        _core.device_traits("fake", build(tmp_path, "", entry="another_name"))
    with pytest.raises(DeviceError, match=r"device 'fake': .*nowhere\.so: cannot open shared object file"):
        _core.device_traits("fake", str(tmp_path / "nowhere.so"))
    with pytest.raises(DeviceError, match=r"^device 'fake': no backend has this name$"):
        _core.device_traits("fake", "")


@pytest.mark.parametrize("change", ["", "grown.table.size_bytes += sizeof grown.newer; traits.size_bytes += 8;"])
def test_a_table_of_this_header_or_a_newer_one(change: str, tmp_path: Path) -> None:
    library = build(tmp_path, change)
    traits = _core.device_traits("fake", library)
    assert (traits["default_tokens"], traits["default_seqs"], traits["has_host_memory"]) == (77, 5, False)
    assert _core.backend_table("fake", library) == _core.backend_table("fake:1", library)


def test_what_the_core_gives(tmp_path: Path) -> None:
    """The library sees the core's sizes, converts a bfloat16 and a float, and finds no type of number 9."""
    library = build(tmp_path, """
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
